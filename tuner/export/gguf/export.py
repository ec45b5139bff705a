"""Write a GGUF file next to its place, have llama.cpp answer from it, and publish it with one rename."""

import importlib.metadata
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tuner
from tuner.errors import RecipeError
from tuner.export.gguf import engine, file, kquants, lora
from tuner.export.gguf.architecture import Architecture
from tuner.export.gguf.modelfile import Modelfile, modelfile, place
from tuner.export.gguf.proof import Figures, fixed, prompts_of, prove, texts_of
from tuner.export.gguf.source import GgufSource
from tuner.export.gguf.vocabulary import encoded_otherwise, named_for, vocabulary
from tuner.export.hf import temporary
from tuner.export.tensors import OpenFiles
from tuner.export.write import ends_of, load_tokenizer, quiet
from tuner.rundir.checkpoints import CheckpointHold
from tuner.runtime.files import publish_dir


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
    encoded_otherwise: list[str]
    """Texts that llama.cpp gives other ids whatever the file says."""
    files: int = 1
    modelfile: Modelfile | None = None

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
        return None if self.type in file.PLAIN else file.TYPES[file.TYPES.index(self.type) - 1]


def export_gguf(
    source: GgufSource,
    kind: str,
    output: Path | None = None,
    shard_bytes: int | None = None,
    with_modelfile: bool = False,
    verify: bool = True,
) -> GgufReport:
    """Write a file of a type, prove and publish it. ``output``, or the source's own place, must not be there.

    What is larger than ``shard_bytes`` becomes a directory of several files; a Modelfile for Ollama is next to it where
    that is wanted. Raises RecipeError where llama.cpp has no such model, MachineError where a library is missing, and
    VerificationError, with nothing published, where it answers otherwise than the trained one.
    """
    started = time.perf_counter()
    if verify:
        engine.require_library()
    if kind in kquants.mixes():
        kquants.quantizer()
    target = output or source.place.with_name(f"{source.place.name}-{kind}.gguf")
    _require_choices(source, kind, target, shard_bytes, with_modelfile)
    with quiet(), ExitStack() as stack:
        for info in source.checkpoints:
            stack.enter_context(CheckpointHold(info.path))
        architecture = Architecture.of(source.config)
        tokenizer = load_tokenizer(source.tokenizer_directory)
        ends = ends_of(tokenizer, source.generation.get("eos_token_id"), getattr(source.config, "eos_token_id", None))
        sample = [*fixed()[0], *(str(each["text"]) for each in source.texts)]
        words = vocabulary(tokenizer, architecture.facts["vocab_size"], ends, sample)
        metadata = _metadata(source, tokenizer, verify)
        directory = stack.enter_context(temporary(target))

        def written(name: str, kind: str, shard_bytes: int | None = None, is_base: bool = False) -> list[Path]:
            with OpenFiles() as files:
                published = source.tensors(files)
                keys, tensors = {**architecture.keys(published), **words}, architecture.tensors(published)
                if source.low_rank and not is_base:
                    keys, tensors = lora.adapter(architecture, source.low_rank(files), tensors)
                return file.write_gguf(
                    directory / name, architecture.name, {**keys, **metadata}, tensors, kind, shard_bytes
                )

        exact = figures = base = None
        if verify:
            texts = texts_of(tokenizer, source.texts, ends, source.tokenizer_directory)
            reference = architecture.computed(source.reference())
            prompts = prompts_of(texts, reference, source.texts, architecture.context)
            base = written(f"base-of-{target.name}", "f32", is_base=True)[0] if source.low_rank else None
        for each in dict.fromkeys(("f32", kind) if verify else (kind,)):
            (directory / target.name).unlink(missing_ok=True)
            files = written(target.name, each, shard_bytes if each == kind else None)
            if verify:
                figures = prove(base or files[0], each, texts, prompts, files[0] if base else None)
                exact = exact or figures
        model = modelfile(target.name, tokenizer, words, ends) if with_modelfile else None
        published = _publish(files, target, model)
    size, seconds = sum(path.stat().st_size for path in published), time.perf_counter() - started
    other, count = encoded_otherwise(tokenizer, words), len(published)
    return GgufReport(published[0], kind, architecture.name, size, seconds, exact, figures, other, count, model)


def _publish(files: Sequence[Path], target: Path, model: Modelfile | None) -> list[Path]:
    """Give what was made its name, by one rename; returns where the files are now."""
    made = files[0] if len(files) == 1 else files[0].parent
    final = target if len(files) == 1 else target.with_name(made.name)
    publish_dir(made, final)
    if model is not None:
        model.write(target)
    return [final] if len(files) == 1 else [final / path.name for path in files]


def _require_choices(
    source: GgufSource, kind: str, target: Path, shard_bytes: int | None, with_modelfile: bool
) -> None:
    """Raise RecipeError where a target is there or no file's name, or options do not go together."""
    if target.suffix != ".gguf":
        raise RecipeError(f"{target}: no name of a GGUF file", hint=f"write --output {target.name}.gguf")
    if source.low_rank and kind not in file.PLAIN:
        raise RecipeError(f"--type {kind}: an adapter's ranks do not fill blocks", hint="write --type bf16")
    if with_modelfile and (source.low_rank or shard_bytes):
        raise RecipeError("--modelfile is written next to one file of a whole model", hint="leave out --modelfile")
    if source.low_rank and shard_bytes:
        raise RecipeError("--shard-size: an adapter is one file", hint="leave out --shard-size")
    targets = [target, *([target.with_name(target.name.removesuffix(".gguf"))] if shard_bytes else [])]
    for each in [*targets, *([place(target)] if with_modelfile else [])]:
        if os.path.lexists(each):
            raise RecipeError(f"{each}: exists already; nothing was changed")


def _metadata(source: GgufSource, tokenizer: Any, verify: bool) -> dict[str, Any]:
    proof = f"llama.cpp of xllamacpp {importlib.metadata.version('xllamacpp')}" if verify else "not verified"
    name = named_for(source.lineage["general.name"], tokenizer)
    return {**source.lineage, "general.name": name, "tuner.version": tuner.__version__, "tuner.verified": proof}
