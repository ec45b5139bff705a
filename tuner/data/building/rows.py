"""The second level of prepared data: rows packed from encoded documents, with samples and probes of ids.

Imported where the cache lacks the rows of a spec. The files of a split's rows are written block by block: in the memory
of one block, however many there are.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Protocol

import jsonlines
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tuner.config.methods import ExampleKind
from tuner.data.building.cache import build_once
from tuner.data.building.documents import REJECTS, build_documents
from tuner.data.building.encoded import digest
from tuner.data.building.pack import LOSSES, CutSoFar, Segments, cut, in_blocks, in_order, row_batches
from tuner.data.building.report import WHOLE, kept_by, lengths_that_keep, raised
from tuner.data.building.spec import PreparedKeys, PrepareSpec
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.id_probes import ID_PROBES, IdProbe, id_probe, write_probes
from tuner.data.prepared import COUNTS, PARTNERS_SCHEMA, ROWS_SCHEMA, arrow, record_batches, row_counts, view
from tuner.data.ranges import offsets_of, ranges
from tuner.data.reading.blocks import blocks, examples_of
from tuner.data.reading.examples import Conversation, Example, PlainText, PromptCompletion, Tokens, answers_of
from tuner.data.reading.problems import RecordProblem
from tuner.errors import DataError, MachineError
from tuner.runtime.console import Console
from tuner.runtime.files import machine_errors, sha256_file
from tuner.runtime.memory import give_back

MAX_SAMPLES = 16
MAX_PROBES, MAX_PROBE_CHARS = 16, 4000
"""Records with the ids that training sees of them; a longer text is left out."""


def build_rows(spec: PrepareSpec, keys: PreparedKeys, tmp: Path, console: Console | None) -> dict[str, Any]:
    """The second level: documents linked from the first, which is built where it is missing, and the packed rows."""

    def link(encoded: Path) -> None:
        for source in (*encoded.glob("*.arrow"), encoded / REJECTS):
            _link(source, tmp / _linked_name(source.name))

    encoded, _ = build_once(
        spec.cache_dir, "encoded", keys.encoded, lambda new: build_documents(spec, keys, new, console), console, link
    )
    give_back()  # what the tables of documents held: packing needs its own
    report = dict(encoded["report"])
    for split in ("train", "eval"):
        if report[split] is not None:
            is_apart = spec.data.pack_sources == "apart"
            rows = _write_rows(spec, tmp, split, encoded[f"{split}_documents"] if is_apart else ())
            if rows["packed_rows"] == 0:
                path = tmp / f"{split}.documents.arrow"
                raise _nothing_left(spec, keys, path, report[split]["documents"], rows["dropped_rows"])
            report[split] = {**report[split], **rows}
    found = _samples(tmp / "eval.documents.arrow", spec) if report["eval"] is not None else ()
    samples = list(islice(found, MAX_SAMPLES))
    with jsonlines.open(tmp / "samples.jsonl", "w") as writer:
        writer.write_all(samples)
    write_probes(tmp / ID_PROBES, _record_probes(keys, spec.tokenizer, spec.examples.kind))
    report["tokenizer"] = spec.tokenizer.loaded_as
    return {
        "report": report, "samples": len(samples), "encoded_key": keys.encoded,
        "max_length": spec.max_length, "too_long": spec.too_long, "packing": spec.data.packs_rows,
        "tokenizer_hash": spec.tokenizer.hash, "template_hash": spec.tokenizer.template_hash,
        "vocab_size": spec.tokenizer.vocab_size,
        **{key: keys.encoded_fields[key] for key in ("method", "train_on")},
        **{key: encoded[key] for key in ("sources", "eval_documents")},
        # What the first level has hashed is the same file here.
        "files": {_linked_name(name): entry for name, entry in encoded["files"].items()},
    }  # fmt: skip


def _linked_name(name: str) -> str:
    """The name in the second level of a file of the first."""
    return name if name == REJECTS else f"{Path(name).stem}.documents.arrow"


def _write_rows(spec: PrepareSpec, tmp: Path, split: str, sources: Sequence[int]) -> dict[str, Any]:
    documents, max_length = tmp / f"{split}.documents.arrow", spec.max_length
    limits: dict[str, Any] = {"max_prompt": spec.data.max_prompt_length, "min_piece": spec.data.min_piece_length or 0}
    packed = partial(cut, max_length=max_length, too_long=spec.too_long, each=spec.examples.documents, **limits)
    cuts: CutsBlock = partial(in_order, max_length=max_length) if spec.data.rows == "cut" else packed
    segments = segments_of(record_batches(documents), max_length, cuts)
    report = write_rows(tmp / f"{split}.rows.arrow", segments, max_length, spec.data.packs_rows, sources)
    if spec.examples.kind == "unpaired" and report["packed_rows"]:
        write_partners(documents, tmp / f"{split}.partners.arrow")
    return report


def _nothing_left(
    spec: PrepareSpec, keys: PreparedKeys, path: Path, documents: int, dropped: Mapping[str, int]
) -> DataError:
    split = path.name.partition(".")[0]
    reasons = "; ".join(f"{count:,} {why}" for why, count in dropped.items())
    lengths = lengths_that_keep(path, WHOLE, spec.examples.documents)
    plain = spec.examples.kind == "sft" and _is_plain_text(keys)
    cut_up = "method.kind: pretrain, which splits plain text into rows, or " if plain else ""
    of = f"{documents:,} {spec.examples.unit}{'' if documents == 1 else 's'}"
    return DataError(
        f"data.{split}: nothing is left of {of}: {reasons} ({spec.max_length:,}); {kept_by(lengths)}",
        hint=f"write {cut_up}{raised(spec, lengths)}data.too_long: truncate",
    )


def _is_plain_text(keys: PreparedKeys) -> bool:
    """Whether the first record of the training data is plain text."""
    files = (file for source in keys.train for file in source.files)
    examples = (example for file in files for block in blocks(file) for _, example in examples_of(block))
    return isinstance(next(examples, None), PlainText)


def _samples(path: Path, spec: PrepareSpec) -> Iterator[dict[str, Any]]:
    """Yield different held-out prompts that leave room in a row, with what the data answers."""
    ends, seen = set(spec.tokenizer.eos_ids), set[tuple[int, ...]]()
    for batch in record_batches(path):
        ids, prompts = batch.column("input_ids"), view(batch.column("prompt_tokens")).tolist()
        for i, count in enumerate(prompts):
            # Of a pair the chosen answer comes first; of labelled ones those that are wanted count.
            if "label" in batch.schema.names and not batch.column("label")[i].as_py():
                continue
            document = view(ids[i].values).tolist() if 0 < count < spec.max_length else []
            prompt = tuple(document[:count])
            if prompt and prompt not in seen:
                seen.add(prompt)
                answer = list(takewhile(lambda token: token not in ends, document[count:]))
                texts = spec.tokenizer.decode(prompt), spec.tokenizer.decode(answer, True).strip()
                yield {"prompt_ids": list(prompt), "prompt_text": texts[0], "reference": texts[1]}


def _record_probes(keys: PreparedKeys, tokenizer: TextTokenizer, kind: ExampleKind) -> Iterator[IdProbe]:
    """Yield up to `MAX_PROBES` probes: of the first records of every file that can be used."""
    files = [file for source in keys.train for file in source.files if file.array is None][:MAX_PROBES]
    for file in files:
        examples = (example for block in blocks(file) for _, example in examples_of(block, kind))
        usable = (example for example in examples if not isinstance(example, RecordProblem))
        found = (probe for example in usable for probe in _probes(answers_of(example)[0], tokenizer))
        yield from islice(found, MAX_PROBES // len(files))


def _probes(example: Example, tokenizer: TextTokenizer) -> Iterator[IdProbe]:
    if isinstance(example, Conversation):
        messages = [dict(message) for message in example.messages]
        try:
            text = tokenizer.render(messages, tools=example.tools)
        except DataError:
            return
        probe = id_probe(text, tokenizer, messages, example.tools)
    elif isinstance(example, Tokens):
        return
    else:
        probe = id_probe(example.prompt if isinstance(example, PromptCompletion) else example.text, tokenizer)
    if len(probe.text) <= MAX_PROBE_CHARS:
        yield probe


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        with machine_errors(target):
            shutil.copyfile(source, target)
        if sha256_file(source) != sha256_file(target):
            raise MachineError(f"{target}: the copy differs from {source}") from None


def write_partners(documents: Path, path: Path) -> None:
    """Write the partner of each of a file's labelled answers. DataError where all their prompts are equal.

    KTO estimates how far the policy is from the reference by answers that were given to other prompts (Ethayarajh et
    al. 2024, https://arxiv.org/abs/2402.01306). Which one a prompt gets follows from the data alone.
    """
    found = partners(np.concatenate([np.empty((0, 2), dtype=np.uint64), *_prompts(documents)]))
    if found is None:
        split = documents.name.partition(".")[0]
        raise DataError(
            f"data.{split}: all rows have the same prompt, and none can lend its answer to another one",
            hint="add rows with other prompts, or remove the split",
        )
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, PARTNERS_SCHEMA) as writer:
        writer.write_batch(pa.record_batch([arrow(found)], schema=PARTNERS_SCHEMA))


def partners(prompts: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32] | None:
    """Return uint32[documents]: of each the next document, after the last one the first, that has another prompt.

    `prompts` are uint64[documents, 2], equal where the prompts are. None where all are.
    """
    count = len(prompts)
    changes = np.flatnonzero((prompts[1:] != prompts[:-1]).any(axis=1)) + 1
    if len(changes) == 0:
        return None
    following = np.append(changes, 0 if (prompts[0] != prompts[-1]).any() else changes[0])
    run = np.searchsorted(changes, np.arange(count), side="right")
    return following[run].astype(np.uint32)


def _prompts(documents: Path) -> Iterator[npt.NDArray[np.uint64]]:
    """uint64[documents of a record batch, 2]: what stands for each prompt's token ids."""
    for batch in record_batches(documents):
        lists = batch.column("input_ids")
        offsets, counts = view(lists.offsets).astype(np.int64), view(batch.column("prompt_tokens")).astype(np.int64)
        yield digest(view(lists.values)[ranges(offsets[:-1], counts)], offsets_of(counts))


class CutsBlock(Protocol):
    """What cuts a block of documents: `cut` or `in_order` of :mod:`tuner.data.building.pack`, for rows of one kind."""

    def __call__(self, batches: Iterator[pa.RecordBatch], *, carried: CutSoFar) -> Segments:
        """Cut one block, which comes after what was carried."""


def segments_of(batches: Iterator[pa.RecordBatch], max_length: int, cuts: CutsBlock) -> Iterator[Segments]:
    """Yield the segments of documents, a block at a time; the one before is held until the next is cut."""
    carried = CutSoFar()
    for block in in_blocks(batches, max_length):
        found = cuts(block, carried=carried)
        carried = found.carried
        yield found


def write_rows(
    path: Path, blocks: Iterator[Segments], max_length: int, packing: bool = True, sources: Sequence[int] = ()
) -> dict[str, Any]:
    """Write `<split>.rows.arrow`, and of several blocks the counts of all rows next to it; return the report of both.

    `sources` are as in :func:`~tuner.data.building.pack.row_batches`. OSError where it cannot be written.
    """
    sums, dropped = Counter[str](), Counter[str]()
    n_blocks = documents = each = 0
    last = -1
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, ROWS_SCHEMA) as writer:
        for segments in blocks:
            rows = 0
            for batch in row_batches(segments, max_length, packing, sources=sources):
                writer.write_batch(batch)
                rows += batch.num_rows
            numbers, each = segments.document, segments.each
            if len(numbers):
                documents += int(np.count_nonzero(np.diff(numbers))) + (int(numbers[0]) != last)
                last = int(numbers[-1])
            tokens, trained = (int(column.sum(dtype=np.int64)) for column in (segments.tokens, segments.trained))
            sums.update(rows=rows, tokens=tokens, trained=trained)
            sums.update(segments.losses)
            dropped.update(segments.dropped)
            n_blocks += 1
    if n_blocks > 1:
        _write_counts(path)
    return {
        "packed_rows": sums["rows"],
        "packed_documents": documents // each if sums["rows"] else 0,
        "packed_tokens": sums["tokens"], "packed_trained": sums["trained"],
        "fill": round(sums["tokens"] / (sums["rows"] * max_length), 6) if sums["rows"] else 0.0,
        "dropped_rows": dict(dropped),
        **{name: sums[name] for name in LOSSES if name != "cut_prompts" or sums[name]},
        **({"blocks": n_blocks} if n_blocks > 1 else {}),
    }  # fmt: skip


def _write_counts(rows: Path) -> None:
    """The counts of rows that nobody holds in memory: they are mapped, and shared by the processes of a machine."""
    with row_counts(rows).open("xb") as file:
        for batch in record_batches(rows):
            segments = np.diff(view(batch.column("document").offsets))
            columns = [segments if name == "documents" else view(batch.column(name)) for name in COUNTS]
            np.stack(columns, axis=1, dtype="<i8", casting="unsafe").tofile(file)
