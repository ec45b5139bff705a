"""The rungs of a ladder: each size's model, batch and steps, and the ordinary recipe that trains it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tuner.config.ladder import LadderSize, require_sizes, short_count
from tuner.config.load import LoadedRecipe, load_recipe, recipe_dict
from tuner.config.recipe import Recipe
from tuner.data.building.spec import resolve_max_length
from tuner.errors import RecipeError
from tuner.ladder import rules
from tuner.ladder.record import RungRecord, find_rung
from tuner.ladder.rules import INITIAL, PlannedMark, StepPlan
from tuner.model.build import meta_model, model_config
from tuner.model.flops import training_flops
from tuner.profile.workload import added_ids
from tuner.run.launch import local_processes
from tuner.runtime.device import device_facts
from tuner.runtime.dist import RankInfo
from tuner.setup.resolve import model_spec


@dataclass(frozen=True)
class Rung:
    """A size of the ladder as it is trained: by an ordinary recipe, into a run directory of its own."""

    name: str
    parameters: int
    """Without the input embedding: the N of the rules."""
    total_parameters: int
    row_tokens: int
    batch: RungBatch
    plan: StepPlan
    marks: tuple[PlannedMark, ...]
    step_flops: float
    """Operations of a step of full rows, each of them one document; 0 where the model's config does not tell."""
    loaded: LoadedRecipe

    @property
    def run_dir(self) -> Path:
        """Where it is trained."""
        return Path(self.loaded.recipe.output_dir)

    @property
    def record(self) -> RungRecord:
        """What the ladder's file keeps of it."""
        steps, batch = self.plan.total_steps, self.batch.tokens
        return RungRecord(self.name, self.parameters, self.total_parameters, batch, self.lr, steps, self.marks)

    @property
    def lr(self) -> float | None:
        """The peak learning rate; None where the recipe leaves it to auto."""
        lr = self.loaded.recipe.optimizer.lr
        return None if lr == "auto" else float(lr)

    @property
    def tokens(self) -> int:
        """Tokens of the whole run, where all rows are full."""
        return self.plan.total_steps * self.batch.tokens


@dataclass(frozen=True)
class Model:
    """What of a size's model its rules need."""

    config: Mapping[str, Any]
    """Overrides of the base's config."""
    parameters: int
    total_parameters: int
    step_flops: float
    """Operations of one row that is one document."""


def rungs_of(loaded: LoadedRecipe) -> tuple[Rung, ...]:
    """The rungs of a recipe in the order of its sizes.

    Models are built without storage. Raises RecipeError for a recipe without sizes, and for rules that give a size no
    steps.
    """
    ladder = loaded.recipe.ladder
    require_sizes(ladder)
    most = most_processes(loaded.recipe)
    rungs = tuple(_rung(loaded, size, most) for size in ladder.sizes)
    names = [rung.name for rung in rungs]
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise RecipeError(
            f"ladder.sizes: two sizes are named {twice[0]}", hint="give them names: {name: wide, config: {...}}"
        )
    return rungs


def chosen_of(rungs: Sequence[Rung], wanted: str | None) -> Sequence[Rung]:
    """All rungs, or the one that is named, or given by its number. Raises RecipeError."""
    return rungs if wanted is None else [rungs[find_rung([rung.name for rung in rungs], wanted)]]


def most_processes(recipe: Recipe) -> int:
    """Processes that a rung may have: those of the recipe, of the launcher that is at work, or of this machine."""
    if recipe.ladder.max_processes != "auto":
        return recipe.ladder.max_processes
    if recipe.parallel.processes == "auto" and RankInfo.is_given():
        return RankInfo.from_environment().world_size
    return local_processes(recipe.parallel, recipe.train.device)


