"""What is to be prepared, and the names of prepared directories.

How a recipe's sections become a spec is the one place where `auto` becomes a number. A name is a hash of everything
that decides the bytes, and of nothing else.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tuner.config.numbers import Duration
from tuner.config.portions import Portion
from tuner.data.building.repetition import Repetition
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.encoding.tokenizer_files import load_tokenizer, tokenizer_directory
from tuner.data.sources import SourceFile, expand, first_portion
from tuner.errors import DataError, RecipeError
from tuner.runtime.dist import cores
from tuner.runtime.files import read_json, reading
from tuner.stages import cache_root

if TYPE_CHECKING:
    from tuner.config.methods import Examples, Method
    from tuner.config.recipe import DataSection, DataSource, ModelSection, TokenizerSection
    from tuner.data.building.pack import TooLong
    from tuner.data.encoding.turns import SpecialTokens


AUTO_MAX_LENGTH = 2048
"""`data.max_length: auto` is at most this many tokens."""
MANY_BYTES = 12 << 20
"""Fewer bytes of records are encoded in this process: starting workers would take longer."""
INFLATES = 4
"""How many times its size a compressed file has, as far as can be told before it is read."""
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
FORMAT_VERSION = 5
"""Counts up when the same input would give other bytes."""


@dataclass(frozen=True)
class PrepareSpec:
    """Everything that decides the prepared data, and where the cache is."""

    data: "DataSection"
    examples: "Examples"
    tokenizer: TextTokenizer
    max_length: int
    seed: int
    cache_dir: Path
    special_tokens_in_text: "SpecialTokens" = "refuse"
    positions: int | None = None
    """The model's longest position, where its config names one."""
    portion: Portion | None = None
    """The files of divided sources that are prepared; None: those of the first portion."""

    @property
    def too_long(self) -> "TooLong":
        """The policy for long documents, `auto` resolved."""
        return self.examples.too_long if self.data.too_long == "auto" else self.data.too_long

    @property
    def repetition(self) -> Repetition | None:
        """Which repetition in a document is too much, where it is looked for."""
        section = self.data.repetition
        if section.max_count is None:
            return None
        return Repetition(section.min_period, section.max_period, section.max_count)

    def called(self, portion: Portion) -> str:
        """A portion of the data, for people."""
        return f"{self.data.portions.noun if self.data.portions else 'portion'} {portion.name}"

    def workers(self, expected: int) -> int:
        """Processes that encode so many bytes of records; on Ray 0 where that is as many as the cluster has."""
        if self.data.engine == "ray":
            return 0 if self.data.workers == "auto" else self.data.workers
        return 1 if expected < MANY_BYTES else cores() if self.data.workers == "auto" else self.data.workers


def prepare_spec(
    model: "ModelSection", tokenizer: "TokenizerSection", data: "DataSection", method: "Method", seed: int
) -> PrepareSpec:
    """Return the spec of a recipe; reads the tokenizer's files and the model's config.json, nothing else.

    The cache is the recipe's `data.cache_dir`, else $TUNER_CACHE, else ~/.cache/tuner.
    Raises DataError and MachineError where these are missing, RecipeError where rows are longer than the model allows.
    """
    cache = (cache_root() if data.cache_dir is None else Path(data.cache_dir)).absolute()
    loaded = load_tokenizer(model.name_or_path, model.revision, tokenizer, cache)
    return PrepareSpec(
        data, method.examples, loaded, max_length=resolve_max_length(model, data), seed=seed, cache_dir=cache,
        special_tokens_in_text=tokenizer.special_tokens_in_text, positions=model_positions(model),
    )  # fmt: skip


