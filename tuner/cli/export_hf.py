"""`tuner export-hf`: a checkpoint as a Hugging Face directory, proven equal to the trained model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tuner.cli.command import Outcome, VerboseOption, command, input_path
from tuner.cli.named import RunOrCheckpointArgument, run_path
from tuner.errors import DataError, MachineError, RecipeError
from tuner.rundir.exports import LINEAGE
from tuner.rundir.layout import RESOLVED_RECIPE
from tuner.runtime.files import TMP_PREFIX, gib, sha256_file, write_json

if TYPE_CHECKING:
    from tuner.export.plan import ExportPlan
    from tuner.export.report import ExportReport
    from tuner.runtime.console import Console


@command("export-hf")
def export_hf(  # noqa: PLR0913, PLR0917 - one parameter for each option
    path: RunOrCheckpointArgument,
    step: Annotated[str, typer.Option(help="Of a run's checkpoints: newest, best, or a step.")] = "newest",
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Directory to write; default RUN/exports/step-N, a kept adapter's step-N-adapter, the average's -ema.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "bf16", "fp32"],
        typer.Option(help="Type of the weights; auto: bf16 where rounding keeps 4/5 of what training changed."),
    ] = "auto",
    adapter: Annotated[
        Literal["merge", "keep"],
        typer.Option(help="Merge an adapter into the weights, or keep it as peft's directory."),
    ] = "merge",
    base_model: Annotated[
        str | None, typer.Option(help="Base model that a kept adapter names; default what the run was trained from.")
    ] = None,
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Of a multimodal checkpoint the language model alone.")
    ] = False,
    base: Annotated[
        Literal["auto", "original", "quantized"],
        typer.Option(help="Merge an adapter of a quantised base into which; auto: what is closer to training, by KL."),
    ] = "auto",
    weights: Annotated[
        str,
        typer.Option(metavar="WHICH", help="trained, ema (the run's average) or mean:N (of the last N checkpoints)."),
    ] = "trained",
    shard_size: Annotated[str, typer.Option(help="Largest weights file, e.g. 5GB or 4GiB.")] = "5GB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written and write nothing.")] = False,
    verbose: VerboseOption = False,
) -> Outcome:
    """Write a Hugging Face directory and verify it before it appears under its name."""
    from tuner.config.numbers import parse_bytes
    from tuner.runtime.console import Console

    chosen = _step(step)
    source = run_path(path)
    try:
        shard_bytes = parse_bytes(shard_size)
    except ValueError as error:
        raise RecipeError(f"--shard-size {shard_size}: {error}", hint="write 5GB, 500MB or 4GiB") from None
    target = None if output is None else input_path(output)
    console = Console(level="debug" if verbose else "info")
    with console.doing("loading torch", at_once=True):
        from tuner.export.averages import Weights
        from tuner.export.hf import run_export
        from tuner.export.plan import ExportOptions, plan_export

    wanted = ExportOptions(
        dtype, adapter, shard_bytes, _named(base_model), text_only, base, Weights.parse(weights)
    )
    plan = plan_export(source, target, wanted, console.warn, chosen)
    if dry_run:
        return _planned(plan, console)
    with console.doing(f"exporting step {plan.source.step}"):
        report = run_export(plan)
    _remember_base(plan)
    return _reported(report, plan, console)


def _step(text: str) -> int | Literal["newest", "best"]:
    if text in ("newest", "best"):
        return "best" if text == "best" else "newest"
    if not text.isascii() or not text.isdigit():
        raise RecipeError(f"--step {text}: no such checkpoint", hint="write newest, best or a step, such as 500")
    return int(text)


def _named(base_model: str | None) -> str | None:
    """A base model as an adapter names it: a directory by its absolute path, so that it is found from anywhere."""
    if base_model is None or not Path(base_model).expanduser().is_dir():
        return base_model
    return str(input_path(base_model))


def _planned(plan: ExportPlan, console: Console) -> Outcome:
    there = "exists already" if plan.done else "would be written"
    how = "" if plan.adapter == "none" else f", adapter {plan.adapter}"
    console.say("export", f"{plan.source.checkpoint.path} -> {plan.output} ({plan.dtype}{how}): {there}")
    metrics = {"step": plan.source.step, "already_exported": plan.done, "dry_run": True, **plan.options}
    return Outcome(str(plan.output), metrics=metrics, next=f"tuner export-hf {plan.source.checkpoint.path}")


def _reported(report: ExportReport, plan: ExportPlan, console: Console) -> Outcome:
    if choice := report.choice():
        console.say("base", choice)
    if report.already_exported:
        console.say("exported", f"{report.path} holds this export already")
    else:
        console.say(
            "verified",
            f"{report.proof()}\n"
            f"token ids equal those of training for {report.id_probes} texts\n"
            f"{report.weight_files} weight file{'s' if report.weight_files > 1 else ''}, {gib(report.bytes)} "
            f"in {report.seconds:.1f} s",
        )
    if remedy := report.remedy():
        console.warn(f"{report.rounding()}; this keeps it: tuner export-hf {plan.source.checkpoint.path} {remedy}")
    elif rounding := report.rounding():
        console.say("rounding", rounding)
    metrics = {key: value for key, value in asdict(report).items() if key != "path"}
    then = f"tuner generate {report.path}"
    if plan.source.head == "score":
        then = f"tuner eval {report.path} {plan.source.run_dir / RESOLVED_RECIPE}"
    return Outcome(str(report.path), metrics=metrics, next=then)


def _remember_base(plan: ExportPlan) -> None:
    """Note on this machine which model an export outside its run came from: the export itself holds no local path."""
    from tuner.generate import base_record

    facts = plan.source.model
    if plan.source.hub_name is not None or facts.get("init") == "random":
        return
    # A cache that cannot be written, or has a link there, costs `--compare base` its default, nothing else.
    with suppress(OSError, MachineError, DataError):
        record = base_record(sha256_file(plan.output / LINEAGE))
        record.parent.mkdir(parents=True, exist_ok=True)
        for leftover in record.parent.glob(f"{TMP_PREFIX}{record.name}-*"):
            leftover.unlink(missing_ok=True)
        write_json(record, {"base": facts["name_or_path"], "revision": facts.get("revision")})
