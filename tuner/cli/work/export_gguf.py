"""What `tuner export-gguf` does and shows."""

from dataclasses import asdict
from pathlib import Path

from tuner.cli.command import Outcome
from tuner.export.gguf.export import GgufForm, export_gguf
from tuner.export.gguf.source import source_of
from tuner.export.source import Weights
from tuner.rundir.model_path import Which
from tuner.runtime.console import Console
from tuner.runtime.files import gib

__all__ = ["GgufForm", "export"]


def export(path: Path, step: Which, weights: str, is_adapter: bool, form: GgufForm, console: Console) -> Outcome:
    """Write, prove and publish, and say what was measured."""
    source = source_of(path, console.warn, step, Weights.parse(weights), is_adapter)
    with console.doing(f"writing {form.type}{' and asking llama.cpp' if form.verify else ''}"):
        report = export_gguf(source, form)
    files = f"{report.files} files, " if report.files > 1 else ""
    said = f"{report.architecture}, {files}{gib(report.bytes)} in {report.seconds:.1f} s"
    console.say("verified" if form.verify else "written", f"{report.proof()}\n{said}")
    if form.verify and (better := report.better()):
        console.say("closer", f"--type {better}")
    for each in report.encoded_otherwise:
        console.say("differs", f"llama.cpp gives other ids to {each}")
    if report.modelfile is not None:
        console.say("modelfile", report.modelfile.in_words())
    metrics = {key: value for key, value in asdict(report).items() if key not in {"path", "modelfile"}}
    return Outcome(str(report.path), metrics=metrics)
