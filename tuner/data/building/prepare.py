"""Prepare data: rows to a content-addressed directory of encoded documents and packed rows.

Two levels under the cache: `encoded/<key>` depends on the bytes of the sources, the tokenizer, the template, the
method, the shares and the hold-out; `prepared/<key>` adds row length and packing, so another `max_length` encodes
nothing again. Each is built in a temporary directory under a lock, flushed, and renamed.
"""

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonlines
import numpy as np
import pyarrow as pa

from tuner.data.building.cache import build_once, cache_path, valid
from tuner.data.building.documents import REJECTS, EncodingPool, build_documents, start_pool
from tuner.data.building.encoded import record_batches
from tuner.data.building.keys import Keys, keys_of, sources_of
from tuner.data.building.pack import cut, row_batches
from tuner.data.building.spec import PrepareSpec
from tuner.data.id_probes import ID_PROBES, record_probes, write_probes
from tuner.data.prepared import ROWS_SCHEMA, view
from tuner.errors import DataError, MachineError
from tuner.runtime.files import sha256_file
from tuner.runtime.memory import give_back

if TYPE_CHECKING:
    from tuner.runtime.console import Console

MAX_SAMPLES = 16


@dataclass(frozen=True)
class PreparedInfo:
    """A prepared directory and how it came to be."""

    path: Path
    key: str
    cached: bool
    report: dict[str, Any]
    seconds: float

    @property
    def megabytes_per_s(self) -> float:
        """Input bytes, in millions, for each second from start to end; of a cached one, how fast it was checked."""
        return float(self.report["bytes"]) / 1e6 / max(self.seconds, 1e-9)


def prepare(spec: PrepareSpec, console: "Console | None" = None) -> PreparedInfo:
    """Return the prepared directory for `spec`, building what the cache lacks.

    Raises DataError for rows that cannot be used and MachineError where the cache cannot be written.
    """
    started = time.monotonic()
    sources = sources_of(spec)
    # Before it is known whether it is needed: it loads the tokenizer while the sources are hashed.
    with start_pool(spec, [*sources.train, *(sources.held or [])]) or nullcontext() as pool:
        keys = keys_of(spec, sources)
        final = cache_path(spec.cache_dir, "prepared", keys.prepared)
        manifest = valid(final, "prepared")
        cached = manifest is not None
        if manifest is None:

            def make(tmp: Path) -> dict[str, Any]:
                return _build_rows(spec, keys, tmp, console, pool)

            manifest, cached = build_once(spec.cache_dir, "prepared", keys.prepared, make, console)
        elif pool is not None:
            pool.end(at_once=True)
    return PreparedInfo(final, keys.prepared, cached, manifest["report"], time.monotonic() - started)


def find_prepared(spec: PrepareSpec) -> Path | None:
    """Return the prepared directory for `spec` where it exists already; builds nothing."""
    final = prepared_path(spec)
    return final if valid(final, "prepared") is not None else None


def check_prepared(spec: PrepareSpec) -> Path:
    """Return the prepared directory for `spec`; DataError saying what is missing where it would have to be built."""
    keys = keys_of(spec)
    path = cache_path(spec.cache_dir, "prepared", keys.prepared)
    if valid(path, "prepared") is not None:
        return path
    state = "is damaged" if path.exists() else "is not there"
    encoded = valid(cache_path(spec.cache_dir, "encoded", keys.encoded), "encoded") is not None
    more = "its rows must be packed" if encoded else "its documents must be encoded and packed"
    raise DataError(f"not prepared: {path} {state}; {more}", hint="run: tuner prepare-data RECIPE")


def prepared_path(spec: PrepareSpec) -> Path:
    """Return the directory that `spec` has or would have; its sources are read for their hashes."""
    return cache_path(spec.cache_dir, "prepared", keys_of(spec).prepared)


