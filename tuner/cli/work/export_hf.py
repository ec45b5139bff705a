"""What `tuner export-hf` does and shows."""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from tuner.cli.command import Outcome
from tuner.errors import DataError
from tuner.export.hf import ExportReport, run_export
from tuner.export.plan import ExportOptions, ExportPlan, plan_export
from tuner.export.source import Weights
from tuner.generate import base_record
from tuner.rundir.checkpoints import LINEAGE
from tuner.rundir.in_store import publish
from tuner.rundir.layout import RESOLVED_RECIPE
from tuner.runtime.console import Console
from tuner.runtime.files import gib, keep_json, sha256_file
from tuner.stages import shown, url_of

__all__ = ["ExportOptions", "Weights", "export"]


def export(
    source: Path, output: Path | None, step: int | Literal["newest", "best"], options: ExportOptions, dry_run: bool,
    console: Console,
) -> Outcome:
    """Export a run or checkpoint, or say what would be written."""
    plan = plan_export(source, output, options, console.warn, step)
    if dry_run:
        return _planned(plan, console)
    with console.doing(f"exporting step {plan.source.step}"):
        report = run_export(plan)
    if url_of(plan.output) is not None:
        with console.doing(f"publishing {shown(plan.output)}"):
            publish(plan.output)
    _remember_base(plan)
    return _reported(report, plan, console)


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
    then = f"tuner generate {shown(report.path)}"
    if plan.source.head == "score":
        then = f"tuner eval {report.path} {plan.source.run_dir / RESOLVED_RECIPE}"
    return Outcome(shown(report.path), metrics=metrics, next=then)


def _remember_base(plan: ExportPlan) -> None:
    """Note on this machine which model an export outside its run came from: the export itself holds no local path."""
    source = plan.source
    if source.hub_name is not None or source.is_random:
        return
    # A cache that cannot be written, or has a link there, costs `--compare base` its default, nothing else.
    with suppress(DataError):
        record = base_record(sha256_file(plan.output / LINEAGE))
        keep_json(record, {"base": source.name_or_path, "revision": source.revision})
