"""The first level of prepared data: encoded documents, independent of row length and packing.

Blocks of records are encoded by workers and arrive in order, as record batches. Where documents are drawn, repeated or
held out, all of them are written first and the chosen ones are then copied, batch by batch. For people who want to see
what is trained before they train, the first documents are explained, token by token.
"""

import json
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tuner.config.methods import ExampleKind
from tuner.config.numbers import Duration
from tuner.data.building.encoded import BadRecord, Counts, EncodedBundle, EncodeJob, Tally, bad_record, documents_schema
from tuner.data.building.pack import NO_TRAINED_TOKEN, pair_limit
from tuner.data.building.pool import WorkerDiedError, answers
from tuner.data.building.report import pace
from tuner.data.building.sampling import SampledSplit, SplitSelection, shared
from tuner.data.building.spec import PreparedKeys, PrepareSpec, expected_bytes, files_of
from tuner.data.building.stream_file import StreamFiles
from tuner.data.encoding.encode import FAST_FROM_BYTES, AnyEncoder, Encoder, FastEncoderMismatch
from tuner.data.encoding.fast import NOT_INSTALLED, is_installed
from tuner.data.encoding.place import Document
from tuner.data.encoding.tokenizer import Unproven
from tuner.data.prepared import arrow_bits, record_batches
from tuner.data.reading.block import BLOCK_BYTES, Block
from tuner.data.reading.blocks import blocks, examples_of, lines_in, records_of
from tuner.data.reading.examples import Labelled, Learned, Pair
from tuner.data.reading.problems import RecordProblem
from tuner.data.sources import SourceFile
from tuner.errors import DataError, MachineError, NoRowsError
from tuner.runtime.console import Console
from tuner.runtime.memory import give_back

REJECTS = "rejects.jsonl"
SAMPLE = 64
"""Records of a file that a proposal is tried on."""
BUNDLE_BYTES = BLOCK_BYTES
"""Smaller blocks are encoded together, and make one record batch."""
_Spread = Callable[[Iterator[tuple[Block, ...]]], Generator[EncodedBundle, None, None]]


class _Origin(NamedTuple):
    """Where a block comes from."""

    split: "SampledSplit"
    source: int
    block: int
    """Its number in its file, from 0."""
    file: SourceFile
    size: int


def build_documents(spec: PrepareSpec, keys: PreparedKeys, tmp: Path, console: Console | None) -> dict[str, Any]:
    """Write train.arrow, eval.arrow and rejects.jsonl into `tmp`; return the manifest's body.

    Raises DataError for the first bad record in the order of the input, and where nothing is left to train on;
    MachineError where a worker dies or nothing can be written.
    """
    try:
        return _build(spec, keys, tmp, console)
    except FastEncoderMismatch as mismatch:
        reason = str(mismatch)
    if console is not None:
        console.warn(f"the fast encoder is not used: {reason}; all rows are encoded again with the tokenizer itself")
    for path in tmp.iterdir():
        path.unlink()
    return _build(spec, keys, tmp, console, slow_reason=reason)


def _build(
    spec: PrepareSpec, keys: PreparedKeys, tmp: Path, console: Console | None, slow_reason: str | None = None
) -> dict[str, Any]:
    # What is known of each document is 25 bytes: in files without names, they go with the process.
    with TemporaryFile(dir=tmp) as train, TemporaryFile(dir=tmp) as evaluated:
        held_out = spec.data.eval if isinstance(spec.data.eval, Duration) else None
        splits = [SampledSplit("train", keys.train, train, held_out is not None)]
        if keys.eval is not None:
            splits.append(SampledSplit("eval", keys.eval, evaluated))
        expected = expected_bytes(source for split in splits for source in split.sources)
        workers = spec.workers(expected)
        job = EncodeJob(
            spec.tokenizer, spec.examples, spec.special_tokens_in_text, stop_at_bad_row=spec.data.on_bad_row == "error",
            fast=slow_reason is None, much=workers != 1, repetition=spec.repetition,
        )  # fmt: skip
        with pace(console, expected) as done:
            hashed = _read(splits, job, _engine(spec, job, workers), tmp, done)
        keys.refuse_changed()
        give_back()  # what encoding held: choosing documents needs its own
        taken = [split.taken(spec.seed) for split in splits]
        for split, documents in zip(splits, taken, strict=True):
            _refuse_nothing(split, int(documents.copies.sum()), spec.examples.unit)
        chosen = taken if held_out is None else taken[0].held_out(held_out, spec.seed)
        schema = documents_schema(spec.tokenizer.vocab_size, spec.examples)
        by_name = dict(zip(("train", "eval"), chosen, strict=False))
        for split in splits:
            if split.is_chosen_from:
                names = ("train", "eval") if split.holds_out else (split.name,)
                copies = {name: by_name[name].copies for name in names}
                hashed |= _write_chosen(split, tmp, copies, schema, spec.examples.documents)
        reason = slow_reason or _missing_encoder(spec, sum(split.size for split in splits))
        return {**_body(spec, splits, taken, by_name, keys, reason), "files": hashed}


