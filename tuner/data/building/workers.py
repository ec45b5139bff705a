"""Work on items in several processes, answered in the order of the items.

An answer may leave something large behind in the process that gave it, and what becomes of that is said once the
answers before it are known: the receiver of an answer gives an order, and the process that holds the rest follows it.

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
from queue import PriorityQueue
from typing import Any, Generic, Protocol, TypeVar

from tuner.runtime.memory import calm_collector

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Item_contra = TypeVar("Item_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)
Order = TypeVar("Order")
Order_contra = TypeVar("Order_contra", contravariant=True)

QUEUED = 2
"""Items that a worker holds: one in work and one that follows without a pause."""
_ORDER, _ITEM = 0, 1
"""What a worker is sent. Orders come first: they let go of memory."""
END_S = 5.0
"""Seconds that a worker has to end after its socket closed, before it is killed."""
_ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Work(Protocol[Item_contra, Answer_co, Order_contra]):
    """What one process does; items are numbered from 0 over all processes."""

    def answer(self, number: int, item: Item_contra, /) -> Answer_co:
        """Answer an item."""

    def finish(self, number: int, order: Order_contra, /) -> None:
        """Do with what the answer left behind as is ordered."""


class Job(Protocol[Item_contra, Answer_co, Order_contra]):
    """What workers do; it is sent to each once, so it and what it refers to can be pickled."""

    def start(self) -> Work[Item_contra, Answer_co, Order_contra]:
        """Begin; called once in each process."""


class WorkerDiedError(Exception):
    """A worker ended without answering an item; `how` says how it ended."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


def answers(
    job: Job[Item, Answer, Order],
    items: Iterable[Item],
    workers: int,
    finished: Callable[[int], None] = lambda number: None,
) -> Generator[Answer, Order | None, None]:
    """Yield the answer to every item, in the items' order, whatever the number of workers and their timing.

    What is sent to the generator is the order for the answer last yielded; `finished` is called with an item's number
    when its order was followed, and the generator ends when all were. One worker is this process itself. At most
    `(QUEUED + 1) * workers` items are taken ahead of the one yielded. What a worker raises is raised here when its
    item's turn comes, so that the first failure in order is the one seen; a worker that dies raises WorkerDiedError
    then. What following an order raises is raised as soon as it is known.
    """
    if workers <= 1:
        with calm_collector():
            work = job.start()
            for number, item in enumerate(items):
                order = yield work.answer(number, item)
                if order is not None:
                    work.finish(number, order)
                    finished(number)
        return
    with _Workers(job, workers, finished) as running:
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
                order = yield done.pop(turn).get()
                done.update(running.order(turn, order))
                turn += 1
            elif turn < sent:
                done.update(running.receive())
        while running.are_ordered():
            running.receive()


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
    """One worker process, the parent's end of its socket, and the numbers of the items and orders that it holds."""

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
        self.orders: set[int] = set()
        self.death: WorkerDiedError | None = None
        """Set once the socket is closed."""
        self.is_told = False
        """Whether an item fails of its death, so that it comes up in its turn."""

    @property
    def alive(self) -> bool:
        """Whether items can be sent to it."""
        return self.death is None

    def lost(self) -> dict[int, "_Outcome[Any]"]:
        """Give up on a worker whose socket closed: each of its items fails. WorkerDiedError: it had orders alone."""
        self.connection.close()
        code = _ended(self.process)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.death = WorkerDiedError(how)
        failed = {number: _Outcome[Any](None, self.death) for number in self.items}
        self.is_told = bool(failed)
        self.items.clear()
        if self.orders and not failed:
            raise self.death
        return failed


class _Workers:
    """The worker processes of one job; as a context manager it ends them, at once after an error."""

    def __init__(self, job: Job[Any, Any, Any], count: int, finished: Callable[[int], None]) -> None:
        self._job = job
        self._count = count
        self._finished = finished
        self._workers: list[_Worker] = []
        self._answered: dict[int, _Worker] = {}
        """Who holds what answers left behind, until it is ordered what becomes of it."""

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
            worker.connection.send((_ITEM, number, item))
        except OSError:
            return worker.lost()
        return {}

    def order(self, number: int, order: object) -> dict[int, _Outcome[Any]]:
        """Send the order, if there is one, for what an answer left behind; returns what failed for it."""
        worker = self._answered.pop(number)
        if order is None:
            return {}
        worker.orders.add(number)
        if worker.death is not None:
            if worker.is_told:
                return {}
            raise worker.death
        try:
            worker.connection.send((_ORDER, number, order))
        except OSError:
            return worker.lost()
        return {}

    def are_ordered(self) -> bool:
        """Whether an order was not yet followed."""
        return any(worker.orders for worker in self._workers)

    def receive(self) -> dict[int, _Outcome[Any]]:
        """Wait for answers or followed orders, at least one, or for the death of a worker."""
        outcomes: dict[int, _Outcome[Any]] = {}
        by_connection = {worker.connection: worker for worker in self._workers if worker.alive}
        for ready in wait(list(by_connection)):
            worker = by_connection[ready]  # type: ignore[index]  # only connections are waited for
            try:
                kind, number, answer, error = worker.connection.recv()
            except (EOFError, OSError):
                outcomes |= worker.lost()
                continue
            if kind == _ITEM:
                worker.items.remove(number)
                self._answered[number] = worker
                outcomes[number] = _Outcome(answer, error)
            elif error is not None:
                raise error
            else:
                worker.orders.remove(number)
                self._finished(number)
        return outcomes

    def _end(self, at_once: bool) -> None:
        for worker in self._workers:
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
    """Answer items and follow orders until the parent is gone; never returns."""
    tasks: PriorityQueue[tuple[int, int, Any]] = PriorityQueue()
    job: Job[Any, Any, Any] = connection.recv()
    threading.Thread(target=_read, args=(connection, tasks), daemon=True).start()
    work: Work[Any, Any, Any] | None = None
    while True:
        kind, number, what = tasks.get()
        try:
            work = work or job.start()
            answer = (work.answer if kind == _ITEM else work.finish)(number, what)
            message = ForkingPickler.dumps((kind, number, answer, None))
        except Exception as error:  # whatever it is, the parent decides
            message = ForkingPickler.dumps((kind, number, None, _portable(error)))
        connection.send_bytes(message)


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


def main() -> None:
    """Be a worker: the one argument is the descriptor of the socket."""
    try:
        with calm_collector():
            _work(Connection(int(sys.argv[1])))
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone


if __name__ == "__main__":
    main()
