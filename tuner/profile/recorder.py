"""One step under the torch profiler: what it computes is what it computes without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from tuner.model.build import decoder_blocks
from tuner.model.root import CausalLM
from tuner.profile.blocks import MODULE, PHASE, MemoryRecord, Owned, gradients, memory_record, resident
from tuner.runtime import phase, torch_private
from tuner.train.step import TrainState

_COLLECTIVES = ("gloo:", "ncclDevKernel", "ncclKernel")
"""How the ranges of collectives at work begin: gloo's on a CPU, NCCL's kernels on CUDA."""


class StepRecorder:
    """Records what training does between :meth:`start` and :meth:`stop`: its parts in time, its blocks of memory.

    With ``modules`` the forward of each module is a range of its own; of compiled layers that of the layer.
    ``snapshot`` is where the CUDA allocator's history goes, with the line of code of each allocation. A trace has
    ``lines`` of Python, and with ``cuda_sync`` what streams wait for.
    """

    def __init__(
        self, train_state: TrainState, memory: bool = True, modules: bool = False, snapshot: Path | None = None,
        *, lines: bool = False, cuda_sync: bool = False,
    ) -> None:  # fmt: skip
        self._train_state, self._memory, self._modules = train_state, memory, modules
        self._device = train_state.step_config.device
        self._snapshot = snapshot if memory and self._device.type == "cuda" else None
        self._stack, self._part = ExitStack(), ExitStack()
        self._before: list[Owned] = []
        self._gradients: list[Owned] = []
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it reports every start and stop on stderr
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])
        config = torch_private.ProfilerConfig(enable_cuda_sync_events=True) if cuda_sync else None
        self._profile = profile(
            activities=activities, profile_memory=memory, with_stack=lines, experimental_config=config
        )

    def start(self) -> None:
        """From here on; the wait for data comes first."""
        train_state = self._train_state
        self._before = resident(train_state) if self._memory else []
        self._synchronize()
        if self._modules:
            self._stack.enter_context(_module_ranges(train_state.root))
        if self._snapshot is not None:
            torch_private.record_memory_history("all", context="alloc", stacks="python", device=self._device)
            self._stack.callback(torch_private.record_memory_history, None)
        self._stack.enter_context(phase.observed(self._mark))
        self._profile.start()
        self._mark("data")

    def stop(self) -> None:
        """No further; it may be called after a step or a start that failed, and leaves everything as it was."""
        try:
            self._part.close()
            self._synchronize()
            self._profile.stop()
            if self._snapshot is not None:
                torch_private.dump_snapshot(str(self._snapshot))
        finally:
            self._stack.close()

    def __enter__(self) -> StepRecorder:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def memory(self, failed: bool = False) -> MemoryRecord:
        """The blocks of memory of the device; of a step that ``failed``, until it did."""
        return memory_record(self._profile, self._device.type, self._before, self._gradients, failed)

    def communication_s(self) -> float:
        """Seconds in which data was on its way between processes, also where other work hides it."""
        at_work = (event.time_range for event in self._profile.events() if event.name.startswith(_COLLECTIVES))
        spans = sorted((span.start, span.end) for span in at_work)
        total = until = 0.0
        for start, end in spans:
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total / 1e6

    def write_trace(self, path: Path) -> None:
        """Write the trace as Chrome's tracing and Perfetto read it; ``path`` ends in `.json` or `.json.gz`."""
        self._profile.export_chrome_trace(str(path))

    def _mark(self, part: str) -> None:
        """A part of the step begins as a range in the trace, and the one before it ends."""
        if part == "optimizer" and self._memory:
            self._gradients = gradients(self._train_state)
        self._part.close()
        self._part.enter_context(record_function(PHASE + part))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextmanager
def _module_ranges(root: CausalLM) -> Iterator[None]:
    """Within, every module's forward is a range of its own; hooks inside compiled layers would compile them again."""
    running: list[record_function] = []

    def entering(name: str, module: nn.Module, inputs: object) -> None:
        running.append(record_function(MODULE + name))
        running[-1].__enter__()

    def leaving(module: nn.Module, inputs: object, output: object) -> None:
        running.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        compiled = decoder_blocks(root.model) if root.parts.padding is not None else []
        inside = {module for block in compiled for module in block.modules()} - set(compiled)
        for name, module in root.model.named_modules():
            if name and module not in inside:
                stack.callback(module.register_forward_pre_hook(partial(entering, name)).remove)
                stack.callback(module.register_forward_hook(leaving, always_call=True).remove)
        yield
