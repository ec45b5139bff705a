"""The first level of prepared data: encoded documents, independent of row length and packing.

Blocks of rows are encoded by workers and arrive in order, as record batches. Where documents are drawn, repeated or
held out, all of them are written first and the chosen ones are then copied, batch by batch.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tuner.config.duration import Duration
from tuner.data.building.counts import ByAnswer, Counts
from tuner.data.building.encoded import (
    BadRow,
    Bundle,
    EncodedBundle,
    EncodeJob,
    documents_schema,
    record_batches,
)
from tuner.data.building.keys import Keys, Source
from tuner.data.building.pool import WorkerDiedError, WorkerPool, answers
from tuner.data.building.progress import pace
from tuner.data.building.selection import shared
from tuner.data.building.sides import Chosen, Side
from tuner.data.building.stream_file import StreamFiles
from tuner.data.encoding.byte_table import Unproven
from tuner.data.encoding.encode import FAST_FROM_BYTES, FastEncoderMismatch
from tuner.data.encoding.fast import NOT_INSTALLED, is_installed
from tuner.data.prepared import arrow_bits
from tuner.data.reading.block import BLOCK_BYTES, Block
from tuner.data.reading.blocks import blocks
from tuner.errors import DataError, MachineError
from tuner.runtime.memory import give_back
from tuner.runtime.process import cores

if TYPE_CHECKING:
    from tuner.data.building.spec import PrepareSpec
    from tuner.runtime.console import Console

REJECTS = "rejects.jsonl"
BUNDLE_BYTES = BLOCK_BYTES
"""Smaller blocks are encoded together, and make one record batch."""
FEW_BUNDLES = 3
"""Fewer bundles than these are encoded in this process: starting workers would take longer."""
INFLATES = 4
"""How many times its size a compressed file has, as far as progress is concerned."""


@dataclass(frozen=True)
class _Origin:
    """Where a block comes from."""

    side: "Side"
    source: int
    block: int
    """Its number in its file, from 0."""
    name: str
    size: int


EncodingPool = WorkerPool[Bundle, EncodedBundle]


def start_pool(spec: "PrepareSpec", sources: Iterable[Source]) -> EncodingPool | None:
    """Start the workers that `build_documents` would, where their number is more than one and there is much to do."""
    size = _expected_bytes(sources)
    count = _workers(spec.workers)
    return WorkerPool(_job(spec, much=True), count) if count > 1 and size >= FEW_BUNDLES * BUNDLE_BYTES else None


def build_documents(
    spec: "PrepareSpec", keys: Keys, tmp: Path, console: "Console | None", pool: EncodingPool | None = None
) -> dict[str, Any]:
    """Write train.arrow, eval.arrow and rejects.jsonl into `tmp`; return the manifest's body.

    `pool` is that of `start_pool`. Raises DataError for the first bad row in the order of the input, and where nothing
    is left to train on; MachineError where a worker dies or nothing can be written.
    """
    try:
        return _build(spec, keys, tmp, console, pool)
    except FastEncoderMismatch as mismatch:
        reason = str(mismatch)
    if console is not None:
        console.warn(f"the fast encoder is not used: {reason}; all rows are encoded again with the tokenizer itself")
    for path in tmp.iterdir():
        path.unlink()
    return _build(spec, keys, tmp, console, slow_reason=reason)


def _workers(wanted: int | None) -> int:
    return cores() if wanted is None else wanted


def _job(spec: "PrepareSpec", much: bool, fast: bool = True) -> EncodeJob:
    return EncodeJob(
        tokenizer=spec.tokenizer,
        train_on=spec.examples.train_on,
        special_tokens=spec.special_tokens_in_text,
        stop_at_bad_row=spec.data.on_bad_row == "error",
        fast=fast,
        much=much,
    )


def _build(
    spec: "PrepareSpec",
    keys: Keys,
    tmp: Path,
    console: "Console | None",
    pool: EncodingPool | None = None,
    slow_reason: str | None = None,
) -> dict[str, Any]:
    split = spec.data.eval if isinstance(spec.data.eval, Duration) else None
    sides = [Side("train", keys.train, split is not None)]
    if keys.eval is not None:
        sides.append(Side("eval", keys.eval))
    expected = _expected_bytes(source for side in sides for source in side.sources)
    job = _job(spec, much=False, fast=slow_reason is None)
    with pace(console, expected) as done:
        hashed = _read(sides, job, spec.workers, tmp, done, pool)
    keys.refuse_changed()
    give_back()  # what encoding held: choosing documents needs its own
    taken = [side.taken(spec.seed) for side in sides]
    for side, documents in zip(sides, taken, strict=True):
        _refuse_nothing(side, int(documents.copies.sum()))
    chosen = taken if split is None else taken[0].held_out(split, spec.seed)
    schema = documents_schema(spec.tokenizer.vocab_size)
    by_name = dict(zip(("train", "eval"), chosen, strict=False))
    for side in sides:
        if side.is_chosen_from:
            names = ("train", "eval") if side.is_split else (side.name,)
            hashed |= _write_chosen(side, tmp, {name: by_name[name].copies for name in names}, schema)
    reason = slow_reason or _missing_encoder(spec, sum(side.size for side in sides))
    return {**_body(sides, taken, by_name, keys, reason), "files": hashed}


def _missing_encoder(spec: "PrepareSpec", size: int) -> str | None:
    """The line about the fast encoder's package, where it is missing and would have encoded."""
    if size < FAST_FROM_BYTES or is_installed():
        return None
    try:
        spec.tokenizer.byte_table  # noqa: B018 (whether there is one)
    except Unproven:
        return None
    return NOT_INSTALLED


