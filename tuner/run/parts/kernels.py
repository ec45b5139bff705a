"""Whose kernels compute, where several do the same: measured on the model's shapes before the first step, and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tuner.config.recipe import Recipe
from tuner.errors import TunerError
from tuner.run.parts.part import Part, Preflight
from tuner.runtime import startup
from tuner.runtime.console import Console
from tuner.runtime.environment import versions
from tuner.runtime.files import hash_of, keep_json, read_json
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.resolve import Resolved
from tuner.setup.specs import step_sections
from tuner.setup.timetable import timetable

if TYPE_CHECKING:
    from tuner.model.fastest import Fastest

KERNELS = "kernels"
"""Of a checkpoint's state and of the cache."""
ATTENTION, LOSS = "attention", "loss"
"""What may be computed by one of several."""
LEAST_STEPS = 20
"""A run of fewer steps is over before a faster kernel has made up for the time of measuring."""


class Kernels(Part):
    """The version of flash attention, and the loss, on CUDA. A run that is resumed keeps those that it has."""

    def __init__(self, recipe: Recipe) -> None:
        self._chosen: dict[str, str] = {}

    def before_build(self, ready: Preflight, resolved: Resolved, console: Console) -> Resolved:
        """The kernels that the run's checkpoint names, else the fastest by rank 0's device. Collective."""
        if resolved.facts.kind != "cuda":
            return resolved
        before = None if ready.status.checkpoint is None else ready.status.checkpoint.state.get(KERNELS)
        if isinstance(before, Mapping):  # by others, what is trained would be another run
            self._chosen = dict(before)
        elif timetable(resolved, ready.data, ready.starts).plan.total_steps >= LEAST_STEPS:
            with startup.phase("kernels"):
                measured = Collective(gloo_group()).on_rank0(lambda: self._measured(ready, resolved, console))
            for what, found in measured.items():
                console.say("kernels", f"{what}: {found}")
                self._chosen[what] = found.name
        return replace(resolved, settled={**resolved.settled, **self._chosen})

    def state(self, step: int) -> Mapping[str, Any]:
        """What a launch that resumes the run computes by, whatever it would find faster."""
        return {KERNELS: self._chosen} if self._chosen else {}

    def _measured(self, ready: Preflight, resolved: Resolved, console: Console) -> dict[str, Fastest]:
        """What each is computed by, where there is a choice."""
        import torch

        from tuner.model.fastest import USUAL_LOSS, Heads, fastest_loss, fastest_version

        cache, sections = ready.spec.cache_dir, step_sections(resolved)
        device, config = torch.device("cuda", torch.cuda.current_device()), resolved.config
        heads = [asdict(heads) for heads in Heads.of(config)]
        shapes: dict[str, dict[str, Any]] = {ATTENTION: {"heads": heads, "tokens": resolved.max_length}}
        if sections.model.kernels == USUAL_LOSS and sections.train.precision in {"bf16", "fp8"}:
            shapes[LOSS] = {"vocabulary": config.get_text_config().vocab_size}
        ways: dict[str, Callable[[], Fastest | None]] = {
            ATTENTION: lambda: fastest_version(config, device, cache, resolved.max_length),
            LOSS: lambda: fastest_loss(shapes[LOSS]["vocabulary"], device),
        }
        found: dict[str, Fastest] = {}
        for what, facts in shapes.items():
            with console.doing(f"measuring whose {what} is the fastest"):
                if (one := _kept(what, facts, ready, resolved, ways[what])) is not None:
                    found[what] = one
        return found


def _kept(
    what: str, shapes: Mapping[str, Any], ready: Preflight, resolved: Resolved, measure: Callable[[], Fastest | None]
) -> Fastest | None:
    """What was measured before for the same device, shapes and versions, or is now."""
    from tuner.model.fastest import Fastest

    same = {"device": resolved.facts.name, "deterministic": resolved.numerics.deterministic, "versions": versions()}
    path = ready.spec.cache_dir / KERNELS / f"{hash_of({what: {**same, **shapes}}, 32)}.json"
    with suppress(TunerError, TypeError):
        return Fastest(**read_json(path))
    if (found := measure()) is not None:
        keep_json(path, asdict(found))
    return found
