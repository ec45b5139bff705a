"""Work in a thread beside training, one piece at a time."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Background(Generic[T]):
    """At most one piece of work in a thread. What it raised is raised where its end is waited for.

    The thread does not keep the process from ending, as one of a pool would: one that waits for a rank that is gone
    could never be joined. A new thread's CUDA device is the first one, whatever this process computes on: with a
    ``device``, the thread makes that its own before anything else, so that no process has a context on another's.
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self._name, self._device = name, device
        self._work: Future[T] | None = None

    @property
    def ended(self) -> bool:
        """Whether there is such work, and waiting for it takes no time."""
        return self._work is not None and self._work.done()

    def start(self, work: Callable[[], T]) -> None:
        """Do the work in the thread. Raises RuntimeError while there is other work that was not waited for."""
        if self._work is not None:
            raise RuntimeError(f"{self._name}: the one before was not waited for")
        future = self._work = Future[T]()

        def run() -> None:
            try:
                if self._device is not None:
                    torch.cuda.set_device(self._device)
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again by `finish`
                future.set_exception(error)

        threading.Thread(target=run, name=self._name, daemon=True).start()

    def finish(self) -> T | None:
        """Wait for the work; its result, None where there was none. Raises what it raised."""
        if self._work is None:
            return None
        self._work.exception()  # of one whose wait is interrupted the end can be waited for again
        future, self._work = self._work, None
        return future.result()