def _rung(loaded: LoadedRecipe, size: LadderSize, most: int) -> Rung:
    recipe, ladder = loaded.recipe, loaded.recipe.ladder
    row_tokens = resolve_max_length(recipe.model, recipe.data)
    model = _model(recipe, size, row_tokens)
    target = rules.target_batch_tokens(ladder, model.parameters, recipe.train.global_batch_size * row_tokens)
    least = size.min_processes or ladder.min_processes
    batch = solve(target, _micro_tokens(recipe, size, model.parameters, row_tokens), row_tokens, least, most)
    plan = rules.step_plan(ladder, model.parameters, batch.tokens)
    marks = (*([INITIAL] if ladder.initial else []), *plan.marks(ladder.multiples, batch.tokens))
    name = size.name or short_count(size.parameters or model.parameters)
    flops = model.step_flops * (batch.tokens // row_tokens)
    own = _recipe_of(loaded, name, model, batch, plan, row_tokens)
    return Rung(name, model.parameters, model.total_parameters, row_tokens, batch, plan, marks, flops, own)


def _model(recipe: Recipe, size: LadderSize, row_tokens: int) -> Model:
    """A size's model: with its own overrides of the config, or those of a shape with its parameters."""
    base, _ = _built(recipe, {})
    own: Mapping[str, Any] = size.config
    if size.parameters is not None:

        def count(shape: dict[str, int]) -> int:
            return _parameters(_built(recipe, shape)[1])[0]

        own = shape_of(size.parameters, base.get_text_config().to_dict(), count)
    _, model = _built(recipe, own)
    parameters, total = _parameters(model)
    flops = training_flops(model)
    step = flops.of([row_tokens], row_tokens) if flops.complete else 0.0
    return Model({**recipe.model.config, **own}, parameters, total, step)


def _built(recipe: Recipe, overrides: Mapping[str, Any]) -> tuple[Any, PreTrainedModel]:
    """The config with overrides, and its model without storage."""
    changed = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"config": {**recipe.model.config, **overrides}})}
    )
    config = model_config(model_spec(changed, range(0)))
    new_ids, _ = added_ids(changed, config)
    if new_ids:
        config = model_config(model_spec(changed, new_ids))
    return config, meta_model(config, torch.float32)


def _parameters(model: PreTrainedModel) -> tuple[int, int]:
    """Parameters without the input embedding, and all of them; a weight that is shared counts once."""
    total = sum(weight.numel() for weight in model.parameters())
    return total - sum(weight.numel() for weight in model.get_input_embeddings().parameters()), total


def _micro_tokens(recipe: Recipe, size: LadderSize, parameters: int, row_tokens: int) -> int:
    """Tokens of a forward: of the size, the ladder or the recipe, in this order, else what is usual on the device."""
    if size.micro_batch_size is not None:
        return size.micro_batch_size * row_tokens
    if recipe.ladder.micro_batch_tokens != "auto":
        return recipe.ladder.micro_batch_tokens
    if recipe.train.micro_batch_size != "auto":
        return recipe.train.micro_batch_size * row_tokens
    on_cuda = recipe.train.device == "cuda" or (
        recipe.train.device == "auto" and device_facts(recipe.train.device, 0).kind == "cuda"
    )
    return micro_tokens_of(parameters, row_tokens) if on_cuda else row_tokens


