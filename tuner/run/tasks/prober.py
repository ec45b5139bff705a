"""The task that writes activations and gradients of chosen modules in chosen steps, to compare two runs by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from tuner.checkpoint.manifest import step_name
from tuner.config.numbers import is_among
from tuner.config.recipe import ProberSection
from tuner.errors import counted
from tuner.model.freeze import select_modules
from tuner.model.outputs import outputs_seen
from tuner.parallel.layouts import whole
from tuner.rundir.layout import PROBER
from tuner.runtime import phase
from tuner.runtime.console import Console
from tuner.setup.build import Assembly
from tuner.train.tasks import Task


class ProberTask(Task):
    """Looks on through hooks that change nothing, for the length of a chosen step.

    Each process writes what its own rows gave, the first one also the gradients of parameters, whole: names and shapes
    of these are the same on any number of processes. Making one raises RecipeError for a name that means no module.
    """

    def __init__(self, assembly: Assembly, section: ProberSection, run_dir: Path, console: Console) -> None:
        self._section, self._skipped = section, assembly.steps_to_skip
        model, self._rank_info = assembly.train_state.root.model, assembly.rank_info
        self._directory, self._console = run_dir / PROBER, console
        self._modules = select_modules(model, self._section.modules, "prober.modules")
        last = assembly.timetable.plan.total_steps
        if beyond := [str(steps) for steps in self._section.steps if steps.last > last]:
            console.warn(f"prober.steps: {', '.join(beyond)} reaches beyond the last step, {last}")

    @contextmanager
    def around_step(self, number: int) -> Iterator[None]:
        """Record step ``number`` where the recipe says so. Collective then, where parameters are sharded."""
        if not is_among(number, self._section.steps) or is_among(number, self._skipped):
            yield
            return
        section = self._section
        recording = Recording(self._modules, section.gradients, self._rank_info.is_main, section.first_rows)
        with recording.of_a_step():
            yield
        self._write(number, recording)

    def _write(self, number: int, recording: Recording) -> None:
        directory = self._directory / step_name(number)
        path = directory / f"rank-{self._rank_info.rank}.safetensors"
        facts = {"step": str(number), "rank": str(self._rank_info.rank), "processes": str(self._rank_info.world_size)}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            save_file(recording.tensors, path, metadata=facts)
        except OSError as error:
            self._console.warn(f"prober: {path} could not be written: {error.strerror or error}; training continues")
            return
        self._console.say("prober", f"step {number}: {counted(len(recording.tensors), 'tensor')} in {directory}")
        if unseen := [name for name in self._modules if name not in recording.seen]:
            more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
            self._console.warn(
                f"prober: nothing went through {', '.join(unseen[:3])}{more}: a kernel computes them without calling "
                "them; model.kernels: torch calls every module"
            )


class Recording:
    """What the hooks of one step have seen, on the host, by name.

    ``micro-0/layers.0.mlp/output`` is the first tensor that a module gave in a micro-batch, ``…/output.1`` that of its
    second call in it, ``…/output_grad`` the gradient of it; ``gradients/layers.0.mlp.up_proj.weight`` that of a
    parameter over the whole global batch, before clipping and, under fp16, of the scaled loss: its ``first_rows``.
    """

    def __init__(
        self, modules: dict[str, nn.Module], gradients: bool, is_main: bool, first_rows: int | None = None
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.seen: set[str] = set()
        self._modules, self._gradients, self._is_main = modules, gradients, is_main
        self._first_rows = first_rows
        self._micro = -1
        self._calls: Counter[str] = Counter()

    @contextmanager
    def of_a_step(self) -> Iterator[None]:
        """Hooks on the modules, and an eye on the parts of the step."""
        with outputs_seen(self._modules.items(), self._see), phase.observed(self._enter):
            yield

    def _enter(self, part: str) -> None:
        if part == "forward":
            self._micro += 1
            self._calls.clear()
        elif part == "optimizer" and self._gradients:
            self._keep_gradients()

    def _see(self, name: str, tensor: torch.Tensor) -> None:
        self.seen.add(name)
        call = self._calls[name]
        self._calls[name] += 1
        key = f"micro-{self._micro}/{name}/output" + (f".{call}" if call else "")
        self._keep(key, tensor)
        if self._gradients and tensor.requires_grad:
            tensor.register_hook(partial(self._keep, key.replace("/output", "/output_grad")))

    def _keep(self, key: str, tensor: torch.Tensor) -> None:
        self.tensors[key] = tensor.detach().to("cpu", copy=True).contiguous()

    def _keep_gradients(self) -> None:
        """Those of the modules' own parameters, whole on the first process. Collective where they are sharded."""
        for name, module in self._modules.items():
            for own, parameter in module.named_parameters(recurse=False):
                if (gradient := parameter.grad) is None:
                    continue
                found = whole(gradient)
                if self._is_main:
                    self._keep(f"gradients/{name}.{own}", found[: self._first_rows])