def resolve_max_length(model: "ModelSection", data: "DataSection") -> int:
    """Return the tokens of a row: the recipe's, or the smaller of the model's positions and 2048. RecipeError."""
    positions = model_positions(model)
    if data.max_length == "auto":
        return AUTO_MAX_LENGTH if positions is None else min(positions, AUTO_MAX_LENGTH)
    if positions is not None and data.max_length > positions:
        raise RecipeError(
            f"data.max_length {data.max_length} is more than the model's {positions} positions",
            hint=f"set data.max_length: {positions}, or raise model.config.max_position_embeddings",
        )
    return data.max_length


def model_positions(model: "ModelSection") -> int | None:
    """Return the model's longest position by its config, with the recipe's overrides; None where it names none."""
    path = tokenizer_directory(model.name_or_path, model.revision) / "config.json"
    config: dict[str, Any] = read_json(path) if path.is_file() else {}
    return positions_in({**config, **model.config})


def positions_in(config: Mapping[str, Any]) -> int | None:
    """Return the longest position that a model's config names; None where it names none."""
    for key in _POSITION_KEYS:
        if isinstance(config.get(key), int) and config[key] > 0:
            return int(config[key])
    nested = config.get("text_config")
    return positions_in(nested) if isinstance(nested, dict) else None


@dataclass(frozen=True)
class Source:
    """One entry of `data.train` or `data.eval`: its files, in order, and how much of them is used.

    That is `weight` times its documents, or exactly `count` of them.
    """

    path: str
    files: Sequence[SourceFile]
    weight: float = 1.0
    count: int | None = None
    seed: int | None = None
    """What the share is drawn by; None: by the recipe's seed and the source's place in it."""

    @property
    def is_whole(self) -> bool:
        """Whether every document is used once."""
        return self.count is None and self.weight == 1

    @property
    def is_drawn(self) -> bool:
        """Whether the recipe's seed may decide what is used; whole multiples need none."""
        return self.seed is None and (self.count is not None or self.weight != math.floor(self.weight))

    def total(self, documents: int) -> int:
        """Documents taken of so many, repeats counted; halves are rounded up."""
        if documents == 0:
            return 0
        return self.count if self.count is not None else math.floor(self.weight * documents + 0.5)


class PreparedKeys(NamedTuple):
    """The names of both directories of a spec, and the sources, which were read for them."""

    encoded: str
    prepared: str
    encoded_fields: Mapping[str, Any]
    train: Sequence[Source]
    eval: Sequence[Source] | None
    stamps: Mapping[Path, tuple[int, ...]]
    """What each file was like before it was hashed."""

    def refuse_changed(self) -> None:
        """Raise DataError for a file that is no longer the one that was hashed: its rows would get another's name."""
        for path, stamp in self.stamps.items():
            if _stamp(path) != stamp:
                raise DataError(f"{path}: changed while it was read", hint="run the command again")


class SplitSources(NamedTuple):
    """The sources of each split; None for an eval split that is held out of the train sources, or not there."""

    train: list[Source]
    held: list[Source] | None

    def every(self) -> list[Source]:
        """Those of both splits."""
        return [*self.train, *(self.held or [])]


def sources_of(spec: PrepareSpec) -> SplitSources:
    """The sources of `data.train`, and those of `data.eval` where it has its own. DataError where one is not there."""
    data = spec.data
    own = None if data.eval is None or isinstance(data.eval, Duration) else data.eval
    divided, portion = data.portions, spec.portion or first_portion(data)
    if divided is not None and portion is not None and own is not None:
        own = divided.sources_of(own, portion.name)
    held = None if own is None else _sources(spec, own)
    if divided is None or portion is None:
        return SplitSources(_sources(spec, data.train), held)
    every = _sources(spec, divided.sources_of(data.train, portion.name))
    return SplitSources(_only(every, spec.called(portion), portion.files), held)


