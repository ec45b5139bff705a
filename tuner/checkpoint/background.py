"""A save beside the work that goes on: one at a time, in a thread of its own that joins no collective of the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """At most one piece of work in a thread. What it raised is raised where its end is waited for.

    The thread does not keep the process from ending: one that waits for a rank that is gone could never be joined.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def in_flight(self) -> bool:
        """Whether there is work whose end has not been waited for."""
        return self._thread is not None

    @property
    def ended(self) -> bool:
        """Whether there is such work, and waiting for it takes no time."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, work: Callable[[], T]) -> None:
        """Do the work in the thread. Raises RuntimeError while there is other work that was not waited for."""
        if self._thread is not None:
            raise RuntimeError(f"{self._name}: the one before was not waited for")

        def run() -> None:
            try:
                self._result = work()
            except BaseException as error:  # noqa: BLE001 - raised again by `finish`
                self._error = error

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def finish(self) -> T | None:
        """Wait for the work; its result, None where there was none. Raises what it raised."""
        if self._thread is None:
            return None
        self._thread.join()
        result, error = self._result, self._error
        self._thread = self._result = self._error = None
        if error is not None:
            raise error
        return result
