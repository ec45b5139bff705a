"""Publishing a run that lies in an object store: after each save, in the background, and at the launch's end."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tuner.errors import MachineError, TunerError
from tuner.rundir.in_store import not_published, opened
from tuner.runtime.console import Console
from tuner.train.tasks import Event, Request, Task

if TYPE_CHECKING:
    from tuner.stores.transfer import StageSnapshot

STEP = "step"
"""What a commit notes of a run: after which step it was taken."""


class Publisher(Task):
    """Publishes a run's stage after each save in the background, the newest state first; a context manager, in which
    the run's lease is held.

    What fails is a warning while training continues: the next save publishes all of it. Entering raises MachineError
    where another launch has the run.
    """

    def __init__(self, stage: Path, console: Console) -> None:
        self._stage, self._console, self._store = stage, console, opened(stage)
        self._lease = self._store.lease(stage, True, lambda text: console.say("store", text))
        self._pool = ThreadPoolExecutor(1, "store")
        self._next: tuple[StageSnapshot, Future[None]] | None = None

    def request(self) -> Request:
        """To stop, once another launch has taken the run over."""
        return Request.NONE if self._lease.taken_by is None else Request.STOP

    def notify(self, event: Event) -> None:
        """Publish the run as it is after a save. One that still waits gives way."""
        if event.stage != "save":
            return
        try:
            taken = self._store.snapshot(self._stage, {STEP: event.step})
        except TunerError as failed:
            self._console.warn(f"not published: {failed.message}; training continues")
            return
        self._give_way()
        self._next = taken, self._pool.submit(self._publish, taken)

    def __enter__(self) -> Publisher:
        self._lease.__enter__()
        try:
            self._store.require_based(self._stage)
            self._store.collect()
        except BaseException:
            self._lease.__exit__()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._give_way()
            if error is None:
                self._publish_end()
            elif isinstance(error, Exception):  # how it failed is a part of the run; that error is the one to show
                with suppress(TunerError):
                    self._publish_end()
        finally:
            self._pool.shutdown(wait=False)
            self._lease.__exit__(kind, error, trace)

    def _publish_end(self) -> None:
        """Publish the run as the launch leaves it, once what is on its way is done. Raises MachineError."""
        with self._console.doing("publishing the run"):
            self._pool.shutdown()
            self._give_way()
            try:
                self._store.publish(self._store.snapshot(self._stage, {}))
            except MachineError as error:
                raise not_published(self._stage, error) from error

    def _give_way(self) -> None:
        """Have what waits yield to a newer state. Raises what was no error of a store in what is done."""
        if self._next is not None:
            taken, future = self._next
            if future.cancel():
                taken.close()
            elif future.done():
                future.result()

    def _publish(self, taken: StageSnapshot) -> None:
        try:
            self._store.publish(taken)
        except TunerError as failed:
            self._console.warn(f"not published: {failed.message}; training continues")
