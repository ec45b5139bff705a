"""A rank that does what the test asks of it; it needs no torch."""

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

from tuner.errors import DataError, LostRankError
from tuner.runtime import phase
from tuner.runtime.console import Console
from tuner.runtime.stop import StopSignals


def listening(port: str) -> list[str]:
    """The addresses, in the kernel's hexadecimal, on which something listens at `port`."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    ends = [words[1].split(":") for words in lines if words[3] == "0A"]
    return [address for address, number in ends if int(number, 16) == int(port)]


def warn(rank: int) -> None:
    """Have a library warn, and the console, twice."""
    warnings.warn("from a library", UserWarning, stacklevel=1)
    console = Console(main=rank == 0)
    for _ in range(2):
        console.warn(f"rank {rank} is odd")


def say_ready(job: dict[str, Any], rank: int) -> None:
    """Show that signals are waited for, and by which process."""
    Path(job["ready"], str(rank)).symlink_to(str(os.getpid()))


def work(job: dict[str, Any]) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    print(f"rank {rank} prints")
    action, _, words = job["actions"][rank].partition(" at ")
    if words:
        phase.enter(words)
    if action.startswith("warns, "):
        warn(rank)
        action = action.removeprefix("warns, ")
    match action:
        case "facts":
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
            session = os.getsid(0) == os.getpid()
            return {**{n: os.environ[n] for n in names}, "session": session, "at": listening(os.environ["MASTER_PORT"])}
        case "data error":
            raise DataError("bad row", hint="mend it")
        case "agreed":
            raise DataError("rank 1: bad row")
        case "same":
            raise DataError("bad everywhere")
        case "bug":
            raise ValueError("oops")
        case "lost":
            time.sleep(0.3)
            raise LostRankError("lost another")
        case "late":
            time.sleep(0.6)
            raise ValueError("because another one failed")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            time.sleep(60)
        case "stops":
            with StopSignals() as signals:
                say_ready(job, rank)
                while not signals.requested:
                    time.sleep(0.01)
                time.sleep(job.get("stop_s", 0))
                return {"signal": signals.signal_name}
        case "deaf":
            say_ready(job, rank)
            time.sleep(60)
    return {}