def keys_of(spec: PrepareSpec, sources: SplitSources | None = None) -> PreparedKeys:
    """Read the sources and hash what decides the result. DataError for a source that cannot be read."""
    data = spec.data
    sources = sources or sources_of(spec)
    train, held = sources
    split = data.eval if isinstance(data.eval, Duration) else None
    stamps = {file.path: _stamp(file.path) for source in sources.every() for file in source.files}
    drawn = any(source.is_drawn for source in sources.every())
    seeds = [source.seed for source in sources.every()]
    fields: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "train": _identity(train),
        "eval": None if held is None else _identity(held),
        "eval_files": None if data.eval is None else [len(source.files) for source in held or train],
        "split": None if split is None else [str(split.count), split.unit],
        "seed": spec.seed if split is not None or drawn else None,
        "tokenizer": spec.tokenizer.hash,
        "template": spec.tokenizer.template_hash,
        "eos_ids": list(spec.tokenizer.eos_ids),  # the model's too: they end the turns, and the samples' answers
        "special_tokens_in_text": spec.special_tokens_in_text,
        "method": spec.examples.kind,
        "train_on": spec.examples.train_on,
        "on_bad_row": data.on_bad_row,
        **({"seeds": seeds} if any(seed is not None for seed in seeds) else {}),
        **({} if spec.repetition is None else {"repetition": list(spec.repetition)}),
        **({} if data.pack_sources == "together" else {"pack_sources": data.pack_sources}),  # who has which is noted
    }
    encoded = _hash(fields)
    rows = {
        "encoded": encoded, "max_length": spec.max_length, "too_long": spec.too_long, "packing": data.packs_rows,
        **({} if data.max_prompt_length is None else {"max_prompt": data.max_prompt_length}),
        **({} if data.min_piece_length is None else {"min_piece": data.min_piece_length}),
        **({"rows": data.rows} if data.rows != "packed" else {}),
    }  # fmt: skip
    return PreparedKeys(encoded, _hash(rows), fields, train, held, stamps)


def files_of(spec: PrepareSpec, sections: "Sequence[DataSource]") -> list[SourceFile]:
    """The files of sources; arrays of ids with what parts them into documents and rows. DataError."""
    return [file if file.array is None else _settled(spec, file) for file in expand(sections, spec.cache_dir)]


def _settled(spec: PrepareSpec, file: SourceFile) -> SourceFile:
    assert file.array is not None
    array = replace(file.array, is_whole=spec.data.rows == "cut")
    if array.end == "auto" and not array.is_indexed:
        array = replace(array, end=spec.tokenizer.eos_id)
        if array.end is None:
            raise DataError(f"{file.name}: the tokenizer has no end token: end_id names the id that ends documents")
    if array.is_whole or array.end is None:
        array = replace(array, row=spec.max_length)
    return replace(file, array=array)


def _sources(spec: PrepareSpec, sections: "Sequence[DataSource]") -> list[Source]:
    files = files_of(spec, sections)
    return [
        Source(each.name, [file for file in files if file.source == number], each.weight, each.count, each.seed)
        for number, each in enumerate(sections)
    ]


def _only(sources: list[Source], called: str, files: Sequence[str]) -> list[Source]:
    """The sources with the files of a portion alone. Raises DataError for one that is gone."""
    wanted = set(files)
    if gone := wanted - {str(file.path) for source in sources for file in source.files}:
        raise DataError(f"{called}: {min(gone)} is gone", hint="put it back")
    kept = ([file for file in source.files if str(file.path) in wanted] for source in sources)
    return [replace(source, files=files) for source, files in zip(sources, kept, strict=True) if files]


def expected_bytes(sources: Iterable[Source]) -> int:
    """Bytes of all records, inflated, as far as sizes on disk tell."""
    return inflated_bytes(file for source in sources for file in source.files)


def inflated_bytes(files: Iterable[SourceFile]) -> int:
    """Bytes of the records of these files, inflated, as far as sizes on disk tell."""
    return sum(file.size() * (INFLATES if file.compression or file.kind == "parquet" else 1) for file in files)


def _identity(sources: Sequence[Source]) -> list[Any]:
    return [file.identity() for source in sources for file in source.files]


def _stamp(path: Path) -> tuple[int, ...]:
    with reading(path):
        status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _hash(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
