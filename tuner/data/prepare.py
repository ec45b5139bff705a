"""Prepare data: rows to a content-addressed directory of encoded documents and packed rows.

Two levels under the cache: `encoded/<key>` depends on the bytes of the sources, the tokenizer, the template, the
method and the hold-out; `prepared/<key>` adds row length and packing, so another `max_length` encodes nothing again.
Each is built in a temporary directory under a lock, flushed, and renamed.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonlines
import numpy as np
import pyarrow as pa

from tuner.config.duration import Duration
from tuner.data.encode import Encoder
from tuner.data.encoded import (
    REJECTS,
    SplitCounts,
    choose_eval,
    counts_of,
    encode_files,
    record_batches,
    split_file,
)
from tuner.data.pack import TooLong, cut, rows_table
from tuner.data.prepared import PREPARED_SCHEMA
from tuner.data.sources import SourceFile, expand
from tuner.data.tokenizer import TextTokenizer
from tuner.errors import DataError, MachineError
from tuner.runtime.files import (
    discard_dir,
    file_entries,
    machine_error,
    publish_dir,
    read_json,
    sha256_file,
    verify_entries,
    write_json,
)
from tuner.runtime.lock import FileLock

if TYPE_CHECKING:
    from tuner.config.recipe import DataSection, Method

FORMAT_VERSION = 1
"""Counts up when the same input would give other bytes."""
ENCODED_SCHEMA = "tuner.encoded/1"
MAX_SAMPLES = 16
Say = Callable[[str, str], None]
"""Prints (label, text) for people."""


@dataclass(frozen=True)
class PrepareRequest:
    """Everything that decides the prepared data, and where the cache is."""

    data: "DataSection"
    method: "Method"
    tokenizer: TextTokenizer
    max_length: int
    seed: int
    cache_dir: Path

    @property
    def too_long(self) -> TooLong:
        """The policy for long documents, `auto` resolved."""
        if self.data.too_long != "auto":
            return self.data.too_long
        return "split" if self.method.kind == "pretrain" else "drop"

    def encoder(self) -> Encoder:
        """The encoder of the method."""
        return Encoder(self.tokenizer, self.method.train_on if self.method.kind == "sft" else "all")


@dataclass(frozen=True)
class PreparedInfo:
    """A prepared directory and how it came to be."""

    path: Path
    key: str
    cached: bool
    report: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class _Keys:
    encoded: str
    prepared: str
    encoded_fields: dict[str, Any]
    train: list[SourceFile]
    eval: list[SourceFile] | None


def prepare(request: PrepareRequest, say: Say | None = None) -> PreparedInfo:
    """Return the prepared directory for `request`, building what the cache lacks.

    Raises DataError for rows that cannot be used and MachineError where the cache cannot be written.
    """
    started = time.monotonic()
    keys = _keys(request)
    final = request.cache_dir / "prepared" / keys.prepared
    manifest = _valid(final, PREPARED_SCHEMA)
    cached = manifest is not None
    if manifest is None:
        manifest, cached = _locked(final, PREPARED_SCHEMA, say, lambda tmp: _build_prepared(request, keys, tmp, say))
    return PreparedInfo(final, keys.prepared, cached, manifest["report"], time.monotonic() - started)


def find_prepared(request: PrepareRequest) -> Path | None:
    """Return the prepared directory for `request` where it exists already; builds nothing."""
    final = prepared_path(request)
    return final if _valid(final, PREPARED_SCHEMA) is not None else None


def prepared_path(request: PrepareRequest) -> Path:
    """Return the directory that `request` has or would have; its sources are read for their hashes."""
    return request.cache_dir / "prepared" / _keys(request).prepared


def _keys(request: PrepareRequest) -> _Keys:
    data, method = request.data, request.method
    train = expand(data.train)
    split = data.eval if isinstance(data.eval, Duration) else None
    held = None if data.eval is None or isinstance(data.eval, Duration) else expand(data.eval)
    fields: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "train": [file.identity() for file in train],
        "eval": None if held is None else [file.identity() for file in held],
        "split": None if split is None else [str(split.count), split.unit, request.seed],
        "tokenizer": request.tokenizer.hash,
        "template": request.tokenizer.template_hash,
        "method": method.kind,
        "train_on": method.train_on if method.kind == "sft" else "all",
        "on_bad_row": data.on_bad_row,
    }
    encoded = _key(fields)
    prepared = _key(
        {
            "encoded": encoded,
            "max_length": request.max_length,
            "too_long": request.too_long,
            "packing": data.packing,
        }
    )
    return _Keys(encoded, prepared, fields, train, held)


def _key(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def _valid(path: Path, schema: str) -> dict[str, Any] | None:
    """The manifest of a whole directory, by its files' sizes; None where there is none or it is damaged."""
    try:
        manifest = read_json(path / "manifest.json")
        verify_entries(path, manifest["files"], hash=False)
    except (DataError, KeyError, TypeError, AttributeError):
        return None
    return manifest if manifest.get("schema") == schema else None


