"""A look at steps as they are taken: what a command may attach to training, which knows neither export nor profile."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from tuner.run.setup import Assembly
from tuner.runtime.console import Console


class Watch(Protocol):
    """Looks on, on every rank. It changes nothing of what a step computes, and what fails in it fails no step."""

    def step(self, number: int) -> AbstractContextManager[None]:
        """Around taking step ``number``, its wait for data included; 0 is the mock batch before the first one.

        Running out of memory inside may leave it as a MemoryLimitError that says more; the run ends either way.
        """


class NoWatch:
    """Nobody looks."""

    def step(self, number: int) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()


MakeWatch = Callable[[Assembly, Path, Console], Watch]
"""Builds what looks on at a launch, from its assembly, its run directory and where it speaks."""
