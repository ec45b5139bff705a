"""What `tuner export-gguf` does and shows."""

from dataclasses import asdict, dataclass
from pathlib import Path

from tuner.cli.command import Outcome
from tuner.export.gguf.export import export_gguf
from tuner.export.gguf.source import source_of
from tuner.export.source import Weights
from tuner.rundir.model_path import Which
from tuner.runtime.console import Console
from tuner.runtime.files import gib


@dataclass(frozen=True)
class GgufForm:
    """What is written: its type, the largest file, and whether a Modelfile is."""

    type: str
    shard_bytes: int | None
    modelfile: bool


def export(  # noqa: PLR0913, PLR0917 - one parameter for each option
    path: Path,
    output: Path | None,
    step: Which,
    weights: str,
    adapter: str,
    form: GgufForm,
    verify: bool,
    console: Console,
) -> Outcome:
    """Write, prove and publish, and say what was measured."""
    source = source_of(path, console.warn, step, Weights.parse(weights), adapter == "keep")
    with console.doing(f"writing {form.type}{' and asking llama.cpp' if verify else ''}"):
        report = export_gguf(source, form.type, output, verify, form.shard_bytes, form.modelfile)
    files = f"{report.files} files, " if report.files > 1 else ""
    said = f"{report.architecture}, {files}{gib(report.bytes)} in {report.seconds:.1f} s"
    console.say("verified" if verify else "written", f"{report.proof()}\n{said}")
    if verify and (better := report.better()):
        console.say("closer", f"--type {better}")
    if report.modelfile is not None:
        console.say("modelfile", report.modelfile.in_words())
    metrics = {key: value for key, value in asdict(report).items() if key not in {"path", "modelfile"}}
    return Outcome(str(report.path), metrics=metrics)
