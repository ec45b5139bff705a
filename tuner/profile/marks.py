"""Names of ranges that a recorded step leaves in a trace: parts of the step, and modules at work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

PHASE, MODULE = "tuner.", "tuner.module "
PHASES = ("data", "forward", "backward", "optimizer")


class PhaseMarks:
    """Receives the marks of a training step and leaves each part as a range in the profiler's trace."""

    def __init__(self) -> None:
        self._open: record_function | None = None

    def mark(self, phase: str) -> None:
        """``phase`` begins, and the one before it ends."""
        self.end()
        self._open = record_function(PHASE + phase)
        self._open.__enter__()

    def end(self) -> None:
        """The last one ends."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


@contextmanager
def module_ranges(root: nn.Module) -> Iterator[None]:
    """Within, every module's forward is a range of its own."""
    handles: list[RemovableHandle] = []
    running: list[record_function] = []

    def entering(name: str) -> Any:
        def hook(module: nn.Module, inputs: object) -> None:
            running.append(record_function(MODULE + name))
            running[-1].__enter__()

        return hook

    def leaving(module: nn.Module, inputs: object, output: object) -> None:
        running.pop().__exit__(None, None, None)

    try:
        for name, module in root.named_modules():
            if name:
                handles.append(module.register_forward_pre_hook(entering(name)))
                handles.append(module.register_forward_hook(leaving, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
