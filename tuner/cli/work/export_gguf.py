"""What `tuner export-gguf` does and shows."""

from dataclasses import asdict
from pathlib import Path

from tuner.cli.command import Outcome
from tuner.export.gguf.export import export_gguf
from tuner.export.gguf.source import source_of
from tuner.export.source import Weights
from tuner.rundir.model_path import Which
from tuner.runtime.console import Console
from tuner.runtime.files import gib


def export(  # noqa: PLR0913, PLR0917 - one parameter for each option
    path: Path, output: Path | None, kind: str, step: Which, weights: str, verify: bool, console: Console
) -> Outcome:
    """Write, prove and publish, and say what was measured."""
    source = source_of(path, console.warn, step, Weights.parse(weights))
    with console.doing(f"writing {kind}{' and asking llama.cpp' if verify else ''}"):
        report = export_gguf(source, kind, output, verify)
    said = f"{report.architecture}, {gib(report.bytes)} in {report.seconds:.1f} s"
    console.say("verified" if verify else "written", f"{report.proof()}\n{said}")
    if verify and (better := report.better()):
        console.say("closer", f"--type {better}")
    metrics = {key: value for key, value in asdict(report).items() if key != "path"}
    return Outcome(str(report.path), metrics=metrics)
