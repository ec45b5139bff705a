"""GGUF files."""

from pathlib import Path
from typing import Literal

from tuner.api.given import absolute
from tuner.config.numbers import parse_bytes
from tuner.errors import RecipeError
from tuner.export.gguf.export import GgufReport
from tuner.export.gguf.export import export_gguf as write
from tuner.export.gguf.file import TYPES
from tuner.export.gguf.source import source_of
from tuner.export.source import Weights
from tuner.rundir.model_path import ignore_warning


def export_gguf(  # noqa: PLR0913, PLR0917 - one parameter for each option
    path: str | Path, type: str = "bf16", output: str | Path | None = None,  # noqa: A002 - the option's name
    adapter: Literal["merge", "keep"] = "merge", step: int | Literal["newest", "best"] = "newest",
    weights: str = "trained", shard_size: str | int | None = None, modelfile: bool = False, verify: bool = True,
) -> GgufReport:
    """Write a run, a checkpoint or a Hugging Face directory to `output` (default `RUN/exports/step-N-TYPE.gguf`).

    llama.cpp answers from it as the trained model does before it appears. A kept adapter is written by itself. More
    than `shard_size` bytes become several files in a directory. Raises RecipeError for a target that is there and for
    what llama.cpp has no file for, MachineError where a library is missing, and VerificationError, with nothing
    published, where it answers otherwise.
    """
    kind = type.lower()
    if kind not in TYPES:
        raise RecipeError(f"type {type}: no such type", hint=f"there are: {', '.join(TYPES)}")
    source = source_of(absolute(path), ignore_warning, step, Weights.parse(weights), adapter == "keep")
    target = None if output is None else absolute(output)
    shard_bytes = None if shard_size is None else parse_bytes(shard_size)
    return write(source, kind, target, shard_bytes, modelfile, verify)
