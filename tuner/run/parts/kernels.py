"""Whose kernels compute, where several do the same: measured on the model's shapes before the first step, and kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tuner.config.recipe import Recipe
from tuner.errors import TunerError
from tuner.run.parts.part import Part, Preflight
from tuner.runtime import startup
from tuner.runtime.environment import versions
from tuner.runtime.files import keep_json, read_json
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.resolve import Resolved
from tuner.setup.timetable import timetable

if TYPE_CHECKING:
    from tuner.model.fastest import Fastest

KERNELS, ATTENTION = "kernels", "attention"
"""Of a checkpoint's state and of the cache; and which of them."""
LEAST_STEPS = 20
"""A run of fewer steps is over before a faster kernel has made up for the time of measuring."""


class Kernels(Part):
    """The version of flash attention, on CUDA. A run that is resumed keeps the one that it has."""

    def __init__(self, recipe: Recipe) -> None:
        self._chosen: str | None = None

    @staticmethod
    def wanted(recipe: Recipe) -> bool:
        """Where a GPU may train."""
        return recipe.train.device != "cpu"

    def before_build(self, ready: Preflight, resolved: Resolved) -> Resolved:
        """The kernels that the run's checkpoint names, else the fastest by rank 0's device. Collective."""
        if resolved.facts.kind != "cuda":
            return resolved
        before = None if ready.status.checkpoint is None else ready.status.checkpoint.state.get(KERNELS)
        name = before.get(ATTENTION) if isinstance(before, Mapping) else None
        found = None
        if name is None and timetable(resolved, ready.data, ready.starts).plan.total_steps >= LEAST_STEPS:
            with startup.phase("kernels"):
                found = Collective(gloo_group()).on_rank0(lambda: self._measured(ready, resolved))
            name = None if found is None else found.name
        if name is None:
            return resolved
        if found is not None:
            ready.before.console.say("kernels", f"{ATTENTION}: {found}")
        self._chosen = name
        return replace(resolved, settled={**resolved.settled, ATTENTION: name})

    def state(self, step: int) -> Mapping[str, Any]:
        """What a launch that resumes the run computes by, whatever it would find faster."""
        return {} if self._chosen is None else {KERNELS: {ATTENTION: self._chosen}}

    def _measured(self, ready: Preflight, resolved: Resolved) -> Fastest | None:
        """What was measured before for the same device, shapes and versions, or is now."""
        import torch

        from tuner.model.fastest import Fastest
        from tuner.model.flash_versions import Heads, fastest_version

        facts = {
            "device": resolved.facts.name,
            "heads": [asdict(heads) for heads in Heads.of(resolved.config)],
            "tokens": resolved.max_length,
            "deterministic": resolved.numerics.deterministic,
            "versions": versions(),
        }
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        path = ready.spec.cache_dir / KERNELS / f"{key}.json"
        with suppress(TunerError, TypeError):
            return Fastest(**read_json(path))
        with ready.before.console.doing("measuring whose attention is the fastest"):
            device = torch.device("cuda", torch.cuda.current_device())
            found = fastest_version(resolved.config, device, ready.spec.cache_dir, resolved.max_length)
        if found is not None:
            keep_json(path, asdict(found))
        return found