def _locked(
    final: Path, schema: str, say: Say | None, build: Callable[[Path], dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """Build `final` under its lock, or wait for whoever is building it; returns (manifest, was there already)."""
    parent = final.parent
    waiting = None if say is None else (lambda holder: say("waiting", f"{holder} is preparing the same data"))
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise machine_error(parent, error) from error
    # Dotted, and one lock for each key: other keys are built meanwhile, so only this key's leftovers are swept.
    with FileLock(parent / f".{final.name}.lock", on_wait=waiting):
        for pattern in (f".tmp-{final.name}-*", f".trash-*{final.name}-*"):
            for leftover in parent.glob(pattern):
                discard_dir(leftover)
        manifest = _valid(final, schema)
        if manifest is not None:
            return manifest, True
        if os.path.lexists(final):
            if say is not None:
                say("warning", f"{final} is damaged; it is built again")
            discard_dir(final)
        tmp = parent / f".tmp-{final.name}-{os.getpid()}"
        try:
            tmp.mkdir()
            manifest = {**build(tmp), "schema": schema, "key": final.name, "files": {}}
            manifest["files"] = file_entries(tmp)
            write_json(tmp / "manifest.json", manifest)
            publish_dir(tmp, final)
        except OSError as error:
            raise machine_error(final, error) from error
        finally:
            if tmp.exists():
                discard_dir(tmp)
        return manifest, False


def _build_encoded(request: PrepareRequest, keys: _Keys, tmp: Path) -> dict[str, Any]:
    encoder, vocabulary, policy = request.encoder(), request.tokenizer.vocab_size, request.data.on_bad_row
    (tmp / REJECTS).touch()
    split = request.data.eval if isinstance(request.data.eval, Duration) else None
    whole = tmp / ("all.arrow" if split else "train.arrow")
    read = encode_files(keys.train, whole, encoder, vocabulary, policy)
    _refuse_nothing(read, keys.train)
    train, held, overlap = read, None, 0
    if split is not None:
        split_file(whole, choose_eval(read.digests, split, request.seed), vocabulary)
        whole.unlink()
        train, held = counts_of(tmp / "train.arrow"), counts_of(tmp / "eval.arrow")
        train.skipped, train.dropped, train.rows = read.skipped, read.dropped, read.rows
    elif keys.eval is not None:
        held = encode_files(keys.eval, tmp / "eval.arrow", encoder, vocabulary, policy)
        _refuse_nothing(held, keys.eval)
        overlap = len(set(train.digests) & set(held.digests))
    n_rows = read.rows + (held.rows if held is not None and split is None else 0)
    return {
        "masks": {"proven": train.documents + (held.documents if held else 0), "rows": n_rows},
        "fields": keys.encoded_fields,
        "sources": {"train": [str(f.path) for f in keys.train], "eval": [str(f.path) for f in keys.eval or []]},
        "train": train.report(),
        "eval": None if held is None else held.report(),
        "overlap": overlap,
    }


def _refuse_nothing(counts: SplitCounts, files: list[SourceFile]) -> None:
    if counts.documents:
        return
    names = ", ".join(str(file.path) for file in files[:3]) + (", ..." if len(files) > 3 else "")
    if counts.rows == 0:
        raise DataError(f"{names}: no rows")
    reasons = counts.skipped + counts.dropped
    listed = "; ".join(f"{count:,} {reason}" for reason, count in reasons.most_common(3))
    raise DataError(f"{names}: nothing to train on in {counts.rows:,} rows: {listed}")


def _build_prepared(request: PrepareRequest, keys: _Keys, tmp: Path, say: Say | None) -> dict[str, Any]:
    encoded = request.cache_dir / "encoded" / keys.encoded
    source = _valid(encoded, ENCODED_SCHEMA)
    if source is None:
        source, _ = _locked(encoded, ENCODED_SCHEMA, say, lambda directory: _build_encoded(request, keys, directory))
    report: dict[str, Any] = {"masks": source["masks"], "overlap": source["overlap"], "eval": None}
    for split in ("train", "eval"):
        if source[split] is not None:
            _link(encoded / f"{split}.arrow", tmp / f"{split}.documents.arrow")
            report[split] = {**source[split], **_write_rows(request, tmp, split)}
            if report[split]["packed_rows"] == 0:
                reasons = "; ".join(f"{count:,} {why}" for why, count in report[split]["dropped_rows"].items())
                raise DataError(
                    f"data.{split}: nothing is left of {source[split]['documents']:,} documents: {reasons}",
                    hint=f"raise data.max_length ({request.max_length:,}) or set data.too_long: truncate",
                )
    _link(encoded / REJECTS, tmp / REJECTS)
    samples = _samples(tmp / "eval.documents.arrow", request) if source["eval"] is not None else []
    with jsonlines.open(tmp / "samples.jsonl", "w") as writer:
        writer.write_all(samples)
    return {
        "report": report,
        "max_length": request.max_length,
        "too_long": request.too_long,
        "packing": request.data.packing,
        "encoded_key": keys.encoded,
        "tokenizer_hash": request.tokenizer.hash,
        "template_hash": request.tokenizer.template_hash,
        "vocab_size": request.tokenizer.vocab_size,
        "method": keys.encoded_fields["method"],
        "train_on": keys.encoded_fields["train_on"],
        "sources": source["sources"],
        "samples": len(samples),
    }


def _write_rows(request: PrepareRequest, tmp: Path, split: str) -> dict[str, Any]:
    segments = cut(record_batches(tmp / f"{split}.documents.arrow"), request.max_length, request.too_long)
    table = rows_table(segments, request.max_length, request.data.packing)
    with (tmp / f"{split}.rows.arrow").open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1 << 16)
    tokens = int(segments.tokens.sum())
    return {
        "packed_rows": table.num_rows,
        "packed_documents": len(np.unique(segments.document)),
        "packed_tokens": tokens,
        "packed_trained": int(segments.trained.sum()),
        "fill": round(tokens / (table.num_rows * request.max_length), 6) if table.num_rows else 0.0,
        "dropped_rows": segments.dropped,
        "truncated": segments.truncated,
        "split": segments.split,
    }


def _samples(path: Path, request: PrepareRequest) -> list[dict[str, Any]]:
    """Up to 16 different held-out prompts that leave room in a row, with what the data answers."""
    samples: dict[tuple[int, ...], dict[str, Any]] = {}
    for batch in record_batches(path):
        ids, prompts = batch.column("input_ids"), batch.column("prompt_tokens").to_pylist()
        for i, count in enumerate(prompts):
            document = ids[i].values.to_numpy().tolist() if 0 < count < request.max_length else []
            prompt = tuple(document[:count])
            if prompt and prompt not in samples:
                samples[prompt] = {
                    "prompt_ids": list(prompt),
                    "prompt_text": request.tokenizer.decode(prompt),
                    "reference": request.tokenizer.decode(_answer(document[count:], request), True).strip(),
                }
            if len(samples) == MAX_SAMPLES:
                return list(samples.values())
    return list(samples.values())


def _answer(ids: list[int], request: PrepareRequest) -> list[int]:
    ends = set(request.tokenizer.eos_ids)
    return ids[: next((i for i, token in enumerate(ids) if token in ends), len(ids))]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        try:
            shutil.copyfile(source, target)
        except OSError as error:
            raise MachineError(f"{target}: {error.strerror or error}") from error
        if sha256_file(source) != sha256_file(target):
            raise MachineError(f"{target}: the copy differs from {source}") from None
