"""What runs in the processes of a crew: `python -m tuner.data.building.worker SOCKET..`, with the job on its input.

The first process loads the job, divides into one process for each socket but the first, tells on that one how each of
them ends, and is gone when its parent is.
"""

import contextlib
import gc
import mmap
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import PriorityQueue
from typing import Any, NoReturn

from tuner.data.building.workers import ITEM, WARNING, Work
from tuner.runtime.memory import calm_collector
from tuner.runtime.warned import python_warning

_heard: list[str] = []
"""Warnings of Python's `warnings` that this process met and did not tell its parent yet."""
_ALONE = "alone"
"""The argument before the socket of a process that does not divide."""


def main() -> None:
    """Be the first process of a crew, or one that could not be divided from it."""
    warnings.showwarning = lambda *warning, **_: _heard.append(python_warning(*warning[:4]))
    with calm_collector():
        work = _started()
        if sys.argv[1] == _ALONE:
            _follow(int(sys.argv[2]), work)
        ends, *sockets = map(int, sys.argv[1:])
        _divide(Connection(ends), sockets, work)


def _started() -> Work[Any, Any, Any]:
    # Mapped and not read: others that get the same input find it whole.
    with mmap.mmap(sys.stdin.fileno(), 0, access=mmap.ACCESS_READ) as told:
        job = ForkingPickler.loads(told)
    try:
        work: Work[Any, Any, Any] = job.start()
    except Exception as error:  # every item is answered by it: the parent raises the first
        work = _NeverStarted(error)
    return work


class _NeverStarted:
    """The work of a job that could not be started."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def answer(self, number: int, item: object) -> NoReturn:
        raise self._error

    def finish(self, number: int, order: object) -> NoReturn:
        raise self._error


def _divide(ends: "Connection[Any, Any]", sockets: Sequence[int], work: Work[Any, Any, Any]) -> NoReturn:
    """Start a process for each socket; tell how they end until all have, or until the parent is gone."""
    if ends.poll():  # nothing is ever said on it: the parent is gone
        os._exit(0)
    can_fork = sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1
    numbers: dict[int, int] = {}
    gc.freeze()  # what is loaded is shared as long as nobody writes to it, and a look for cycles would
    for number, socket in enumerate(sockets):
        pid = os.fork() if can_fork else _alone(socket, (ends.fileno(), *sockets[number + 1 :]))
        if pid == 0:
            ends.close()
            for other in sockets[number + 1 :]:
                os.close(other)
            _follow(socket, work)
        numbers[pid] = number
        os.close(socket)
    threading.Thread(target=_end_with_parent, args=(ends,), daemon=True).start()
    while numbers:
        pid, status = os.waitpid(-1, 0)
        with contextlib.suppress(OSError):  # the parent may be gone, and then the others are about to end
            ends.send((numbers.pop(pid), os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _alone(socket: int, others: Sequence[int]) -> int:
    """Start a process that loads the job for itself, where dividing is not safe beside another thread; its id."""
    command = [sys.executable, "-m", "tuner.data.building.worker", _ALONE, str(socket)]
    closed = [(os.POSIX_SPAWN_CLOSE, other) for other in others]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=closed)


def _end_with_parent(ends: "Connection[Any, Any]") -> NoReturn:
    ends.poll(None)
    os._exit(0)


def _follow(socket: int, work: Work[Any, Any, Any]) -> NoReturn:
    """Answer items and follow orders until the parent is gone."""
    connection: Connection[Any, Any] = Connection(socket)
    tasks: PriorityQueue[tuple[int, int, Any]] = PriorityQueue()
    threading.Thread(target=_read, args=(connection, tasks), daemon=True).start()
    while True:
        kind, number, what = tasks.get()
        try:
            answer = (work.answer if kind == ITEM else work.finish)(number, what)
            message = ForkingPickler.dumps((kind, number, answer, None))
        except Exception as error:  # whatever it is, the parent decides
            message = ForkingPickler.dumps((kind, number, None, _portable(error)))
        try:
            while _heard:
                connection.send_bytes(ForkingPickler.dumps((WARNING, 0, _heard.pop(0), None)))
            connection.send_bytes(message)
        except OSError:
            os._exit(0)  # the parent is gone


def _read(connection: "Connection[Any, Any]", tasks: "PriorityQueue[tuple[int, int, Any]]") -> None:
    """Take items and orders as they come; when the parent is gone, end this process whatever it is doing."""
    try:
        while True:
            tasks.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:  # an item that cannot be read: without this thread the process would wait for ever
        traceback.print_exc()
        os._exit(1)


def _portable(error: Exception) -> Exception:
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