def _engine(spec: PrepareSpec, job: EncodeJob, workers: int) -> _Spread:
    """What has workers do a job: processes of this machine, or tasks of a Ray cluster."""
    if spec.data.engine == "local":
        return lambda bundles: answers(job, bundles, workers)
    from tuner.data.building import ray_tasks

    return lambda bundles: ray_tasks.answers(job, bundles, workers)


def _missing_encoder(spec: PrepareSpec, size: int) -> str | None:
    """The line about the fast encoder's package, where it is missing and would have encoded."""
    if size < FAST_FROM_BYTES or is_installed():
        return None
    try:
        spec.tokenizer.byte_table  # noqa: B018 (whether there is one)
    except Unproven:
        return None
    return NOT_INSTALLED


def _read(
    splits: Sequence[SampledSplit], job: EncodeJob, spread: _Spread, tmp: Path, done: Callable[[int], None]
) -> dict[str, Any]:
    """Encode every block of every split; write documents and bad records in the order of the input.

    Returns the manifest's entries of the files of documents that stay.
    """
    ahead: deque[list[_Origin]] = deque()
    has_template, kind, lines = job.tokenizer.has_template, job.examples.kind, 0
    with (
        StreamFiles(documents_schema(job.tokenizer.vocab_size, job.examples)) as files,
        closing(spread(_bundles(splits, ahead))) as encoded,
        (tmp / REJECTS).open("w", encoding="utf-8") as rejects,
    ):
        try:
            for bundle in encoded:
                origins = ahead.popleft()
                for origin, block in zip(origins, bundle.blocks, strict=False):
                    lines = 0 if origin.block == 0 else lines
                    for bad in block.bad:
                        if job.stop_at_bad_row or origin.split.first_bad is None:
                            error = bad_record_error(origin.file, bad, lines, has_template, kind)
                            if job.stop_at_bad_row:
                                raise error
                            origin.split.first_bad = error
                        rejects.write(_reject(origin.file.name, bad, lines))
                    lines += block.lines
                    origin.split.counts[origin.source].add(block.counts)
                    origin.split.size += origin.size
                split = origins[0].split
                split.table.write(bundle.table.tobytes())
                split.tally.add(bundle.tally)
                files.append(split.path(tmp, origins[0].source), bundle.documents)
                done(sum(origin.size for origin in origins))
        except WorkerDiedError as death:
            raise _worker_died(ahead[0], lines, death) from death
        for split in splits:
            for path, _ in split.parts(tmp):
                files.append(path, None)
        entries = files.entries()
    kept = (path.name for split in splits if not split.is_chosen_from for path, _ in split.parts(tmp))
    return {name: entries[name] for name in kept}


def _bundles(splits: Sequence[SampledSplit], ahead: "deque[list[_Origin]]") -> Iterator[tuple[Block, ...]]:
    """Every block, in order, small ones together; where they come from is appended to `ahead`.

    How blocks come together follows from their sizes, and from the sources only where a share of each is used.
    """
    for split in splits:
        for group in _grouped(split):
            ahead.append([origin for origin, _ in group])
            yield tuple(block for _, block in group)


def _grouped(split: SampledSplit) -> Iterator[list[tuple[_Origin, Block]]]:
    group: list[tuple[_Origin, Block]] = []
    for number, file in ((number, file) for number, source in enumerate(split.sources) for file in source.files):
        for block in blocks(file):
            full = sum(origin.size for origin, _ in group) + block.size > BUNDLE_BYTES
            if group and (full or (split.by_source and group[0][0].source != number)):
                yield group
                group = []
            group.append((_Origin(split, number, block.index, file, block.size), block))
    if group:
        yield group


