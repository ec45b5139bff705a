"""Write a GGUF file next to its place, have llama.cpp answer from it, and publish it with one rename."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tuner
from tuner.errors import MachineError, RecipeError
from tuner.export.gguf import file
from tuner.export.gguf.architecture import Architecture
from tuner.export.gguf.gelu import read_off_a_table
from tuner.export.gguf.proof import Figures, Prompts, Texts, fixed, prompts_of, prove, texts_of
from tuner.export.gguf.source import GgufSource, load_tokenizer
from tuner.export.gguf.vocabulary import named_for, vocabulary
from tuner.export.hf import temporary
from tuner.export.tensors import OpenFiles
from tuner.export.write import quiet
from tuner.runtime.files import fsync_dir, machine_errors


@dataclass(frozen=True)
class GgufReport:
    """A published file. Figures are None where it was not verified."""

    path: Path
    type: str
    architecture: str
    bytes: int
    seconds: float
    exact: Figures | None
    """At f32, which proves names, layouts and keys."""
    figures: Figures | None
    """Of the file's own type."""

    def proof(self) -> str:
        """What was found, for people."""
        if self.figures is None or self.exact is None:
            return "not verified: --no-verify"
        same = (
            f"llama.cpp gives the ids of {self.exact.texts:,} texts and renders {self.exact.chats:,} chats as trained; "
            f"at f32 its log-probabilities are within {self.exact.difference:.1e} nats over {self.exact.tokens} tokens"
        )
        if self.type == "f32":
            return same
        return (
            f"{same}\n{self.type}: KL {self.figures.kl:.2g} nats a token, the same likeliest token in "
            f"{self.figures.greedy} of {self.figures.tokens}"
        )

    def better(self) -> str | None:
        """The next type that is closer to the trained model; None where there is none."""
        at = file.TYPES.index(self.type)
        return None if self.type in file.PLAIN else (file.TYPES[at - 1] if self.type != "q8_0" else "bf16")


def export_gguf(source: GgufSource, kind: str, output: Path | None = None, verify: bool = True) -> GgufReport:
    """Write, prove and publish. The target must not exist.

    Raises RecipeError where llama.cpp has no such model, and VerificationError, with nothing published, where it
    answers otherwise than the trained one.
    """
    started = time.perf_counter()
    _require_libraries(verify)
    target = output or source.default_output(kind)
    _require_free(target)
    with quiet(), source.held():
        architecture = Architecture.of(source.config)
        tokenizer = load_tokenizer(source.tokenizer_directory)
        ends, recorded = source.ends(tokenizer), source.texts()
        sample = [*fixed()[0], *(str(each["text"]) for each in recorded)]
        keys = vocabulary(tokenizer, architecture.facts["vocab_size"], ends, sample)
        keys |= _metadata(source, tokenizer, verify)
        exact = figures = None
        with temporary(target) as directory:
            made = directory / target.name
            if verify:
                texts = texts_of(tokenizer, recorded, ends, source.tokenizer_directory)
                reference = source.reference()
                if architecture.reads_a_table:
                    reference = read_off_a_table(reference)
                prompts = prompts_of(texts, reference, recorded, architecture.context)
                exact = _proven(source, architecture, keys, made, "f32", texts, prompts)
                figures = exact if kind == "f32" else _proven(source, architecture, keys, made, kind, texts, prompts)
            else:
                _write(source, architecture, keys, made, kind)
            _require_free(target)
            with machine_errors(target):
                os.rename(made, target)
                fsync_dir(target.parent)
    size = target.stat().st_size
    return GgufReport(target, kind, architecture.name, size, time.perf_counter() - started, exact, figures)


def _proven(  # noqa: PLR0913, PLR0917 - what a proof is about
    source: GgufSource,
    architecture: Architecture,
    keys: Mapping[str, Any],
    path: Path,
    kind: str,
    texts: Texts,
    prompts: Prompts,
) -> Figures:
    """Write the file in one type, in place of what was there, and hold llama.cpp's answers against the model's."""
    path.unlink(missing_ok=True)
    _write(source, architecture, keys, path, kind)
    return prove(path.parent, path, kind, texts, prompts)


def _write(source: GgufSource, architecture: Architecture, keys: Mapping[str, Any], path: Path, kind: str) -> None:
    with OpenFiles() as files:
        published = source.tensors(files)
        keys = {**architecture.keys(published), **keys}
        file.write_gguf(path, architecture.name, keys, architecture.tensors(published), kind)


def _metadata(source: GgufSource, tokenizer: Any, verify: bool) -> dict[str, str]:
    proof = f"llama.cpp of xllamacpp {importlib.metadata.version('xllamacpp')}" if verify else "not verified"
    name = named_for(source.lineage["general.name"], tokenizer)
    return {**source.lineage, "general.name": name, "tuner.version": tuner.__version__, "tuner.verified": proof}


def _require_libraries(verify: bool) -> None:
    for name in ("gguf", *(["xllamacpp"] if verify else [])):
        if importlib.util.find_spec(name) is None:
            raise MachineError(f"the library {name} is missing", hint="install it: pip install gguf xllamacpp")


def _require_free(target: Path) -> None:
    if os.path.lexists(target):
        raise RecipeError(f"{target}: exists already; nothing was changed")
