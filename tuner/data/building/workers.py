"""Work on items in several processes, answered in the order of the items.

A worker is `python -m tuner.data.building.workers`, a fresh interpreter that shares one socket with its parent and
nothing else: it inherits no lock, thread or open file, imports no user script, and is in no terminal's foreground
group, so that Ctrl-C reaches the parent alone. When the parent ends, however it ends, the socket closes and the worker
exits.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from tuner.runtime.memory import calm_collector

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Item_contra = TypeVar("Item_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)

QUEUED = 2
"""Items that a worker holds: one in work and one that follows without a pause."""
END_S = 5.0
"""Seconds that a worker has to end after its socket closed, before it is killed."""
_ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Job(Protocol[Item_contra, Answer_co]):
    """What workers do; it is sent to each once, so it and what it refers to can be pickled."""

    def start(self) -> Callable[[Item_contra], Answer_co]:
        """Return the function that answers one item; called once in each process."""


class WorkerDiedError(Exception):
    """A worker ended without answering an item; `how` says how it ended."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


def answers(job: Job[Item, Answer], items: Iterable[Item], workers: int) -> Generator[Answer, None, None]:
    """Yield the answer to every item, in the items' order, whatever the number of workers and their timing.

    One worker is this process itself. At most `(QUEUED + 1) * workers` items are taken ahead of the one yielded. What
    a worker raises is raised here when its item's turn comes, so that the first failure in order is the one seen; a
    worker that dies raises WorkerDiedError then.
    """
    if workers <= 1:
        work = job.start()
        with calm_collector():
            yield from map(work, items)
        return
    with _Workers(job, workers) as running:
        source = iter(items)
        sent = turn = 0
        done: dict[int, _Outcome[Answer]] = {}
        more = True
        while more or turn < sent:
            while more and turn not in done and sent - turn < (QUEUED + 1) * workers and running.have_room():
                try:
                    item = next(source)
                except StopIteration:
                    more = False
                else:
                    done.update(running.send(sent, item))
                    sent += 1
            if turn in done:
                yield done.pop(turn).get()
                turn += 1
            elif turn < sent:
                done.update(running.receive())


class _Outcome(Generic[Answer]):
    """An answer, or the exception in its place."""

    def __init__(self, answer: Answer | None, error: BaseException | None = None) -> None:
        self._answer = answer
        self._error = error

    def get(self) -> Answer:
        if self._error is not None:
            raise self._error
        return self._answer  # type: ignore[return-value]  # it is an Answer wherever there is no error


class _Worker:
    """One worker process, the parent's end of its socket, and the numbers of the items that it holds."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tuner.data.building.workers", str(theirs.fileno())]
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=_environment(),
                    pass_fds=[theirs.fileno()],
                    process_group=0,
                )
            except BaseException:
                ours.close()
                raise
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.items: deque[int] = deque()
        self.alive = True

    def lost(self) -> dict[int, "_Outcome[Any]"]:
        """Give up on a worker whose socket closed: each of its items fails."""
        self.alive = False
        self.connection.close()
        code = _ended(self.process)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        failed = {number: _Outcome[Any](None, WorkerDiedError(how)) for number in self.items}
        self.items.clear()
        return failed


class _Workers:
    """The worker processes of one job; as a context manager it ends them, at once after an error."""

    def __init__(self, job: Job[Any, Any], count: int) -> None:
        self._job = job
        self._count = count
        self._workers: list[_Worker] = []

    def __enter__(self) -> "_Workers":
        try:
            for _ in range(self._count):
                self._workers.append(_Worker())
            message = ForkingPickler.dumps(self._job)
            for worker in self._workers:
                with contextlib.suppress(OSError):  # it died already: the first item will tell
                    worker.connection.send_bytes(message)
        except BaseException:
            self._end(at_once=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(at_once=kind is not None)

    def have_room(self) -> bool:
        """Whether an item can be sent without waiting; with no worker left it can, and fails."""
        alive = [worker for worker in self._workers if worker.alive]
        return not alive or any(len(worker.items) < QUEUED for worker in alive)

    def send(self, number: int, item: object) -> dict[int, _Outcome[Any]]:
        """Send an item to the worker that has the least to do; returns what failed for it."""
        alive = [worker for worker in self._workers if worker.alive]
        if not alive:
            return {number: _Outcome[Any](None, WorkerDiedError("could not be started"))}
        worker = min(alive, key=lambda worker: len(worker.items))
        worker.items.append(number)
        try:
            # Never a deadlock: a thread of the worker reads whatever the worker itself is doing.
            worker.connection.send((number, item))
        except OSError:
            return worker.lost()
        return {}

    def receive(self) -> dict[int, _Outcome[Any]]:
        """Wait for answers, at least one, or for the death of a worker."""
        outcomes: dict[int, _Outcome[Any]] = {}
        by_connection = {worker.connection: worker for worker in self._workers if worker.alive}
        for ready in wait(list(by_connection)):
            worker = by_connection[ready]  # type: ignore[index]  # only connections are waited for
            try:
                number, answer, error = worker.connection.recv()
            except (EOFError, OSError):
                outcomes |= worker.lost()
            else:
                worker.items.remove(number)
                outcomes[number] = _Outcome(answer, error)
        return outcomes

    def _end(self, at_once: bool) -> None:
        for worker in self._workers:
            if worker.alive:
                worker.alive = False
                worker.connection.close()
            if at_once:
                worker.process.kill()
        for worker in self._workers:
            _ended(worker.process)


def _ended(process: "subprocess.Popen[bytes]") -> int:
    """The exit code of a process that is about to end; it is killed when it does not."""
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _environment() -> dict[str, str]:
    """The environment of a worker: this process's module path, without the directory it happens to be in."""
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([root, *(entry for entry in sys.path if entry and entry != root)])
    return {**os.environ, **_ONE_THREAD, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _work(connection: "Connection[Any, Any]") -> None:
    """Answer items until the parent is gone; never returns."""
    items: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    job: Job[Any, Any] = connection.recv()
    threading.Thread(target=_read, args=(connection, items), daemon=True).start()
    work: Callable[[Any], Any] | None = None
    while True:
        number, item = items.get()
        try:
            work = work or job.start()
            message = ForkingPickler.dumps((number, work(item), None))
        except Exception as error:  # whatever it is, the parent decides
            message = ForkingPickler.dumps((number, None, _portable(error)))
        connection.send_bytes(message)


def _read(connection: "Connection[Any, Any]", items: "SimpleQueue[tuple[int, Any]]") -> None:
    """Take items as they come; when the parent is gone, end this process whatever it is doing."""
    try:
        while True:
            items.put(connection.recv())
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


def main() -> None:
    """Be a worker: the one argument is the descriptor of the socket."""
    try:
        with calm_collector():
            _work(Connection(int(sys.argv[1])))
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone


if __name__ == "__main__":
    main()
