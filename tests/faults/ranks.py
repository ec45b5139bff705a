"""Several ranks in forked processes, watched as a launcher watches them."""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

HANGS = 99
TIMEOUT_S = 15
"""Of the recipe: the longest wait for another process."""
PATIENCE_S = 3.0 * TIMEOUT_S
"""How long the others may go on after one has died: one that waits for it may begin to do so later."""


def run_ranks(count: int, work: Callable[[], int]) -> int:
    """Run `work` as each rank of a gloo group; the first exit code that is not 0, HANGS where one does not end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = {_start(rank, count, place, work) for rank in range(count)}
    code, deadline = 0, float("inf")
    while ranks:
        done, status = os.waitpid(-1, os.WNOHANG)
        if done in ranks:
            ranks.remove(done)
            ended = os.waitstatus_to_exitcode(status)
            code = code or (128 - ended if ended < 0 else ended)
            deadline = min(deadline, time.monotonic() + PATIENCE_S) if ended else deadline
        elif time.monotonic() > deadline:
            print(f"ranks hang: {sorted(ranks)}", flush=True)
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
            return HANGS
        else:
            time.sleep(0.002)
    return code


def _start(rank: int, count: int, place: dict[str, object], work: Callable[[], int]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        numbers = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
        os.environ.update({name: str(value) for name, value in {**place, **numbers}.items()})
        code = work()
    except BaseException:  # noqa: BLE001 - told by the exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