def _write_chosen(
    split: SampledSplit, tmp: Path, copies: Mapping[str, npt.NDArray[np.int32]], schema: pa.Schema, each: int
) -> dict[str, Any]:
    """Copy the chosen documents of a split to the files of the splits, and remove the files that they were in.

    `copies` say how often an example is used, with all its `each` documents. Returns the manifest's entries of the new
    files.
    """
    with StreamFiles(schema) as files:
        for name, often in copies.items():
            target = tmp / f"{name}.arrow"
            files.append(target, None)
            start = 0
            for path, documents in split.parts(tmp):
                taken = often[start : start + documents]
                start += documents
                # Whole passes one after the other: repeats of a document are not neighbours.
                for number in range(int(taken.max(initial=0))):
                    for batch in _filtered(path, np.repeat(taken > number, each)):
                        files.append(target, batch.serialize() if batch.num_rows else None)
        entries = files.entries()
    for path, _ in split.parts(tmp):
        path.unlink()
    return entries


def _filtered(path: Path, kept: npt.NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
    start = 0
    for batch in record_batches(path):
        mask = kept[start : start + batch.num_rows]
        start += batch.num_rows
        yield batch if mask.all() else batch.filter(arrow_bits(mask))


def _body(
    spec: PrepareSpec, splits: Sequence[SampledSplit], taken: Sequence[SplitSelection],
    chosen: Mapping[str, SplitSelection], keys: PreparedKeys, slow_reason: str | None,
) -> dict[str, Any]:
    """What the manifest says of the documents: nothing in it depends on the clock or on the workers."""
    each = spec.examples.documents
    every = Counts.sum(counts for split in splits for counts in split.counts)
    # What is held out was read with the rest: it counts the records that its documents come from.
    read = {name: Counts(records=documents.records_there()) for name, documents in chosen.items()}
    read.update({split.name: Counts.sum(split.counts) for split in splits})
    reports = {name: documents.report(read[name]) for name, documents in chosen.items()}
    tally = Tally.sum(split.tally for split in splits)
    left_out = dict(sorted(tally.left_out.items()))
    report = {
        "masks": {"proven": every.documents, "rows": every.records},
        "by_answer": {"chats": tally.chats, "documents": tally.answers, "left_out": left_out},
        "fast_path": {
            "documents": tally.fast,
            "share": round(tally.fast / max(each * (every.documents + sum(every.dropped.values())), 1), 6),
            "reason": slow_reason,
        },
        "escaped": tally.escaped,
        "notes": dict(sorted(tally.notes.items())),
        "overlap": 0 if keys.eval is None else shared(chosen["train"].present, chosen["eval"].present),
        "bytes": sum(split.size for split in splits),
        "train": reports["train"],
        "eval": reports.get("eval"),
        "sources": {
            split.name: _source_reports(split, documents.copies, spec.examples.kind)
            for split, documents in zip(splits, taken, strict=True)
        },
    }
    held = _by_source(splits[-1], chosen["eval"].copies) if "eval" in chosen else []
    trained = _by_source(splits[0], chosen["train"].copies)
    names = {split.name: [file.name for source in split.sources for file in source.files] for split in splits}
    return {
        "report": report,
        "fields": dict(keys.encoded_fields),
        "sources": {"eval": [], **names},
        "train_documents": [each * int(part.sum()) for part in trained],
        "eval_documents": [each * int(part.sum()) for part in held],
    }


def _by_source(split: SampledSplit, often: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
    """Of each source, how often each of its documents is used: they lie source by source."""
    return np.split(often, np.cumsum([counts.documents for counts in split.counts])[:-1])


def _source_reports(split: SampledSplit, often: npt.NDArray[np.int32], kind: ExampleKind) -> list[dict[str, Any]]:
    """Of each source, in order: what was read and how much of it is used."""
    return [
        {
            "path": source.path, "files": len(source.files), "rows": counts.records, "documents": counts.documents,
            "forms": dict(counts.forms.most_common()),
            **({"wanted": counts.wanted} if kind == "unpaired" else {}),
            "weight": source.weight, "count": source.count,
            "sampled": int((taken > 0).sum()), "repeated": int(taken.sum() - (taken > 0).sum()),
        }  # fmt: skip
        for source, counts, taken in zip(split.sources, split.counts, _by_source(split, often), strict=True)
    ]


def _refuse_nothing(split: SampledSplit, documents: int, unit: str) -> None:
    """DataError where a split has no document (or other `unit`) at all, with the reasons."""
    if documents:
        return
    files = [file for source in split.sources for file in source.files]
    shown = [f"{file.name}[{file.part}]" if file.part else file.name for file in files[:3]]
    names = ", ".join(shown) + (", ..." if len(files) > 3 else "")
    counts = Counts.sum(split.counts)
    if counts.records == 0:
        raise (NoRowsError if split.name == "train" else DataError)(f"{names}: no rows")
    if counts.documents:
        raise DataError(
            f"{names}: no {unit} of {counts.documents:,} is used", hint=f"raise the weight of data.{split.name}"
        )
    reasons = counts.skipped + counts.dropped
    listed = "; ".join(f"{count:,} {reason}" for reason, count in reasons.most_common(3))
    if split.first_bad is not None:
        listed += f"; the first: {split.first_bad.message}"
    rows = f"{counts.records:,} row{'' if counts.records == 1 else 's'}"
    hint = None if split.first_bad is None else _without_skipping(split.first_bad.hint)
    if NO_TRAINED_TOKEN in counts.dropped:
        hint = "a row needs an answer that method.train_on trains"
    raise DataError(f"{names}: nothing to train on in {rows}: {listed}", hint=hint)


def _without_skipping(hint: str | None) -> str | None:
    """What to do about bad rows where leaving them out is what left nothing."""
    if hint is None:
        return None
    return hint.removesuffix(_FIX_OR_SKIP).removesuffix(_FIX).removesuffix("; or ") or "fix the rows"


_FIX = "fix the rows, of which none can be read so far"
_FIX_OR_SKIP = "fix the row, or write data.on_bad_row: skip to leave such rows out"


def bad_record_error(file: SourceFile, bad: BadRecord, lines: int, has_template: bool, kind: ExampleKind) -> DataError:
    """The error for a bad record, with its position; `lines` are those of its file before its block.

    `has_template` says whether the model's tokenizer has a chat template, `kind` what the method's examples are.
    """
    where = f"{bad.where}: " if bad.where else ""
    ways = [f"write {bad.hint}"] if bad.hint is not None else []
    last = _FIX_OR_SKIP
    if bad.value is not None:
        from tuner.data.reading.proposals import ProposedReading, ways_out

        given, first = ProposedReading(kind, file.format, dict(file.columns)), first_records(file)
        ways += ways_out(bad.value, first, given, has_template, Path(file.name).name)
        last = _FIX_OR_SKIP if any(given.try_on(record) is not None for record in first) else _FIX
    hint = "; or ".join([*ways, last])
    return DataError(f"{file.name}:{lines + bad.line}:{bad.col}: {where}{bad.reason}", hint=hint)


def first_records(file: SourceFile) -> list[Mapping[str, Any]]:
    """The first records of a file that can be read, as they are. DataError."""
    values = (record.value for block in blocks(file) for record in records_of(block))
    return [value for value in islice(values, SAMPLE) if value is not None]


def _reject(name: str, bad: BadRecord, lines: int) -> str:
    """A line of `rejects.jsonl`."""
    line = {"file": name, "line": lines + bad.line, "col": bad.col, "reason": bad.reason, "row": bad.record}
    return json.dumps(line, ensure_ascii=False) + "\n"


def _worker_died(origins: Sequence[_Origin], lines: int, death: WorkerDiedError) -> MachineError:
    first = 1 if origins[0].block == 0 else lines + 1
    more = f" and {len(origins) - 1:,} files after it" if len(origins) > 1 else ""
    return MachineError(
        f"{origins[0].file.name}: a worker {death} while it encoded the rows from line {first:,} on{more}",
        hint="where the machine ran out of memory, set data.workers to fewer",
    )


Fate = Literal["whole", "truncate", "split", "drop"]


@dataclass(frozen=True)
class TokenView:
    """One token of an explained record."""

    text: str
    id: int
    trained: bool
    rule: str
    """Which part of the record it belongs to, such as `assistant turn` or `prompt`."""
    kept: bool = True
    """Whether a row holds it: not where the document is dropped for its length, nor beyond where it is cut."""


@dataclass(frozen=True)
class DocumentView:
    """One document of a record and all its tokens, with what its length costs it."""

    name: str
    """The file's, as it was given."""
    line: int
    tokens: list[TokenView]
    document: int = 0
    """Its number in the record, from 0."""
    documents: int = 1
    """How many the record has: several where each answer of a chat is one."""
    left_out: tuple[str, ...] = ()
    """The reasons of the record's answers that have no document."""
    fate: Fate = "whole"
    """What becomes of it as `data.too_long` says."""
    max_length: int = 0
    """Tokens of a row."""
    answer: str = ""
    """Which answer it is, where answers are compared: chosen, rejected, wanted or not wanted."""
    drawn: str = ""
    """Why it may not be trained on though it is read: its source's share, or what is held out."""

    @property
    def before(self) -> int:
        """Tokens before the first that rows hold: of the prompt of a pair the last ones may be kept."""
        return next((number for number, token in enumerate(self.tokens) if token.kept), 0)

    @property
    def kept(self) -> list[TokenView]:
        """The tokens that rows hold."""
        return [token for token in self.tokens if token.kept]


def explain(spec: PrepareSpec, n: int) -> Iterator[DocumentView]:
    """Yield the documents of the first `n` training records that can be used.

    With `on_bad_row: error` a bad record is a DataError.
    """
    return (view for views in islice(_views(spec), n) for view in views)


def _views(spec: PrepareSpec) -> Iterator[list[DocumentView]]:
    alone = Encoder(spec.tokenizer, spec.examples.train_on, spec.special_tokens_in_text)
    encoder = AnyEncoder(alone, spec.examples.kind)
    for file in files_of(spec, spec.data.train):
        before, drawn = 0, _drawn(spec, file)
        for block in blocks(file):
            for record, example in examples_of(block, spec.examples.kind):
                try:
                    if isinstance(example, RecordProblem):
                        raise example
                    placed = encoder.explain(example)
                except RecordProblem as problem:
                    if spec.data.on_bad_row == "skip":
                        continue
                    bad = bad_record(record, problem, record.value if isinstance(example, RecordProblem) else None)
                    has_template = spec.tokenizer.has_template
                    raise bad_record_error(file, bad, before, has_template, spec.examples.kind) from problem
                fates = _fates(spec, placed.documents)
                yield [
                    DocumentView(
                        file.name, before + record.line, _tokens(spec, document, fate, kept), i, len(placed.documents),
                        placed.left_out, fate, spec.max_length, _answer(example, i), drawn,
                    )
                    for i, (document, (fate, kept)) in enumerate(zip(placed.documents, fates, strict=True))
                ]
            before += lines_in(block)


def _drawn(spec: PrepareSpec, file: SourceFile) -> str:
    """Why a document of a file may not be among those that are trained: which are is known of all of them alone."""
    share = f"weight: {file.weight:g}" if file.weight < 1 else f"count: {file.count}" if file.count is not None else ""
    held = f"data.eval: {spec.data.eval}" if isinstance(spec.data.eval, Duration) else ""
    ways = [f"{share} may not draw it"] if share else []
    return " and ".join([*ways, f"{held} may hold it out"] if held else ways)


def _answer(example: Learned, number: int) -> str:
    if isinstance(example, Pair):
        return ("chosen", "rejected")[number]
    return ("wanted" if example.label else "not wanted") if isinstance(example, Labelled) else ""


def _fates(spec: PrepareSpec, documents: list[Document]) -> list[tuple[Fate, range]]:
    """What becomes of each document of a record, and which of its tokens rows hold."""
    limit, starts = spec.max_length, [0] * len(documents)
    if spec.examples.documents == 2 and spec.data.max_prompt_length is not None:
        prompts = [int(np.argmax(document.trained)) for document in documents]
        starts = [max(0, prompt - spec.data.max_prompt_length) for prompt in prompts]
    lengths = [len(document.input_ids) - start for document, start in zip(documents, starts, strict=True)]
    if spec.examples.documents == 2:  # both stand in one row
        if sum(lengths) > spec.max_length and spec.too_long == "drop":
            return [("drop", range(0))] * 2
        limit = int(pair_limit(spec.max_length, np.array(min(lengths))))
    fates: list[Fate] = ["whole" if length <= limit else spec.too_long for length in lengths]
    by_fate = {"drop": 0, "truncate": limit}
    shortest = spec.data.min_piece_length or 0
    whole = [length - (length % limit if 0 < length % limit < shortest < length else 0) for length in lengths]
    kept = [by_fate.get(fate, length) for fate, length in zip(fates, whole, strict=True)]
    return [(fate, range(start, start + n)) for fate, start, n in zip(fates, starts, kept, strict=True)]


def _tokens(spec: PrepareSpec, document: Document, fate: Fate, kept: range) -> list[TokenView]:
    rules = [""] * len(document.input_ids)
    for span in document.spans:
        rules[span.start : span.stop] = [span.rule] * (span.stop - span.start)
    # The first token of a document, or of a piece of a split one, is predicted from nothing: it is never a target.
    piece = spec.max_length if fate == "split" else len(rules)
    return [
        TokenView(spec.tokenizer.decode([int(token)]), int(token), bool(trained) and i % piece > 0, rule, i in kept)
        for i, (token, trained, rule) in enumerate(zip(document.input_ids, document.trained, rules, strict=True))
    ]
