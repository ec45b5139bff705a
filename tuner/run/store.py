"""Publishing a run that lies in an object store: after each save, in the background, and at the launch's end."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tuner.errors import MachineError, TunerError
from tuner.rundir.in_store import not_published, opened
from tuner.runtime.console import Console
from tuner.stores.upload import StageSnapshot
from tuner.train.tasks import Event, Request, Task

STEP = "step"
"""What a commit notes of a run: after which step it was taken."""


class Publisher:
    """Publishes a run's stage in the background, the newest state first, under a lease; a context manager.

    What fails is a warning while training continues: the next save publishes all of it. Entering raises MachineError
    where another launch has the run.
    """

    def __init__(self, stage: Path, console: Console) -> None:
        self._stage, self._console, self._store = stage, console, opened(stage)
        self._lease = self._store.lease(stage, True, lambda text: console.say("store", text))
        self._changed = threading.Condition()
        self._waiting: StageSnapshot | None = None
        self._is_busy = self._is_over = False
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)

    @property
    def lost(self) -> bool:
        """Whether another launch has taken the run over."""
        return self._lease.lost

    def saved(self, step: int) -> None:
        """The run was saved after `step`: publish it as it is now. One that still waits gives way."""
        try:
            taken = self._store.snapshot(self._stage, {STEP: step})
        except TunerError as failed:
            self._console.warn(f"not published: {failed.message}; training continues")
            return
        with self._changed:
            before, self._waiting = self._waiting, taken
            self._changed.notify_all()
        if before is not None:
            before.close()

    def finish(self) -> None:
        """Publish the run as the launch leaves it, once what is on its way is done. Raises MachineError."""
        with self._changed:
            before, self._waiting = self._waiting, None
            if self._is_busy:
                with self._console.doing("publishing the run"):
                    self._changed.wait_for(lambda: not self._is_busy)
        if before is not None:
            before.close()
        try:
            with self._console.doing("publishing the run"):
                self._store.publish(self._store.snapshot(self._stage, {}))
        except MachineError as error:
            raise not_published(self._stage, error) from error

    def task(self) -> PublishTask:
        """What hands saves over."""
        return PublishTask(self)

    def __enter__(self) -> Publisher:
        self._lease.__enter__()
        try:
            self._store.require_based(self._stage)
            self._store.collect()
        except BaseException:
            self._lease.__exit__()
            raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
            elif isinstance(error, Exception):  # how it failed is a part of the run; that error is the one to show
                with suppress(TunerError):
                    self.finish()
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            self._lease.__exit__(kind, error, trace)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_over)
                taken, self._waiting = self._waiting, None
                if taken is None:
                    return
                self._is_busy = True
            try:
                self._store.publish(taken)
            except TunerError as failed:
                self._console.warn(f"not published: {failed.message}; training continues")
            finally:
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()


class PublishTask(Task):
    """Hands each save to the publisher, and ends the launch in order where another has taken its run over."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def request(self) -> Request:
        """To stop, once the run is another launch's."""
        return Request.STOP if self._publisher.lost else Request.NONE

    def notify(self, event: Event) -> None:
        """Publish after a save."""
        if event.stage == "save":
            self._publisher.saved(event.step)
