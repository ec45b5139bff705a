"""What is exported: a run directory and one of its checkpoints, with the facts recorded there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.checkpoint.manifest import step_dirs
from tuner.config.methods import Head
from tuner.errors import DataError, RecipeError
from tuner.export.averages import TRAINED, Weights, averaged_over
from tuner.rundir.layout import EMA_PREFIX, MODEL_PREFIX
from tuner.rundir.model_path import HfDirectory, RunCheckpoint, Warn, Which, ignore_warning, resolve_model_path
from tuner.rundir.record import best_value, read_run
from tuner.rundir.run_json import is_run

if TYPE_CHECKING:
    from tuner.checkpoint.open import CheckpointInfo

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Source(RunCheckpoint):
    """A checkpoint of a run, with the facts that its manifest holds, and which of its weights are meant."""

    weights: Weights = TRAINED
    averaged: tuple[CheckpointInfo, ...] = ()
    """The checkpoints whose mean is meant, this one first; empty where no mean is."""

    @property
    def prefix(self) -> str:
        """Before the names of the weights in the checkpoint."""
        return EMA_PREFIX if self.weights.kind == "ema" else MODEL_PREFIX

    @property
    def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """Every checkpoint that holds a part of the weights."""
        return self.averaged or (self.checkpoint,)

    @property
    def step(self) -> int:
        """Optimizer steps that the checkpoint has seen."""
        return self.checkpoint.step

    @property
    def meta(self) -> Mapping[str, Any]:
        """The run's facts in the checkpoint's manifest: recipe, model, adapter, tokenizer hash."""
        facts = self.checkpoint.meta
        if not isinstance(facts.get("model"), Mapping):
            raise DataError(f"{self.checkpoint.path}: its manifest does not say which model was trained")
        return facts

    @property
    def model(self) -> Mapping[str, Any]:
        """Name, revision, initialisation and config of the model that was trained."""
        facts: Mapping[str, Any] = self.meta["model"]
        return facts

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe of the run as its checkpoint recorded it."""
        recipe = self.meta.get("recipe")
        return recipe if isinstance(recipe, Mapping) else {}

    @property
    def adapter(self) -> Mapping[str, Any] | None:
        """The adapter's facts, or None where all parameters were trained."""
        adapter = self.meta.get("adapter")
        if not isinstance(adapter, Mapping) or adapter.get("kind", "lora") == "none":
            return None
        return adapter

    @property
    def quantize(self) -> str:
        """How the frozen base was quantised while the adapter was trained: none, nf4 or int8."""
        model = self.recipe.get("model")
        return str(model.get("quantize", "none")) if isinstance(model, Mapping) else "none"

    @property
    def given_frozen(self) -> bool:
        """Whether weights that the run did not train came from elsewhere than the base model (`model.init_from`)."""
        given = self.meta.get("init_from")
        return isinstance(given, Mapping) and bool(given.get("frozen"))

    @property
    def head(self) -> Head:
        """What was trained on the decoder: an output layer, or a reward model's score."""
        method = self.recipe.get("method")
        return "score" if isinstance(method, Mapping) and method.get("kind") == "reward" else "tokens"

    @property
    def new_ids(self) -> range:
        """Ids of the tokens that the run added to the base model's."""
        start, stop = self.model.get("new_ids") or (0, 0)
        return range(start, stop)

    @property
    def hub_name(self) -> str | None:
        """The base model's hub name, or None where it was a local directory or nothing."""
        if self.model.get("init") == "random":
            return None
        return hub_name(str(self.model.get("name_or_path", "")))


def resolve(
    path: Path,
    warn: Warn = ignore_warning,
    shards: bool = True,
    step: Which = "newest",
    weights: Weights = TRAINED,
) -> Source:
    """The checkpoint directory given, or one of a run directory: its last one, the best, or that of a step.

    With ``weights`` that are a mean, also those before it; none of their tensors' files is hashed then.

    Without ``shards`` the tensors' files are not hashed: for a reader that checks each tensor as it reads it. Raises
    RecipeError for a path that is neither and for a best one that was not kept, and DataError, with the ways on, for a
    checkpoint that is damaged or gone.
    """
    found = resolve_model_path(path, warn, shards, step)
    if isinstance(found, HfDirectory):
        raise RecipeError(f"{found.path}: neither a run nor a checkpoint, but a Hugging Face directory already")
    averaged = averaged_over(found.checkpoint, weights) if weights.kind == "mean" else ()
    source = Source(found.run_dir, found.checkpoint, weights, averaged)
    if weights.kind == "ema" and not any(name.startswith(EMA_PREFIX) for name in found.checkpoint.index()):
        before = [step for step, _ in step_dirs(found.checkpoint.path.parent) if step < source.step]
        hint = "train with ema.decay: 0.999" + (", or average the last ones: --weights mean:2" if before else "")
        raise RecipeError(
            f"{found.checkpoint.path}: --weights ema: it holds no average of the weights", hint=hint
        )
    return source


def warn_of_better(source: Source, warn: Warn) -> None:
    """Warn where the run keeps a checkpoint that evaluations found better than this one.

    It is the best by the recipe's `checkpoint.keep_best`; without that key, the lowest of the steps that were both
    evaluated and kept.
    """
    kept = {step for step, _ in step_dirs(source.checkpoint.path.parent)} - {source.step}
    best = source.checkpoint.state.get("best")
    if isinstance(best, Mapping):
        choice, step, value = "best", best["step"], best_value(best)
        figure = str(best["metric"]).split("/")[1]
    else:
        losses = _losses(source.run_dir)
        of_kept = {step: loss for step, loss in losses.items() if step in kept}
        if source.step not in losses or not of_kept:
            return
        step = min(of_kept, key=lambda step: of_kept[step])
        choice, value, figure = str(step), of_kept[step], "loss"
        if value >= losses[source.step]:
            return
    if step in kept:
        which = f"{'lower' if figure == 'loss' else 'better'} held-out {figure}"
        warn(
            f"step {source.step} is exported, but step {step} has a {which} ({value:.3f}); "
            f"to export that one, add --step {choice}"
        )


def _losses(run_dir: Path) -> dict[int, float]:
    """Step -> the held-out loss measured there, of a run whose record can be read."""
    try:
        lines = read_run(run_dir).latest.evaluations if is_run(run_dir) else []
    except DataError:
        return {}
    return {line["step"]: line["loss"] for line in lines if isinstance(line.get("loss"), float)}


def hub_name(name: str) -> str | None:
    """The name if it can be a hub name (`model` or `owner/model`), None for a local path."""
    local = not _HUB_NAME.fullmatch(name) or name.startswith(".") or Path(name).exists()
    return None if local else name