def _recipe_of(
    loaded: LoadedRecipe, name: str, model: Model, batch: RungBatch, plan: StepPlan, row_tokens: int
) -> LoadedRecipe:
    """The recipe of one rung, as a recipe of its own that `tuner train` takes."""
    recipe, ladder = loaded.recipe, loaded.recipe.ladder
    tree = {key: value for key, value in recipe_dict(recipe).items() if key != "ladder"}
    marks: dict[str, Any] = {"marks": [f"{mark.step} steps" for mark in plan.marks(ladder.multiples, batch.tokens)]}
    marks |= {"at_start": True} if ladder.initial else {}
    lr, second = rules.peak_lr(ladder, model.parameters), rules.beta2(ladder, batch.tokens)
    optimizer = tree["optimizer"] | ({} if lr is None else {"lr": lr})
    if second is not None and "betas" in optimizer:
        optimizer["betas"] = [optimizer["betas"][0], second]
    tree |= {
        "name": f"{recipe.name}-{name}",
        "output_dir": str(Path(recipe.output_dir) / name),
        "model": {**tree["model"], "config": dict(model.config)},
        "data": {**tree["data"], "max_length": row_tokens},
        "optimizer": optimizer,
        "train": {
            **tree["train"], "duration": f"{plan.total_steps} steps", "global_batch_size": batch.tokens // row_tokens,
            "micro_batch_size": batch.micro_tokens // row_tokens,
        },
        "schedule": {
            "kind": "wsd_s", "warmup": f"{plan.warmup_steps} steps",
            "periods": [f"{steps} steps" for steps in plan.periods], "peaks": rules.stepped_peaks(ladder),
            "decay": str(ladder.decay), "decay_shape": ladder.decay_shape,
        },
        "eval": tree["eval"] | marks,
        "checkpoint": tree["checkpoint"] | marks,
        "logging": tree["logging"] | {"group": recipe.logging.group or recipe.name},
    }
    if recipe.parallel.processes == "auto":
        tree["parallel"] = {**tree["parallel"], "processes": batch.processes}
    return replace(load_recipe(tree), directory=loaded.directory)


FAR = 0.1
"""Share of the target from which on a batch that is off by more is warned of."""
SIZES: tuple[tuple[int, int], ...] = (
    (100_000_000, 16384), (190_000_000, 65536), (370_000_000, 49152), (760_000_000, 40960), (1_000_000_000, 32768),
    (3_000_000_000, 16384),
)  # fmt: skip
"""Tokens of a forward on a GPU of 80 GB, for models of up to so many parameters (OLMo-core, sequences of 8,192)."""
LARGEST = 8192
"""The same for models above all of these."""


@dataclass(frozen=True)
class RungBatch:
    """A solved batch: a step is `accumulation` forwards of `micro_tokens` tokens on each of `processes`."""

    target_tokens: int
    micro_tokens: int
    processes: int
    accumulation: int

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all processes."""
        return self.micro_tokens * self.processes * self.accumulation

    @property
    def off(self) -> float:
        """How far a step is from the target, as a share of that."""
        return abs(self.tokens - self.target_tokens) / self.target_tokens

    @property
    def warning(self) -> str | None:
        """What is to be said where the target is missed by more than a tenth."""
        if self.off <= FAR:
            return None
        return (
            f"a step of {self.tokens:,} tokens is {100 * self.off:.1f} % off its target of {self.target_tokens:,}: "
            f"{self.micro_tokens:,} tokens a forward on at least so many processes come no nearer"
        )


def micro_tokens_of(parameters: int, row_tokens: int) -> int:
    """Tokens of a forward on a GPU of 80 GB for a size, in whole rows, at least one."""
    tokens = next((tokens for most, tokens in SIZES if parameters <= most), LARGEST)
    return max(1, tokens // row_tokens) * row_tokens


def solve(target_tokens: int, micro_tokens: int, row_tokens: int, least: int, most: int) -> RungBatch:
    """The batch nearest to a target on `least` to `most` processes, in multiples of `least`.

    A forward has `micro_tokens`, a multiple of the row's tokens, or as many rows as the target has. First it is the
    multiple of what the fewest processes take in one forward each that is nearest to the target; then as many
    processes as that can keep busy; and the nearest multiple of what those take. Raises RecipeError where a forward is
    not whole rows, or `most` is below `least`.
    """
    if micro_tokens <= 0 or micro_tokens % row_tokens:
        raise RecipeError(
            f"ladder: a forward of {micro_tokens:,} tokens is not whole rows of {row_tokens:,}",
            hint=f"write ladder.micro_batch_tokens: {max(1, micro_tokens // row_tokens) * row_tokens}",
        )
    if most < least:
        raise RecipeError(
            f"ladder: at most {most:,} processes, and at least {least:,} are needed",
            hint=f"write ladder.max_processes: {least}, or smaller ladder.min_processes",
        )
    micro_tokens = min(micro_tokens, max(1, target_tokens // row_tokens) * row_tokens)
    unit = micro_tokens * least
    multiples = max(1, round(target_tokens / unit))
    processes = least * min(most // least, multiples)
    accumulation = max(1, round(multiples * unit / (micro_tokens * processes)))
    return RungBatch(target_tokens, micro_tokens, processes, accumulation)


WEIGHT = 5.0
"""Of a count that is off by a share, against proportions that are off by a logarithm: 20 % are as bad as a factor e.

