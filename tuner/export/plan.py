"""What an export will do: its checkpoint, its target and the choices that change its bytes; nothing is written."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tuner.errors import DataError, RecipeError
from tuner.export.source import TRAINED, ExportSource, Weights, path_of, resolve, warn_of_better
from tuner.export.weights import published_codes
from tuner.rundir.checkpoints import LINEAGE, has_options
from tuner.rundir.layout import export_dir
from tuner.rundir.model_path import Warn, Which, ignore_warning
from tuner.runtime.files import MANIFEST_NAME, read_json, sha256_file, verify_entries

Base = Literal["auto", "original", "quantized"]
Dtype = Literal["auto", "bf16", "fp32"]
"""Of the written weights; auto: bf16, or fp32 where rounding to it costs more than a fifth of what training changed."""
DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ExportOptions:
    """The choices that change the exported bytes."""

    dtype: Dtype = "auto"
    adapter: Literal["merge", "keep", "none"] = "merge"
    """none: of a plan for a run that has none."""
    shard_size: int = DEFAULT_SHARD_BYTES
    """Bytes of the largest weights file."""
    base_model: str | None = None
    """What a kept adapter says of its base model; by default its hub name, or the path of a local directory."""
    text_only: bool = False
    """Of a multimodal checkpoint the language model alone, as a model of its own."""
    base: Base | None = "auto"
    """What an adapter of a quantised base is merged into; auto takes what answers closer to the trained model.

    None: of a plan where there is no choice.
    """
    weights: Weights = TRAINED
    """The trained weights, or an average of them."""
    keep_fp32: tuple[str, ...] = ()
    """Names or globs of weights that are written in float32, whatever the others are."""

    def check(self) -> None:
        """Raise RecipeError for values that there are not, or that do nothing."""
        if self.dtype not in get_args(Dtype) or self.adapter not in ("merge", "keep") or self.shard_size <= 0:
            raise RecipeError("export takes dtype auto, bf16 or fp32, adapter merge or keep, and a positive shard size")
        if self.base_model is not None and self.adapter != "keep":
            raise RecipeError("--base-model: a merged export names no base model", hint="add --adapter keep")
        if self.base_model is not None and not self.base_model.strip():
            raise RecipeError("--base-model: is empty", hint="give a hub name or a directory")
        if self.text_only and self.adapter == "keep":
            raise RecipeError("--text-only: a kept adapter fits the whole checkpoint", hint="leave out --adapter keep")
        if self.keep_fp32 and self.adapter == "keep":
            raise RecipeError("--keep-fp32: a kept adapter is written in one type", hint="leave out --keep-fp32")
        if self.base not in get_args(Base):
            raise RecipeError("--base takes auto, original or quantized")
        if self.base != "auto" and self.adapter == "keep":
            raise RecipeError("--base: a kept adapter is merged into no base", hint="leave out --base")


DEFAULTS = ExportOptions()


@dataclass(frozen=True, kw_only=True)
class ExportPlan(ExportOptions):
    """What an export will do, with the options as they hold for its checkpoint."""

    source: ExportSource
    output: Path
    manifest_sha256: str
    done: bool = False
    """Whether the target already holds exactly this."""

    @property
    def options(self) -> dict[str, Any]:
        """The choices that change the exported bytes."""
        steps = ", ".join(str(step) for step in sorted(info.step for info in self.source.checkpoints))
        average = {"ema": "exponential moving average", "mean": f"mean of the checkpoints of steps {steps}"}
        named = {
            "base_model": self.base_model, "text_only": self.text_only or None, "base": self.base,
            "keep_fp32": list(self.keep_fp32) or None, "weights": average.get(self.weights.kind),
        }
        given = {key: value for key, value in named.items() if value is not None}
        return {"dtype": self.dtype, "adapter": self.adapter, "shard_size": self.shard_size, **given}


def plan_export(
    path: Path, output: Path | None = None, options: ExportOptions = DEFAULTS, warn: Warn = ignore_warning,
    step: Which = "newest",
) -> ExportPlan:
    """Find the checkpoint and the target without writing anything; `warn` hears of a run that is not finished,
    and of a kept checkpoint with a lower held-out loss than the newest one.

    The target is `<run>/exports/step-N`, of a kept adapter `step-N-adapter`, of a text model alone `step-N-text`,
    unless `output` is another.
    ``step`` chooses one of a run's checkpoints. Raises RecipeError where the target holds something else, DataError
    where the checkpoint is damaged or gone.
    """
    options.check()
    source = resolve(path, warn, shards=False, step=step, weights=options.weights)
    if step == "newest" and source.checkpoint.path != path.absolute():
        warn_of_better(source, warn)
    is_kept = options.adapter == "keep"
    if is_kept and source.adapter is None:
        raise RecipeError("--adapter keep: the run trained all parameters, it has no adapter to keep")
    if is_kept and source.given_frozen:
        raise RecipeError(
            "--adapter keep: model.init_from gave the base other weights than its files hold",
            hint="leave out --adapter keep: the merged model is whole",
        )
    if options.text_only and not source.model.get("untouched"):
        raise RecipeError("--text-only: the run trained no multimodal checkpoint", hint="leave it out")
    if options.weights.kind != "trained" and source.quantize != "none":
        raise RecipeError(
            "--weights: averages of adapters on a quantised base are not exported",
            hint="leave it out: the trained weights are verified against what the run recorded",
        )
    if options.base != "auto" and source.quantize == "none":
        raise RecipeError(f"--base {options.base}: the run's base was not quantised", hint="leave it out")
    if options.base == "original" and published_codes(source) is not None:
        raise RecipeError(
            f"--base original: {source.name_or_path} holds {source.quantize} codes, and no other weights",
            hint="leave it out",
        )
    kind: Literal["", "adapter", "text"] = "adapter" if is_kept else "text" if options.text_only else ""
    default = path_of(export_dir(source.run_dir, source.step, kind), options.weights)
    adapter: Literal["none", "merge", "keep"] = "none" if source.adapter is None else options.adapter
    base = None if source.quantize == "none" or is_kept else options.base
    plan = ExportPlan(
        **vars(replace(options, adapter=adapter, base=base)), source=replace(source, keep_fp32=options.keep_fp32),
        output=(output or default).absolute(), manifest_sha256=sha256_file(source.checkpoint.path / MANIFEST_NAME),
    )
    return replace(plan, done=is_done(plan))


def is_done(plan: ExportPlan) -> bool:
    """Whether the target holds this very export. Raises RecipeError where it holds anything else."""
    if not os.path.lexists(plan.output):
        return False
    hint = "give another --output; nothing was changed"
    try:
        there = read_json(plan.output / LINEAGE)
        source = there.get("source")
        same = isinstance(source, Mapping) and source.get("manifest_sha256") == plan.manifest_sha256
        if not same or not has_options(there, plan.options):
            raise RecipeError(f"{plan.output}: holds another export", hint=hint)
        verify_entries(plan.output, there.get("files") or {}, hash=True)
        if not there.get("files"):
            raise RecipeError(f"{plan.output}: holds something else", hint=hint)
    except DataError as error:
        raise RecipeError(f"{plan.output}: exists and is not this export ({error.message})", hint=hint) from error
    return True
