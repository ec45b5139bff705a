"""Work on items in several processes, answered in the order of the items.

An answer may leave something large behind in the process that gave it, and what becomes of that is said once the
answers before it are known: the receiver of an answer gives an order, and the process that holds the rest follows it.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from multiprocessing.connection import wait
from typing import Any, Generic, Protocol, TypeVar

from tuner.data.building.crew import Crew
from tuner.runtime.memory import calm_collector
from tuner.runtime.warned import pass_on

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Item_contra = TypeVar("Item_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)
Order = TypeVar("Order")
Order_contra = TypeVar("Order_contra", contravariant=True)

QUEUED = 2
"""Items that a worker holds: one in work and one that follows without a pause."""
ORDER, ITEM = 0, 1
"""What a worker is sent. Orders come first: they let go of memory."""
WARNING = 2
"""What a worker sends before an answer: the text of a warning of Python's `warnings`, for its parent to say."""


class Work(Protocol[Item_contra, Answer_co, Order_contra]):
    """What one process does; items are numbered from 0 over all processes."""

    def answer(self, number: int, item: Item_contra, /) -> Answer_co:
        """Answer an item."""

    def finish(self, number: int, order: Order_contra, /) -> None:
        """Do with what the answer left behind as is ordered."""


class Job(Protocol[Item_contra, Answer_co, Order_contra]):
    """What workers do; it and what it refers to can be pickled."""

    def start(self) -> Work[Item_contra, Answer_co, Order_contra]:
        """Begin; called once for all processes of a crew, before they are several, so it starts no thread."""


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
    crew: Crew | None = None,
) -> Generator[Answer, Order | None, None]:
    """Yield the answer to every item, in the items' order, whatever the number of workers and their timing.

    What is sent to the generator is the order for the answer last yielded; `finished` is called with an item's number
    when its order was followed, and the generator ends when all were. One worker is this process itself; more are
    `crew`, which was made with the job and their number and is ended here, or a new one. At most
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
    with crew or Crew(job, workers) as mates:
        running = _Workers(mates, finished)
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
    """One process of the crew, and the numbers of the items and orders that it holds."""

    def __init__(self, crew: Crew, number: int) -> None:
        self._crew = crew
        self._number = number
        self.connection = crew.connections[number]
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
        code = self._crew.exit_code(self._number)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.death = WorkerDiedError(how)
        failed = {number: _Outcome[Any](None, self.death) for number in self.items}
        self.is_told = bool(failed)
        self.items.clear()
        if self.orders and not failed:
            raise self.death
        return failed


class _Workers:
    """The processes of a crew at work on numbered items."""

    def __init__(self, crew: Crew, finished: Callable[[int], None]) -> None:
        self._finished = finished
        self._workers = [_Worker(crew, number) for number in range(len(crew.connections))]
        self._answered: dict[int, _Worker] = {}
        """Who holds what answers left behind, until it is ordered what becomes of it."""

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
            worker.connection.send((ITEM, number, item))
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
            worker.connection.send((ORDER, number, order))
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
                while kind == WARNING:
                    pass_on(answer)
                    kind, number, answer, error = worker.connection.recv()
            except (EOFError, OSError):
                outcomes |= worker.lost()
                continue
            if kind == ITEM:
                worker.items.remove(number)
                self._answered[number] = worker
                outcomes[number] = _Outcome(answer, error)
            elif error is not None:
                raise error
            else:
                worker.orders.remove(number)
                self._finished(number)
        return outcomes