def _read(
    sides: Sequence[Side],
    job: EncodeJob,
    workers: int | None,
    tmp: Path,
    done: Callable[[int], None],
    pool: EncodingPool | None,
) -> dict[str, Any]:
    """Encode every block of every side; write documents and bad rows in the order of the input.

    Returns the manifest's entries of the files of documents that stay.
    """
    ahead: deque[list[_Origin]] = deque()
    bundles = _bundles(sides, ahead)
    first = deque(islice(bundles, FEW_BUNDLES))
    count = 1 if len(first) < FEW_BUNDLES else _workers(workers)
    lines = 0
    with (
        StreamFiles(documents_schema(job.tokenizer.vocab_size)) as files,
        closing(answers(job, _one_by_one(first, bundles), count, pool)) as encoded,
        (tmp / REJECTS).open("w", encoding="utf-8") as rejects,
    ):
        while True:
            try:
                bundle = next(encoded)
            except StopIteration:
                break
            except WorkerDiedError as death:
                raise _worker_died(ahead[0], lines, death) from death
            places = ahead.popleft()
            for place, block in zip(places, bundle.blocks, strict=False):
                lines = 0 if place.block == 0 else lines
                for bad in block.bad:
                    if job.stop_at_bad_row:
                        raise bad_row_error(place.name, bad, lines)
                    rejects.write(_reject(place.name, bad, lines))
                lines += block.lines
                place.side.counts[place.source].add(block.counts)
                place.side.size += place.size
            side = places[0].side
            side.add(bundle)
            files.append(side.path(tmp, places[0].source), bundle.documents)
            done(sum(place.size for place in places))
        for side in sides:
            for path, _ in side.parts(tmp):
                files.append(path, None)
        entries = files.entries()
    return {path.name: entries[path.name] for side in sides if not side.is_chosen_from for path, _ in side.parts(tmp)}


def _one_by_one(first: deque[Bundle], others: Iterator[Bundle]) -> Iterator[Bundle]:
    """`first` and then `others`, none of them kept."""
    while first:
        yield first.popleft()
    yield from others


def _bundles(sides: Sequence[Side], ahead: "deque[list[_Origin]]") -> Iterator[Bundle]:
    """Every block, in order, small ones together; where they come from is appended to `ahead`.

    How blocks come together follows from their sizes, and from the sources only where a share is taken of each.
    """
    for side in sides:
        pending: list[tuple[_Origin, Block]] = []
        for place, block in _blocks(side):
            full = sum(other.size for other, _ in pending) + place.size > BUNDLE_BYTES
            if pending and (full or (side.by_source and pending[0][0].source != place.source)):
                ahead.append([other for other, _ in pending])
                yield tuple(other for _, other in pending)
                pending = []
            pending.append((place, block))
        if pending:
            ahead.append([other for other, _ in pending])
            yield tuple(other for _, other in pending)


def _blocks(side: Side) -> Iterator[tuple[_Origin, Block]]:
    for number, source in enumerate(side.sources):
        for file in source.files:
            for block in blocks(file):
                yield _Origin(side, number, block.index, file.name, block.size), block


def _expected_bytes(sources: Iterable[Source]) -> int:
    """Bytes of all rows, inflated, as far as sizes on disk tell."""
    files = [file for source in sources for file in source.files]
    return sum(file.size() * (INFLATES if file.compression or file.kind == "parquet" else 1) for file in files)


def _write_chosen(
    side: Side, tmp: Path, splits: Mapping[str, npt.NDArray[np.int32]], schema: pa.Schema
) -> dict[str, Any]:
    """Copy the chosen documents of a side to the files of the splits, and remove the files that they were in.

    Returns the manifest's entries of the new files.
    """
    with StreamFiles(schema) as files:
        for name, often in splits.items():
            target = tmp / f"{name}.arrow"
            files.append(target, None)
            start = 0
            for path, documents in side.parts(tmp):
                own = often[start : start + documents]
                start += documents
                # Whole passes one after the other: repeats of a document are not neighbours.
                for number in range(int(own.max(initial=0))):
                    for batch in _filtered(path, own > number):
                        files.append(target, batch.serialize() if batch.num_rows else None)
        entries = files.entries()
    for path, _ in side.parts(tmp):
        path.unlink()
    return entries


