"""What `tuner export-gguf` does and shows."""

from dataclasses import asdict
from pathlib import Path

from tuner.cli.command import Outcome
from tuner.export.gguf.export import export_gguf
from tuner.export.gguf.source import GgufSource, source_of
from tuner.export.source import Weights
from tuner.runtime.console import Console
from tuner.runtime.files import gib

__all__ = ["Weights", "export", "source_of"]


def export(
    source: GgufSource, console: Console, kind: str, output: Path | None, shard_bytes: int | None, with_modelfile: bool,
    verify: bool,
) -> Outcome:
    """Write, prove and publish, and say what was measured."""
    with console.doing(f"writing {kind}{' and asking llama.cpp' if verify else ''}"):
        report = export_gguf(source, kind, output, shard_bytes, with_modelfile, verify)
    files = f"{report.files} files, " if report.files > 1 else ""
    said = f"{report.architecture}, {files}{gib(report.bytes)} in {report.seconds:.1f} s"
    console.say("verified" if verify else "written", f"{report.proof()}\n{said}")
    if verify and (better := report.better()):
        console.say("closer", f"--type {better}")
    for each in report.encoded_otherwise:
        console.say("differs", f"llama.cpp gives other ids to {each}")
    if report.modelfile is not None:
        console.say("modelfile", report.modelfile.in_words())
    metrics = {key: value for key, value in asdict(report).items() if key not in {"path", "modelfile"}}
    return Outcome(str(report.path), metrics=metrics)