def _build_rows(
    spec: PrepareSpec, keys: Keys, tmp: Path, console: "Console | None", pool: EncodingPool | None
) -> dict[str, Any]:
    """The second level: documents linked from the first, which is built where it is missing, and the packed rows."""

    def link(encoded: Path) -> None:
        for source in encoded.glob("*.arrow"):
            _link(source, tmp / f"{source.stem}.documents.arrow")
        _link(encoded / REJECTS, tmp / REJECTS)

    def make(new: Path) -> dict[str, Any]:
        return build_documents(spec, keys, new, console, pool)

    encoded, _ = build_once(spec.cache_dir, "encoded", keys.encoded, make, console, link)
    give_back()  # what the tables of documents held: packing needs its own
    report = dict(encoded["report"])
    for split in ("train", "eval"):
        if report[split] is not None:
            rows = _write_rows(spec, tmp, split)
            if rows["packed_rows"] == 0:
                raise _nothing_left(spec, split, report[split]["documents"], rows["dropped_rows"])
            report[split] = {**report[split], **rows}
    samples = _samples(tmp / "eval.documents.arrow", spec) if report["eval"] is not None else []
    with jsonlines.open(tmp / "samples.jsonl", "w") as writer:
        writer.write_all(samples)
    write_probes(tmp / ID_PROBES, record_probes((f for source in keys.train for f in source.files), spec.tokenizer))
    loaded_as = spec.tokenizer.loaded_as
    report["tokenizer"] = None if loaded_as is None else loaded_as.facts()
    return {
        "report": report,
        "max_length": spec.max_length,
        "too_long": spec.too_long,
        "packing": spec.data.packing,
        "encoded_key": keys.encoded,
        "tokenizer_hash": spec.tokenizer.hash,
        "template_hash": spec.tokenizer.template_hash,
        "vocab_size": spec.tokenizer.vocab_size,
        "method": keys.encoded_fields["method"],
        "train_on": keys.encoded_fields["train_on"],
        "sources": encoded["sources"],
        "eval_documents": encoded["eval_documents"],
        "samples": len(samples),
        # What the first level has hashed is the same file here.
        "files": {_linked_name(name): entry for name, entry in encoded["files"].items()},
    }


def _linked_name(name: str) -> str:
    """The name in the second level of a file of the first."""
    return name if name == REJECTS else f"{Path(name).stem}.documents.arrow"


def _write_rows(spec: PrepareSpec, tmp: Path, split: str) -> dict[str, Any]:
    segments = cut(record_batches(tmp / f"{split}.documents.arrow"), spec.max_length, spec.too_long)
    n_rows = 0
    path = str(tmp / f"{split}.rows.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, ROWS_SCHEMA) as writer:
        for batch in row_batches(segments, spec.max_length, spec.data.packing):
            writer.write_batch(batch)
            n_rows += batch.num_rows
    tokens = int(segments.tokens.sum(dtype=np.int64))
    return {
        "packed_rows": n_rows,
        "packed_documents": 1 + int(np.count_nonzero(np.diff(segments.document))) if n_rows else 0,
        "packed_tokens": tokens,
        "packed_trained": int(segments.trained.sum(dtype=np.int64)),
        "fill": round(tokens / (n_rows * spec.max_length), 6) if n_rows else 0.0,
        "dropped_rows": segments.dropped,
        "truncated": segments.truncated,
        "split": segments.split,
        "dropped_pieces": segments.dropped_pieces,
        "dropped_piece_tokens": segments.dropped_piece_tokens,
    }


def _nothing_left(spec: PrepareSpec, split: str, documents: int, dropped: Mapping[str, int]) -> DataError:
    reasons = "; ".join(f"{count:,} {why}" for why, count in dropped.items())
    return DataError(
        f"data.{split}: nothing is left of {documents:,} documents: {reasons}",
        hint=f"raise data.max_length ({spec.max_length:,}) or set data.too_long: truncate",
    )


def _samples(path: Path, spec: PrepareSpec) -> list[dict[str, Any]]:
    """Up to 16 different held-out prompts that leave room in a row, with what the data answers."""
    samples: dict[tuple[int, ...], dict[str, Any]] = {}
    for batch in record_batches(path):
        ids, prompts = batch.column("input_ids"), view(batch.column("prompt_tokens")).tolist()
        for i, count in enumerate(prompts):
            document = view(ids[i].values).tolist() if 0 < count < spec.max_length else []
            prompt = tuple(document[:count])
            if prompt and prompt not in samples:
                samples[prompt] = {
                    "prompt_ids": list(prompt),
                    "prompt_text": spec.tokenizer.decode(prompt),
                    "reference": spec.tokenizer.decode(_answer(document[count:], spec), True).strip(),
                }
            if len(samples) == MAX_SAMPLES:
                return list(samples.values())
    return list(samples.values())


def _answer(ids: list[int], spec: PrepareSpec) -> list[int]:
    ends = set(spec.tokenizer.eos_ids)
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
