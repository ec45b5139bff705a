"""What runs in the processes of a pool: `python -m tuner.data.building.worker SOCKET..`, with the job on its input.

The first process loads the job, forks into one for each socket but the first, and tells on that one how they end.
"""

import contextlib
import gc
import mmap
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, NoReturn

from tuner.runtime.memory import calm_collector
from tuner.runtime.warned import python_warning

_heard: list[str] = []
"""Warnings of Python's `warnings` that this process met and did not tell its parent yet."""


def main() -> None:
    """Be the process that forks into the workers."""
    hear()
    exits, *sockets = map(int, sys.argv[1:])
    with calm_collector():
        _fork(Connection(exits), sockets, _started())


def _started() -> Callable[[Any], Any]:
    # Mapped and not read: others that get the same input find it whole.
    with mmap.mmap(sys.stdin.fileno(), 0, access=mmap.ACCESS_READ) as pickled:
        job = ForkingPickler.loads(pickled)
    try:
        answer: Callable[[Any], Any] = job.start()
    except Exception as error:  # every item is answered by it: the parent raises the first
        failure = error

        def answer(_: Any) -> NoReturn:
            raise failure

    return answer


def _fork(exits: "Connection[Any, Any]", sockets: Sequence[int], answer: Callable[[Any], Any]) -> NoReturn:
    """Start a worker for each socket, and tell how they end until all have: at the latest when the parent is gone."""
    numbers: dict[int, int] = {}
    gc.freeze()  # what is loaded is shared as long as nobody writes to it, and a look for cycles would
    for number, socket in enumerate(sockets):
        pid = os.fork()
        if pid == 0:
            exits.close()
            for other in sockets[number + 1 :]:
                os.close(other)
            _serve(socket, answer)
        numbers[pid] = number
        os.close(socket)
    while numbers:
        pid, status = os.waitpid(-1, 0)
        with contextlib.suppress(OSError):  # the parent may be gone, and then the others are about to end
            exits.send((numbers.pop(pid), os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _serve(socket: int, answer: Callable[[Any], Any]) -> NoReturn:
    """Answer items until the parent is gone."""
    connection: Connection[Any, Any] = Connection(socket)
    items: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, items), daemon=True).start()
    while True:
        try:
            message = _message(answer(ForkingPickler.loads(items.get())), None)
        except Exception as error:  # whatever it is, the parent decides
            message = _message(None, portable(error))
        try:
            connection.send_bytes(message)
        except OSError:
            os._exit(0)  # the parent is gone


def _receive(connection: "Connection[Any, Any]", items: "SimpleQueue[bytes]") -> None:
    """Take items as they come; when the parent is gone, end this process whatever it is doing."""
    try:
        while True:
            items.put(connection.recv_bytes())
    finally:
        os._exit(0)


def _message(answer: Any, error: Exception | None) -> Any:
    """An answer or an error, and what was warned of meanwhile, as they are sent."""
    return ForkingPickler.dumps(((answer, error), heard()))


def hear() -> None:
    """Keep what Python warns of from here on."""
    warnings.showwarning = lambda text, kind, file, line, *_: _heard.append(python_warning(text, kind, file, line))


def heard() -> list[str]:
    """What was warned of since this was asked last."""
    found = _heard.copy()
    _heard.clear()
    return found


def portable(error: Exception) -> Exception:
    """The error as the parent can receive it, with the worker's traceback as a note."""
    trace = "".join(traceback.format_exception(error))
    try:
        copied: Exception = ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # an exception class that cannot be pickled
        copied = RuntimeError(f"{type(error).__name__}: {error}")
    copied.add_note(f"in a worker process:\n{trace}")
    return copied


if __name__ == "__main__":
    main()
