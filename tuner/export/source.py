"""What is exported: a run directory and one of its checkpoints, with the facts recorded there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tuner.checkpoint.manifest import step_dirs, step_name
from tuner.checkpoint.open import open_checkpoint
from tuner.config.methods import Head
from tuner.errors import DataError, RecipeError
from tuner.rundir.layout import EMA_PREFIX, MODEL_PREFIX
from tuner.rundir.model_path import HfDirectory, RunCheckpoint, Warn, Which, ignore_warning, resolve_model_path
from tuner.rundir.record import read_run
from tuner.rundir.run_json import is_run

if TYPE_CHECKING:
    from tuner.checkpoint.open import CheckpointInfo

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

_MEAN = re.compile(r"mean:(\d{1,6})")


@dataclass(frozen=True)
class Weights:
    """The trained weights, their exponential average (``ema``), or the mean of the last ``count`` checkpoints."""

    kind: Literal["trained", "ema", "mean"] = "trained"
    count: int = 1

    @staticmethod
    def parse(text: str) -> Weights:
        """Read `trained`, `ema` or `mean:N`. Raises RecipeError."""
        if text in ("trained", "ema"):
            return Weights("ema" if text == "ema" else "trained")
        match = _MEAN.fullmatch(text)
        if match is None or int(match[1]) < 2:
            raise RecipeError(f"--weights {text}: not one of trained, ema, mean:N", hint="write ema, or mean:5")
        return Weights("mean", int(match[1]))

    @property
    def suffix(self) -> str:
        """Its part of the name of an export's directory; empty for the trained weights."""
        return {"trained": "", "ema": "ema", "mean": f"mean-{self.count}"}[self.kind]


TRAINED = Weights()


@dataclass(frozen=True)
class ExportSource(RunCheckpoint):
    """A checkpoint of a run, which of its weights are meant, and what its manifest says of the trained model."""

    meta: Mapping[str, Any]
    """All facts of the manifest."""
    recipe: Mapping[str, Any]
    model_section: Mapping[str, Any]
    """The recipe's section of the model."""
    model: Mapping[str, Any]
    """Facts of the model that was trained: config, licence, what was left untouched."""
    name_or_path: str
    """Of the base model."""
    revision: str | None
    is_random: bool
    """Whether the base's weights were drawn."""
    hub_name: str | None
    """The base model's hub name; None where it was a local directory or nothing."""
    new_ids: range
    """Ids of the tokens that the run added to the base model's."""
    adapter: Mapping[str, Any] | None
    """None where all parameters were trained."""
    quantize: str
    """How the frozen base was quantised while the adapter was trained: none, nf4 or int8."""
    given_frozen: bool
    """Whether weights that the run did not train came from elsewhere than the base model (`model.init_from`)."""
    head: Head
    """What was trained on the decoder: an output layer, or a reward model's score."""
    weights: Weights = TRAINED
    averaged: tuple[CheckpointInfo, ...] = ()
    """The checkpoints whose mean is meant, this one first; empty where no mean is."""
    keep_fp32: tuple[str, ...] = ()
    """Names or globs of weights that are written in float32, whatever the others are."""

    @staticmethod
    def of(found: RunCheckpoint, weights: Weights = TRAINED, averaged: tuple[CheckpointInfo, ...] = ()) -> ExportSource:
        """Read the facts of a checkpoint's manifest. Raises DataError where it does not say what was trained."""
        meta = found.checkpoint.meta
        model, recipe, adapter = meta.get("model"), _facts(meta.get("recipe")), _facts(meta.get("adapter"))
        if not isinstance(model, Mapping):
            raise DataError(f"{found.path}: its manifest does not say which model was trained")
        section, is_random = _facts(recipe.get("model")), model.get("init") == "random"
        name = str(model.get("name_or_path", ""))
        return ExportSource(
            found.run_dir, found.checkpoint, meta=meta, recipe=recipe, model_section=section, model=model,
            name_or_path=name, revision=model.get("revision"), is_random=is_random,
            hub_name=None if is_random else hub_name(name), new_ids=range(*(model.get("new_ids") or (0, 0))),
            adapter=adapter if adapter and adapter.get("kind", "lora") != "none" else None,
            quantize=str(section.get("quantize", "none")),
            given_frozen=bool(_facts(meta.get("init_from")).get("frozen")),
            head="score" if _facts(recipe.get("method")).get("kind") == "reward" else "tokens", weights=weights,
            averaged=averaged,
        )

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


def _facts(value: object) -> Mapping[str, Any]:
    """Facts of a manifest; none where it has something else there."""
    return value if isinstance(value, Mapping) else {}


def resolve(
    path: Path, warn: Warn = ignore_warning, shards: bool = True, step: Which = "newest", weights: Weights = TRAINED
) -> ExportSource:
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
    source = ExportSource.of(found, weights, averaged)
    if weights.kind == "ema" and not any(name.startswith(EMA_PREFIX) for name in found.checkpoint.index()):
        before = [step for step, _ in step_dirs(found.checkpoint.path.parent) if step < source.step]
        hint = "train with ema.decay: 0.999" + (", or average the last ones: --weights mean:2" if before else "")
        raise RecipeError(f"{found.checkpoint.path}: --weights ema: it holds no average of the weights", hint=hint)
    return source


def warn_of_better(source: ExportSource, warn: Warn) -> None:
    """Warn where the run keeps a checkpoint that evaluations found better than this one.

    It is the best by the recipe's `checkpoint.keep_best`; without that key, the lowest of the steps that were both
    evaluated and kept.
    """
    kept = {step for step, _ in step_dirs(source.checkpoint.path.parent)} - {source.step}
    best = source.checkpoint.state.get("best")
    if isinstance(best, Mapping):
        choice, step, value = "best", best["step"], float(best["value"])
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


def averaged_over(last: CheckpointInfo, weights: Weights) -> tuple[CheckpointInfo, ...]:
    """The checkpoints whose mean is meant, the newest first: ``last`` and those of the same run before it.

    Raises DataError where there are too few, or one is damaged.
    """
    before = [(step, path) for step, path in step_dirs(last.path.parent) if step < last.step]
    if len(before) < weights.count - 1:
        there = ", ".join(step_name(step) for step in (last.step, *(step for step, _ in before)))
        every = last.step // weights.count
        hints = (
            f"write --weights mean:{len(before) + 1}" if before else "",
            f"train with checkpoint.every: {every} steps and checkpoint.keep: {weights.count}" if every else "",
        )
        raise DataError(
            f"{last.path.parent}: the mean of {weights.count} checkpoints up to {step_name(last.step)} needs more than "
            f"the {len(before) + 1} that are there: {there}",
            hint=", or ".join(filter(None, hints)) or None,
        )
    return (last, *(open_checkpoint(path, shards=False) for _, path in before[: weights.count - 1]))


def path_of(directory: Path, weights: Weights) -> Path:
    """Where an export of these weights goes, next to that of the trained ones in ``directory``."""
    return directory.with_name("-".join(filter(None, (directory.name, weights.suffix))))
