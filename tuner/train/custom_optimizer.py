"""An optimizer of the user's own: what it is given, and what it must keep to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tuner.config.optimizers import CustomOptimizer
from tuner.errors import PluginError, RecipeError, TunerError
from tuner.parallel.layouts import Layouts
from tuner.runtime.plugins import load, naming, require_call, source_file


class OwnOptimizer:
    """A torch optimizer of the user's own, whose failure names it and the line of its own code."""

    def __init__(self, inner: torch.optim.Optimizer, use: str, file: Path | None, layouts: Layouts) -> None:
        self._inner, self._use, self._file, self._layouts = inner, use, file, layouts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Its groups."""
        return self._inner.param_groups

    @property
    def state(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        """Its state, which may begin with its first step. Raises PluginError for what no checkpoint can hold."""
        for parameter, kept in self._inner.state.items():
            for name, value in kept.items():
                self._require_saveable(parameter, name, value)
        return self._inner.state

    def step(self) -> None:
        """Let it take a step. Raises PluginError for what it raises."""
        with naming(f"optimizer.use {self._use} failed in a step", self._file, (TunerError,)):
            self._inner.step()

    def _require_saveable(self, parameter: torch.Tensor, name: str, value: object) -> None:
        if name == "step":
            return
        if not isinstance(value, torch.Tensor):
            raise PluginError(
                f"optimizer.use {self._use} keeps {name}, a {type(value).__name__}, in its state",
                hint="a checkpoint holds tensors, and the number of steps under the name step",
            )
        if self._layouts[parameter].group is not None and value.shape != parameter.shape:
            raise PluginError(
                f"optimizer.use {self._use} keeps {name} in another shape than its parameter's, which is sharded",
                hint="write elementwise: false and parallel.shard: none",
            )


def build_own_optimizer(section: CustomOptimizer, groups: Sequence[dict[str, Any]], layouts: Layouts) -> OwnOptimizer:
    """Call what ``use`` names with groups of ``params``, ``names``, ``lr`` and ``weight_decay``.

    Raises PluginError where it is not there, fails, or leaves a parameter out; RecipeError where parameters are sharded
    and it needs them whole.
    """
    if not section.elementwise and any(layout.group is not None for layout in layouts.values()):
        raise RecipeError(
            f"optimizer.use {section.use} would see parts of sharded parameters",
            hint="write elementwise: true if each element's update needs no other, or parallel.shard: none and no "
            "other axis of parallel",
        )
    factory = load(section.use, "tuner.optimizers")
    require_call(factory, section.use, ("groups",), {"lr": section.lr, **section.options})
    file, names = source_file(factory), {p: n for g in groups for p, n in zip(g["params"], g["names"], strict=True)}
    with naming(f"optimizer.use {section.use} could not be built", file):
        built = factory([dict(group) for group in groups], lr=section.lr, **section.options)
    if not isinstance(built, torch.optim.Optimizer):
        raise PluginError(f"optimizer.use {section.use} gave a {type(built).__name__}, not a torch.optim.Optimizer")
    taken = {parameter for group in built.param_groups for parameter in group["params"]}
    if left := [name for parameter, name in names.items() if parameter not in taken]:
        raise PluginError(
            f"optimizer.use {section.use} leaves out {len(left)} of {len(names)} parameters: {', '.join(left[:3])}",
            hint="all that it is given are to be in its groups; model.freeze says what is not trained",
        )
    return OwnOptimizer(built, section.use, file, layouts)
