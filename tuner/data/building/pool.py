"""Work on items in several processes, answered in the order of the items, in bounded memory.

One fresh interpreter (`worker.py`) loads the job and forks into the workers, which share what it loaded. It shares a
socket for each of them with this process and nothing else: it inherits no lock, thread or open file, runs no user
script, and is in no terminal's foreground group, so that Ctrl-C reaches this process alone. When this process ends,
however it ends, the sockets close and all of them exit.

`concurrent.futures.ProcessPoolExecutor` is not used: all its workers answer through one pipe, and one that is killed
while it answers leaves half a message there, for which the executor waits for ever. It also runs the user's script
again in every worker, and does not say how a worker died.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tuner.runtime.memory import calm_collector
from tuner.runtime.warned import pass_on

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Item_contra = TypeVar("Item_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)

_Outcome = tuple[Any, BaseException | None]
"""An answer, or the exception in its place."""
QUEUED = 2
"""Items that a worker holds: one in work and one that follows without a pause."""
WINDOW = 3
"""Items for each worker that are taken ahead of the answer that is due."""
END_S = 5.0
"""Seconds that workers have to end after their sockets closed, before they are killed."""
QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    # pyarrow's allocator would start a thread: a process with two is better not forked.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


class PoolJob(Protocol[Item_contra, Answer_co]):
    """What workers do; it and what it refers to can be pickled."""

    def start(self) -> Callable[[Item_contra], Answer_co]:
        """What answers an item; called once for all workers, before they are several, so it starts no thread."""


class WorkerDiedError(Exception):
    """A worker ended without answering an item; the message says how it ended."""


class WorkerPool(Generic[Item, Answer]):
    """`count` worker processes that do a job; as a context manager it ends them, at once after an error.

    They load the job from the moment on that the pool is made. OSError where they cannot be started.
    """

    def __init__(self, job: PoolJob[Item, Answer], count: int) -> None:
        with ExitStack() as theirs, ExitStack() as ours:
            pairs = [Pipe() for _ in range(count + 1)]
            for mine, its in pairs:
                theirs.enter_context(its)
                ours.enter_context(mine)
            # In a file, which waits for its reader: a socket would hold this process up until there is one.
            pickled = theirs.enter_context(tempfile.TemporaryFile())
            pickled.write(ForkingPickler.dumps(job))
            pickled.seek(0)
            sockets = [its.fileno() for _, its in pairs]
            command = [sys.executable, "-m", "tuner.data.building.worker", *map(str, sockets)]
            self._first = subprocess.Popen(
                command, stdin=pickled, stdout=subprocess.DEVNULL, env=_environment(), pass_fds=sockets, process_group=0
            )
            ours.pop_all()
        (self._exits, _), *others = pairs
        self._exit_codes: dict[int, int] = {}
        self._workers = [_Worker(number, connection) for number, (connection, _) in enumerate(others)]

    def answers(self, items: Iterable[Item]) -> Iterator[Answer]:
        """Yield the answer to every item, in the items' order, whatever the number of workers and their timing.

        At most `WINDOW` items for each worker are taken ahead. What a worker raises is raised here when its item's turn
        comes, so that the first failure in order is the one seen. So is WorkerDiedError, for one that dies at work.
        """
        source = enumerate(items)
        window = WINDOW * len(self._workers)
        done: dict[int, _Outcome] = {}
        sent = turn = 0
        while True:
            while turn not in done and sent - turn < window and self._has_room() and (found := next(source, None)):
                self._send(found[0], found[1], done)
                sent += 1
            if turn in done:
                answer, error = done.pop(turn)
                if error is not None:
                    raise error
                yield answer
                turn += 1
            elif any(worker.numbers for worker in self._workers):
                self._receive(done)
            else:
                return

    def end(self, at_once: bool = False) -> None:
        """End the workers: as soon as they look at their sockets, or without that."""
        for worker in self._workers:
            worker.connection.close()
        self._exits.close()
        try:
            self._first.wait(0 if at_once else END_S)
        except subprocess.TimeoutExpired:
            self._kill()

    def __enter__(self) -> "WorkerPool[Item, Answer]":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(at_once=kind is not None)

    def _has_room(self) -> bool:
        return any(len(worker.numbers) < QUEUED for worker in self._workers)

    def _send(self, number: int, item: Item, done: dict[int, _Outcome]) -> None:
        """Send an item to the worker that has the least to do."""
        worker = min(self._workers, key=lambda worker: len(worker.numbers))
        worker.numbers.append(number)
        try:
            # Never a deadlock: a thread of the worker reads whatever the worker itself is doing.
            worker.connection.send(item)
        except OSError:
            self._lost(worker, done)

    def _receive(self, done: dict[int, _Outcome]) -> None:
        """Wait for an answer, or for the death of a worker."""
        by_connection = {worker.connection: worker for worker in self._workers}
        for ready in wait(list(by_connection)):
            worker = by_connection[ready]  # type: ignore[index]  # only connections are waited for
            try:
                outcome, warnings = worker.connection.recv()
            except (EOFError, OSError):
                self._lost(worker, done)
            else:
                for text in warnings:
                    pass_on(text)
                done[worker.numbers.popleft()] = outcome

    def _lost(self, worker: "_Worker", done: dict[int, _Outcome]) -> None:
        """Give up on a worker whose socket closed: its items fail in their turn. WorkerDiedError: it had none."""
        code = self._exit_code(worker.number)
        death = WorkerDiedError(f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")
        if not worker.numbers:
            raise death
        done.update((number, (None, death)) for number in worker.numbers)
        self._workers.remove(worker)
        worker.connection.close()

    def _exit_code(self, number: int) -> int:
        """How a worker ended; a signal is negative. All are killed where it does not end."""
        try:
            while number not in self._exit_codes:
                if not self._exits.poll(END_S):
                    self._kill()
                self._exit_codes.update([self._exits.recv()])
        except (EOFError, OSError):  # who would have told is gone itself, before there were workers or after
            return self._kill()
        return self._exit_codes[number]

    def _kill(self) -> int:
        """Kill the workers and what they were forked from, and return its exit code."""
        # It is not waited for yet, so that its number still names the group of all.
        if self._first.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._first.pid, signal.SIGKILL)
        return self._first.wait()


@dataclass
class _Worker:
    """One process of a pool, and the numbers of the items that it holds."""

    number: int
    connection: "Connection[Any, Any]"
    numbers: deque[int] = field(default_factory=deque)


def answers(job: PoolJob[Item, Answer], items: Iterable[Item], workers: int) -> Generator[Answer, None, None]:
    """Yield the answer to every item in order: by this process where `workers` is 1, else by so many of a pool."""
    if workers > 1:
        with WorkerPool(job, workers) as pool:
            yield from pool.answers(items)
        return
    with calm_collector():
        yield from map(job.start(), items)


def _environment() -> dict[str, str]:
    """The environment of a worker: this process's module path, without the directory it happens to be in."""
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([root, *(entry for entry in sys.path if entry and entry != root)])
    return {**os.environ, **QUIET, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