def _filtered(path: Path, kept: npt.NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
    start = 0
    for batch in record_batches(path):
        mask = kept[start : start + batch.num_rows]
        start += batch.num_rows
        yield batch if mask.all() else batch.filter(arrow_bits(mask))


def _body(
    sides: Sequence[Side],
    taken: Sequence[Chosen],
    chosen: Mapping[str, Chosen],
    keys: Keys,
    slow_reason: str | None,
) -> dict[str, Any]:
    """What the manifest says of the documents: nothing in it depends on the clock or on the workers."""
    every = Counts.sum(counts for side in sides for counts in side.counts)
    # What is held out was read with the rest: it counts the rows that its documents come from.
    read = {name: Counts(rows=documents.rows_there()) for name, documents in chosen.items()}
    read.update({side.name: Counts.sum(side.counts) for side in sides})
    splits = {name: documents.report(read[name]) for name, documents in chosen.items()}
    fast = sum(side.fast for side in sides)
    notes = sum((side.notes for side in sides), Counter[str]())
    report = {
        "masks": {"proven": every.documents, "rows": every.rows},
        "by_answer": ByAnswer.sum(side.by_answer for side in sides).report(),
        "fast_path": {
            "documents": fast,
            "share": round(fast / max(every.documents + sum(every.dropped.values()), 1), 6),
            "reason": slow_reason,
        },
        "escaped": sum(side.escaped for side in sides),
        "notes": dict(sorted(notes.items())),
        "overlap": 0 if keys.eval is None else shared(chosen["train"].present, chosen["eval"].present),
        "bytes": sum(side.size for side in sides),
        "train": splits["train"],
        "eval": splits.get("eval"),
        "sources": {
            side.name: _source_reports(side, documents.copies) for side, documents in zip(sides, taken, strict=True)
        },
    }
    names = {side.name: [file.name for source in side.sources for file in source.files] for side in sides}
    return {
        "report": report,
        "fields": dict(keys.encoded_fields),
        "sources": {"eval": [], **names},
        "eval_documents": _by_source(sides[-1], chosen["eval"].copies) if "eval" in chosen else [],
    }


def _by_source(side: Side, often: npt.NDArray[np.int32]) -> list[int]:
    """Documents of each source in a split's file, which holds them source by source."""
    bounds = np.cumsum([0, *(counts.documents for counts in side.counts)])
    return [int(often[start:stop].sum()) for start, stop in pairwise(bounds.tolist())]


def _source_reports(side: Side, often: npt.NDArray[np.int32]) -> list[dict[str, Any]]:
    """Of each source, in order: what was read and how much of it is taken."""
    reports, start = [], 0
    for source, counts in zip(side.sources, side.counts, strict=True):
        own = often[start : start + counts.documents]
        start += counts.documents
        reports.append(
            {
                "path": source.path,
                "files": len(source.files),
                "rows": counts.rows,
                "documents": counts.documents,
                "weight": source.share.weight,
                "count": source.share.count,
                "sampled": int((own > 0).sum()),
                "repeated": int(own.sum() - (own > 0).sum()),
            }
        )
    return reports


def _refuse_nothing(side: Side, documents: int) -> None:
    """DataError where a side has no document at all, with the reasons."""
    if documents:
        return
    files = [file for source in side.sources for file in source.files]
    names = ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "")
    counts = Counts.sum(side.counts)
    if counts.rows == 0:
        raise DataError(f"{names}: no rows")
    if counts.documents:
        raise DataError(
            f"{names}: no document is taken of {counts.documents:,}", hint=f"raise the weight of data.{side.name}"
        )
    reasons = counts.skipped + counts.dropped
    listed = "; ".join(f"{count:,} {reason}" for reason, count in reasons.most_common(3))
    raise DataError(f"{names}: nothing to train on in {counts.rows:,} rows: {listed}")


def bad_row_error(name: str, bad: BadRow, lines: int) -> DataError:
    """The error for a bad row, with its place; `lines` are those of its file before its block."""
    where = f"{bad.where}: " if bad.where else ""
    hint = "mend the row, or set data.on_bad_row: skip"
    if bad.hint is not None:
        hint = f"set {bad.hint}; or {hint}"
    return DataError(f"{name}:{lines + bad.line}:{bad.col}: {where}{bad.reason}", hint=hint)


def _reject(name: str, bad: BadRow, lines: int) -> str:
    """A line of `rejects.jsonl`."""
    line = {"file": name, "line": lines + bad.line, "col": bad.col, "reason": bad.reason, "row": bad.row}
    return json.dumps(line, ensure_ascii=False) + "\n"


def _worker_died(places: Sequence[_Origin], lines: int, death: WorkerDiedError) -> MachineError:
    first = 1 if places[0].block == 0 else lines + 1
    more = f" and {len(places) - 1:,} files after it" if len(places) > 1 else ""
    return MachineError(
        f"{places[0].name}: a worker {death} while it encoded the rows from line {first:,} on{more}",
        hint="where the machine ran out of memory, set data.workers to fewer",
    )
