"""The names of prepared directories: a hash of everything that decides their bytes, and of nothing else."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tuner.config.duration import Duration
from tuner.data.building.sampling import Share
from tuner.data.reading.sources import SourceFile, expand
from tuner.errors import DataError

if TYPE_CHECKING:
    from tuner.config.recipe import DataSource
    from tuner.data.building.spec import PrepareSpec

FORMAT_VERSION = 4
"""Counts up when the same input would give other bytes."""
Part = Literal["documents", "rows", "content", "nothing"]
FIELDS: dict[str, dict[str, Part]] = {
    "DataSection": {
        "train": "content",
        "eval": "documents",
        "max_length": "rows",
        "too_long": "rows",
        "packing": "rows",
        "shuffle": "nothing",
        "on_bad_row": "documents",
        "workers": "nothing",
        "cache_dir": "nothing",
    },
    "DataSource": {
        "path": "content",
        "format": "documents",
        "columns": "documents",
        "weight": "documents",
        "count": "documents",
    },
    "TokenizerSection": {
        "name_or_path": "content",
        "chat_template": "content",
        "add_tokens": "content",
        "special_tokens_in_text": "documents",
    },
    "AddedToken": {"token": "content", "special": "content"},
    "Examples": {"kind": "documents", "train_on": "documents"},
}
"""What each field of the recipe decides: the encoded documents and with them everything; the packed rows alone;
`content`: the bytes that it leads to decide, not its own text; or nothing. A test holds every field against it."""


@dataclass(frozen=True)
class Source:
    """One entry of `data.train` or `data.eval`: its files, in order, and how much of them is taken."""

    path: str
    share: Share
    files: Sequence[SourceFile]


@dataclass(frozen=True)
class Keys:
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


def sources_of(spec: "PrepareSpec") -> SplitSources:
    """The sources of `data.train`, and those of `data.eval` where it has its own. DataError where one is not there."""
    data = spec.data
    held = None if data.eval is None or isinstance(data.eval, Duration) else _sources(data.eval)
    return SplitSources(_sources(data.train), held)


def keys_of(spec: "PrepareSpec", sources: SplitSources | None = None) -> Keys:
    """Read the sources and hash what decides the result. DataError for a source that cannot be read."""
    data = spec.data
    train, held = sources or sources_of(spec)
    split = data.eval if isinstance(data.eval, Duration) else None
    stamps = {file.path: _stamp(file.path) for source in [*train, *(held or [])] for file in source.files}
    drawn = any(source.share.is_drawn for source in [*train, *(held or [])])
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
    }
    encoded = _hash(fields)
    rows = {
        "encoded": encoded,
        "max_length": spec.max_length,
        "too_long": spec.too_long,
        "packing": data.packing,
    }
    return Keys(encoded, _hash(rows), fields, train, held, stamps)


def _sources(sections: "Sequence[DataSource]") -> list[Source]:
    files = expand(sections)
    return [
        Source(section.path, Share(section.weight, section.count), [file for file in files if file.source == number])
        for number, section in enumerate(sections)
    ]


def _identity(sources: Sequence[Source]) -> list[Any]:
    return [file.identity() for source in sources for file in source.files]


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _hash(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