A fit reads what a size really counts; one that is much deeper or shallower than the others is off their curve.
"""
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
EIGHTH = 8
"""Widths of the MLP are multiples of so many, which products are fast with."""


@dataclass(frozen=True)
class Proportions:
    """What stays as it is when a model grows: width of a head, heads that share keys, MLP and depth to width."""

    hidden_per_head: int
    heads_per_group: int
    names_groups: bool
    """Whether the config has a key for the heads of keys and values."""
    mlp_ratio: float
    aspect: float
    """Hidden size for each layer."""

    @staticmethod
    def of(config: Mapping[str, Any]) -> Proportions:
        """Those of a model's config. Raises RecipeError for one that does not name its shape."""
        missing = [key for key in NEEDED if not isinstance(config.get(key), int)]
        if missing:
            raise RecipeError(
                f"ladder.sizes: the config of {config.get('model_type')} names no {missing[0]} to scale",
                hint="write sizes as configs: {name: small, config: {...}}",
            )
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        groups = config.get("num_key_value_heads")
        mlp_ratio, aspect = config["intermediate_size"] / hidden, hidden / config["num_hidden_layers"]
        return Proportions(hidden // heads, heads // (groups or heads), groups is not None, mlp_ratio, aspect)

    def shape(self, heads: int, layers: int) -> dict[str, int]:
        """Keys of the config for so many heads and layers."""
        hidden = heads * self.hidden_per_head
        return {
            "hidden_size": hidden, "intermediate_size": max(1, round(hidden * self.mlp_ratio / EIGHTH)) * EIGHTH,
            "num_attention_heads": heads,
            **({"num_key_value_heads": heads // self.heads_per_group} if self.names_groups else {}),
            "num_hidden_layers": layers,
        }


def shape_of(parameters: int, config: Mapping[str, Any], count: Callable[[dict[str, int]], int]) -> dict[str, int]:
    """Keys of the config of a model with so many parameters without embeddings, as `count` counts those of a shape.

    It is near both to the count and to the proportions of `config`, of which depth to width gives way. Raises
    RecipeError.
    """
    keep = Proportions.of(config)
    return min(_candidates(parameters, keep, count), key=lambda found: found[0])[1]


def _candidates(
    parameters: int, keep: Proportions, count: Callable[[dict[str, int]], int]
) -> Iterator[tuple[float, dict[str, int]]]:
    """Shapes of several widths, each with how far it is off.

    Counts grow linearly with layers, so that two of a width give all of it.
    """
    group = keep.heads_per_group
    one = count(keep.shape(group, 1))
    per_square = max(1.0, (count(keep.shape(group, 2)) - one) / (group * keep.hidden_per_head) ** 2)
    width = (parameters * keep.aspect / per_square) ** (1 / 3)
    middle = max(1, round(width / (group * keep.hidden_per_head)))
    for groups in range(max(1, middle // 2), middle * 2 + 2):
        heads = groups * group
        first = count(keep.shape(heads, 1))
        layer = count(keep.shape(heads, 2)) - first
        layers = max(1, round((parameters - first) / layer) + 1)
        off = abs(first + (layers - 1) * layer - parameters) / parameters
        aspect = heads * keep.hidden_per_head / layers
        yield WEIGHT * off + abs(math.log(aspect / keep.aspect)), keep.shape(heads, layers)
