"""Hugging Face directories, written and uploaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tuner.api.given import absolute
from tuner.config.numbers import parse_bytes
from tuner.export.hf import ExportReport, run_export
from tuner.export.hub import PushReport, find_export, plan_push
from tuner.export.hub import push as upload
from tuner.export.plan import ExportOptions, plan_export
from tuner.export.source import Weights
from tuner.rundir.in_store import publish


def export_hf(  # noqa: PLR0913, PLR0917 - one parameter for each option
    path: str | Path, output: str | Path | None = None, dtype: Literal["auto", "bf16", "fp32"] = "auto",
    adapter: Literal["merge", "keep"] = "merge", shard_size: str | int = "5GB",
    step: int | Literal["newest", "best"] = "newest", base_model: str | None = None, text_only: bool = False,
    base: Literal["auto", "original", "quantized"] = "auto", weights: str = "trained", keep_fp32: Sequence[str] = (),
) -> ExportReport:
    """Write a checkpoint of a run, or the checkpoint given, to `output` (default `<run>/exports/step-N`), verified.

    A kept adapter goes to `step-N-adapter` and names `base_model`, by default what it was trained from; the language
    model of a multimodal checkpoint alone (`text_only`) to `step-N-text`. An adapter of a quantised base is merged into
    `base`, by default the one that answers closer to the trained model, and both divergences are reported. `dtype` is
    by default bf16, or fp32 where rounding would cost more than a fifth of what training changed; weights that a name
    or glob in `keep_fp32` means are fp32 in any case. `weights` are
    `trained`, `ema` (the run's average) or `mean:N` (that of the last N checkpoints), next to them. The same
    checkpoint and options give the same bytes; a target that holds them already is left alone. Raises
    RecipeError for a target that holds something else, DataError for a corrupt checkpoint, MachineError for a full
    disk and VerificationError, with nothing published, where the export is not the trained model. `path` and `output`
    may be URLs of directories in object stores.
    """
    target = None if output is None else absolute(output, "all")
    shard_bytes, which = parse_bytes(shard_size), Weights.parse(weights)
    options = ExportOptions(dtype, adapter, shard_bytes, base_model, text_only, base, which, tuple(keep_fp32))
    report = run_export(plan_export(absolute(path, "model"), target, options, step=step))
    publish(report.path)
    return report


def push(path: str | Path, repo: str, private: bool = False) -> PushReport:
    """Upload a verified export, or the newest one of a run, to the hub's repository `repo`, ``"owner/name"``.

    Raises MachineError without a token, and where the hub cannot be reached or refuses.
    """
    return upload(plan_push(find_export(absolute(path)), repo), private)
