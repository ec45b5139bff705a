"""Write a GGUF file next to its place, have llama.cpp answer from it, and publish it with one rename."""

import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tuner
from tuner.errors import MachineError, RecipeError
from tuner.export.gguf import file, kquants, lora
from tuner.export.gguf.architecture import Architecture
from tuner.export.gguf.gelu import read_off_a_table
from tuner.export.gguf.modelfile import Modelfile, modelfile, place
from tuner.export.gguf.proof import Figures, fixed, prompts_of, prove, texts_of
from tuner.export.gguf.source import GgufSource, load_tokenizer
from tuner.export.gguf.vocabulary import encoded_otherwise, named_for, vocabulary
from tuner.export.hf import temporary
from tuner.export.tensors import OpenFiles
from tuner.export.write import quiet
from tuner.runtime.files import fsync_dir, machine_errors, publish_dir


@dataclass(frozen=True)
class GgufForm:
    """What is written."""

    type: str = "bf16"
    output: Path | None = None
    """Where; None for the source's own place."""
    shard_bytes: int | None = None
    """The size of the largest file, of which there may be several in a directory."""
    modelfile: bool = False
    """Whether a Modelfile for Ollama is next to it."""
    verify: bool = True


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
        at = file.TYPES.index(self.type)
        return None if self.type in file.PLAIN else (file.TYPES[at - 1] if self.type != "q8_0" else "bf16")


@dataclass(frozen=True)
class _Made:
    """What the files of a source are made of."""

    source: GgufSource
    architecture: Architecture
    words: Mapping[str, Any]
    """The keys of its tokenizer."""
    metadata: Mapping[str, Any]

    def write(self, path: Path, kind: str, shard_bytes: int | None) -> list[Path]:
        """Write the model, or its adapter by itself."""
        if not self.source.is_adapter:
            return self.write_model(path, kind, shard_bytes)
        with OpenFiles() as files:
            base = self.architecture.tensors(self.source.tensors(files))
            keys, tensors = lora.adapter(self.architecture, self.source.low_rank(files), base)
            return file.write_gguf(path, self.architecture.name, {**keys, **self.metadata}, tensors, kind)

    def write_model(self, path: Path, kind: str, shard_bytes: int | None = None) -> list[Path]:
        """Write the whole model: of an adapter what it was trained on."""
        with OpenFiles() as files:
            published = self.source.tensors(files)
            keys = {**self.architecture.keys(published), **self.words, **self.metadata}
            tensors = self.architecture.tensors(published)
            return file.write_gguf(path, self.architecture.name, keys, tensors, kind, shard_bytes)


def export_gguf(source: GgufSource, form: GgufForm) -> GgufReport:
    """Write, prove and publish. The target must not exist.

    Raises RecipeError where llama.cpp has no such model, and VerificationError, with nothing published, where it
    answers otherwise than the trained one.
    """
    started = time.perf_counter()
    _require_libraries(form)
    target = form.output or source.default_output(form.type)
    _require_choices(source, form, target)
    with quiet(), source.held():
        architecture = Architecture.of(source.config)
        tokenizer = load_tokenizer(source.tokenizer_directory)
        ends, recorded = source.ends(tokenizer), source.texts()
        sample = [*fixed()[0], *(str(each["text"]) for each in recorded)]
        words = vocabulary(tokenizer, architecture.facts["vocab_size"], ends, sample)
        made = _Made(source, architecture, words, _metadata(source, tokenizer, form.verify))
        with temporary(target) as directory:
            exact = figures = None
            if form.verify:
                texts = texts_of(tokenizer, recorded, ends, source.tokenizer_directory)
                reference = source.reference()
                if architecture.reads_a_table:
                    reference = read_off_a_table(reference)
                prompts = prompts_of(texts, reference, recorded, architecture.context)
                base = made.write_model(directory / "base.gguf", "f32")[0] if source.is_adapter else None
            for kind in dict.fromkeys(("f32", form.type) if form.verify else (form.type,)):
                (directory / target.name).unlink(missing_ok=True)
                files = made.write(directory / target.name, kind, form.shard_bytes if kind == form.type else None)
                if form.verify:
                    figures = prove(base or files[0], kind, texts, prompts, files[0] if base else None)
                    exact = exact or figures
            model = modelfile(target.name, tokenizer, words, ends) if form.modelfile else None
            published = _publish(files, target, model)
    size, seconds = sum(path.stat().st_size for path in published), time.perf_counter() - started
    other = encoded_otherwise(tokenizer, words)
    return GgufReport(
        published[0], form.type, architecture.name, size, seconds, exact, figures, other, len(published), model
    )


def _publish(files: Sequence[Path], target: Path, model: Modelfile | None) -> list[Path]:
    """Give what was made its name, by one rename; returns where the files are now."""
    made = files[0] if len(files) == 1 else files[0].parent
    final = target if len(files) == 1 else target.with_name(made.name)
    _require_free(final)
    if len(files) > 1:
        publish_dir(made, final)
        return [final / path.name for path in files]
    with machine_errors(final):
        os.rename(made, final)
        fsync_dir(final.parent)
    if model is not None:
        model.write(target)
    return [final]


def _require_choices(source: GgufSource, form: GgufForm, target: Path) -> None:
    """Raise RecipeError where a target is there, or options do not go together."""
    if source.is_adapter and form.type not in file.PLAIN:
        raise RecipeError(f"--type {form.type}: an adapter's ranks do not fill blocks", hint="write --type bf16")
    if form.modelfile and (source.is_adapter or form.shard_bytes):
        raise RecipeError("--modelfile is written next to one file of a whole model", hint="leave out --modelfile")
    if source.is_adapter and form.shard_bytes:
        raise RecipeError("--shard-size: an adapter is one file", hint="leave out --shard-size")
    _require_free(target)
    if form.shard_bytes:
        _require_free(target.with_name(target.name.removesuffix(".gguf")))
    if form.modelfile:
        _require_free(place(target))


def _metadata(source: GgufSource, tokenizer: Any, verify: bool) -> dict[str, Any]:
    proof = f"llama.cpp of xllamacpp {importlib.metadata.version('xllamacpp')}" if verify else "not verified"
    name = named_for(source.lineage["general.name"], tokenizer)
    return {**source.lineage, "general.name": name, "tuner.version": tuner.__version__, "tuner.verified": proof}


def _require_libraries(form: GgufForm) -> None:
    is_k = form.type in kquants.mixes()
    for name in ("gguf", *(["xllamacpp"] if form.verify or is_k else [])):
        if importlib.util.find_spec(name) is None:
            raise MachineError(f"the library {name} is missing", hint="install it: pip install gguf xllamacpp")
    if is_k:
        kquants.quantizer()


def _require_free(target: Path) -> None:
    if os.path.lexists(target):
        raise RecipeError(f"{target}: exists already; nothing was changed")
