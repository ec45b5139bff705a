"""What preparation says to people: how far it is, and what it did; every number is in the manifest's `report`.

What their length costs documents is not kept: lengths are read off the documents' offsets when there is something to
say, so that what was prepared before is judged like what is prepared now, however many workers built it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.config.methods import ExampleKind, Examples
from tuner.data.building.pack import NO_TARGET, NO_TRAINED_TOKEN, REPEATS, TOO_LONG
from tuner.data.building.spec import PrepareSpec
from tuner.data.encoding.turns import CALLS_NOT_SHOWN, NOT_SHOWN
from tuner.data.prepared import open_stream, view
from tuner.errors import DataError, counted
from tuner.runtime.console import Console

MANY, MOST = 0.02, 0.5
"""Shares of a split's documents: a loss above the first is warned of; above the second it is an error by default."""
WHOLE = (0.95, 0.99)
"""Shares of the documents for which the row length that keeps them whole is named."""


def length_warnings(spec: PrepareSpec, report: Mapping[str, Any], directory: Path) -> list[str]:
    """Warnings of the documents in a prepared directory that are dropped or cut because of their length.

    Raises DataError where that is more than half of a split and the recipe does not say `data.too_long` itself.
    """
    warnings = []
    for split in ("train", "eval"):
        if (counts := report[split]) is None:
            continue
        documents, dropped = int(counts["documents"]), int(counts["dropped_rows"].get(TOO_LONG, 0))
        affected, what = (dropped, "dropped") if dropped else (int(counts["truncated"]), "cut")
        share = affected / max(documents, 1)
        if share <= MANY:
            continue
        lengths = lengths_that_keep(directory / f"{split}.documents.arrow", WHOLE, spec.examples.documents)
        of = f"{affected:,} of {documents:,} {spec.examples.unit}s ({share:.0%})"
        text = f"data.{split}: {of} are {what}: longer than data.max_length ({spec.max_length:,})"
        text += f"; {kept_by(lengths)}{_beyond(spec, lengths)}"
        if share > MOST and spec.data.too_long == "auto":
            ways = "data.too_long: truncate (to cut them) or drop (to leave them out all the same)"
            raise DataError(text, hint=f"write {raised(spec, lengths)}{ways}")
        warnings.append(text)
    return warnings


def lengths_that_keep(documents: Path, shares: Sequence[float], each: int = 1) -> tuple[int, ...]:
    """The row length with which each of these shares of a file's documents stays whole.

    Where an example is `each` neighbours, of the examples, which need the sum of their lengths.
    """
    often_each = Counter[int]()
    for part in _lengths(documents):
        found = np.unique(part.reshape(-1, each).sum(axis=1), return_counts=True)
        often_each.update(dict(zip(*(column.tolist() for column in found), strict=True)))
    lengths, often = np.array(sorted(often_each.items())).T
    after = np.cumsum(often)
    return tuple(int(lengths[np.searchsorted(after, np.ceil(share * after[-1]))]) for share in shares)


def kept_by(lengths: Sequence[int]) -> str:
    """Which `data.max_length` keeps how many documents whole."""
    by_length = dict(zip(lengths, WHOLE, strict=True))  # of equal lengths the larger share
    first, *rest = by_length
    others = "".join(f", {length:,} keeps {by_length[length]:.0%}" for length in rest)
    return f"data.max_length: {first} keeps {by_length[first]:.0%} of them whole{others}"


def raised(spec: PrepareSpec, lengths: Sequence[int]) -> str:
    """The line to write for longer rows, with the word that joins it to another way; empty where the model has none."""
    fitting = [length for length in lengths if spec.positions is None or length <= spec.positions]
    return f"data.max_length: {fitting[-1]}, or " if fitting else ""


def _beyond(spec: PrepareSpec, lengths: Sequence[int]) -> str:
    if spec.positions is None or lengths[-1] <= spec.positions:
        return ""
    return f"; the model has {spec.positions:,} positions"


def _lengths(documents: Path) -> Iterator[npt.NDArray[np.int64]]:
    """int64[n]: the tokens of the documents of each record batch; only offsets are read, from the mapped file."""
    for chunk in open_stream(documents).column("input_ids").chunks:
        if len(chunk):
            yield np.diff(view(chunk.offsets)).astype(np.int64)


Line = tuple[str, str]
MANY_DUPLICATES = 0.1
"""The share of a split's documents above which duplicates are warned of."""
RARE = 0.1
"""Forms that no more of a source's rows have are warned of."""
LOST = {
    NOT_SHOWN: "the model would learn to call tools that it is never shown: "
    "tokenizer.chat_template: chatml writes them",
    CALLS_NOT_SHOWN: "they are neither learned nor shown: tokenizer.chat_template: chatml writes them",
}
"""Notes about what of the rows the template leaves out that is to be learned from, and the way out."""
PLAIN_EVERY_S = 30.0
"""Seconds between two lines where no bar can be drawn."""
MB = 1_000_000


def report_lines(report: Mapping[str, Any], kind: ExampleKind, max_length: int, packing: bool) -> list[Line]:
    """The lines of a prepared directory's report."""
    unit = Examples(kind).unit
    lines: list[Line] = _tokenizer_lines(report.get("tokenizer"))
    if kind != "pretrain":
        lines += _mask_lines(report)
    lines += _form_lines(report)
    lines += [("note", f"{note} ({count:,})") for note, count in report["notes"].items()]
    fast = report["fast_path"]
    if fast["share"]:
        reason = f", {fast['reason']}" if fast["reason"] else ""
        lines.append(("encoder", f"fast for {fast['share']:.1%} of documents{reason}"))
    elif fast["reason"]:
        lines.append(("encoder", f"fast encoder not used: {fast['reason']}"))
    if report["escaped"]:
        where = counted(report["escaped"], "document")
        lines.append(("escaped", f"control tokens that appear literally in {where} are plain text"))
    for split in ("train", "eval"):
        lines += _source_lines(split, report["sources"].get(split, []), unit)
    splits = [split for split in ("train", "eval") if report[split] is not None]
    lines += [(split, _split_text(report[split], unit)) for split in splits]
    for split in splits:
        how = f"{report[split]['fill']:.2%} full" if packing else f"one {unit} each"
        text = f"{counted(report[split]['packed_rows'], 'row')} of {max_length:,}, {how}"
        lines.append(("packing", text) if split == "train" else ("", f"{text} (eval)"))
    return lines


def _mask_lines(report: Mapping[str, Any]) -> list[Line]:
    masks, chats = report["masks"], by_answer_of(report)
    if not chats["chats"]:
        repetitive = sum(report[split]["dropped"].get(REPEATS, 0) for split in ("train", "eval") if report[split])
        left = masks["rows"] - masks["proven"] - repetitive
        others = f"; {counted(left, 'row')} skipped or without an answer" if left else ""
        return [("masks", f"verified for all {counted(masks['proven'], 'row')} used{others}")]
    chat, documents = counted(chats["chats"], "chat"), counted(chats["documents"], "document")
    text = f"{documents} of {chat}, one for each answer as it is prompted for"
    verified = f"verified for {counted(masks['proven'], 'document')} of {counted(masks['rows'], 'row')}"
    return [("masks", verified), ("answers", text)]


def _form_lines(report: Mapping[str, Any]) -> list[Line]:
    """How many rows have which form, where there are several."""
    found = (source.get("forms", {}) for sources in report["sources"].values() for source in sources)
    forms = sum(map(Counter, found), Counter[str]())
    return [("forms", ", ".join(f"{count:,} {form}" for form, count in forms.most_common()))] if len(forms) > 1 else []


def by_answer_of(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The counts of chats that became a document for each answer; an earlier version's report has none."""
    found: Mapping[str, Any] = report.get("by_answer", {"chats": 0, "documents": 0, "left_out": {}})
    return found


def warnings_of(report: Mapping[str, Any], rejects: str, unit: str = "document") -> list[str]:
    """What deserves a second look; `rejects` is the path of the file of skipped rows, `unit` what is counted."""
    warnings: list[str] = []
    for split in ("train", "eval"):
        if report[split] is not None:
            warnings += _split_warnings(split, report[split], rejects, unit)
    notes = report.get("notes", {})
    warnings += [f"{counted(notes[note], 'row')}: {note}; {way}" for note, way in LOST.items() if note in notes]
    for split, sources in report["sources"].items():
        warnings += _label_warnings(split, sources)
        for source in sources:
            warnings += _form_warnings(split, source, unit)
            if source["documents"] and not source["sampled"]:
                warnings.append(f"data.{split}: nothing of {source['path']} is used: its share rounds to no {unit}")
    for reason, count in by_answer_of(report)["left_out"].items():
        warnings.append(f"{count:,} answers of chats with others that are trained are left out: {reason}")
    if report["overlap"]:
        documents = report["eval"]["documents"]
        is_all = report["overlap"] == documents - report["eval"]["duplicates"]
        of = f"all {documents:,} of its" if is_all else f"{report['overlap']:,} of its different"
        warnings.append(f"data.eval: {of} {unit}s are in data.train too")
    if others := (report.get("tokenizer") or {}).get("other_versions"):
        now = report["tokenizer"]["transformers"]
        listed = f"transformers {now} gives other ids than {', '.join(others)} did for the same tokenizer files"
        warnings.append(f"tokenizer: {listed}: readers of an export with those versions are given the ids of {now}")
    return warnings


def _label_warnings(split: str, sources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Labels of one kind alone: there is nothing to tell them from."""
    documents = sum(source["documents"] for source in sources)
    wanted = [source["wanted"] for source in sources if "wanted" in source]
    if wanted and sum(wanted) in {0, documents}:
        label = str(sum(wanted) > 0).lower()
        yield f"data.{split}: all {documents:,} answers are labelled {label}: there are none to tell them from"


def _form_warnings(split: str, source: Mapping[str, Any], unit: str) -> Iterator[str]:
    """Rows of a form that few of their source have: strays, such as a line of text among chats."""
    forms = Counter(source.get("forms", {}))
    if len(forms) < 2 or unit == "pair":
        return
    (main, _), *others = forms.most_common()
    total = sum(forms.values())
    if rare := [f"{count:,} {form}" for form, count in others if count <= RARE * total]:
        way = f"format: {main} in the source makes them bad rows, with their lines"
        yield f"data.{split}: of {total:,} rows of {source['path']} {', '.join(rare)}, the others {main}: {way}"


def _split_warnings(split: str, counts: Mapping[str, Any], rejects: str, unit: str) -> Iterator[str]:
    """What of a split's examples is left out or superfluous, but for those that are too long."""
    rows, documents = max(counts["rows"], 1), max(counts["documents"], 1)
    if skipped := sum(counts["skipped"].values()):
        yield f"data.{split}: {counted(skipped, 'bad row')} skipped ({skipped / rows:.0%}), see {rejects}"
    dropped, cut_off = counts["dropped"], counts.get("dropped_rows", {}).get(NO_TARGET, 0)
    of_rows, of_documents, copies = (rows, MANY, "row"), (documents, MANY, unit), (documents, MANY_DUPLICATES, unit)
    for some, (every, share, of), what in (
        (dropped.get(NO_TRAINED_TOKEN, 0), of_rows, "have no trained token, such as an answer, and are left out"),
        (dropped.get(REPEATS, 0), of_rows, "repeat a pattern of tokens too often (data.repetition), and are left out"),
        (cut_off, of_documents, "have no trained token within data.max_length and are left out: raise it"),
        (counts["duplicates"], copies, "are exact duplicates of others, which is no reason to leave them out"),
    ):
        if some > share * every:
            yield f"data.{split}: {some:,} of {every:,} {of}s ({some / every:.0%}) {what}"


def _tokenizer_lines(tokenizer: Mapping[str, Any] | None) -> list[Line]:
    """How transformers loads the tokenizer, where that is not what tokenizer.json says alone."""
    if tokenizer is None or tokenizer["changed"] == []:
        return []
    if "use" in tokenizer:
        return [("tokenizer", f"made by {tokenizer['use']} ({tokenizer['class']})")]
    how = f"as transformers {tokenizer['transformers']} loads it ({tokenizer['class']})"
    if tokenizer["changed"] is None:
        return [("tokenizer", f"{how}: its directory has no tokenizer.json")]
    parts = ", ".join(tokenizer["changed"])
    return [("tokenizer", f"{how}, which differs from tokenizer.json in: {parts}")]


def _source_lines(split: str, sources: list[dict[str, Any]], unit: str) -> Iterator[Line]:
    """A line for each source, where there are several or a share is used."""
    plain = all(source["sampled"] == source["documents"] and not source["repeated"] for source in sources)
    for source in sources if len(sources) > 1 or not plain else ():
        text = f"{source['path']}  {counted(source['documents'], unit)}"
        if source["sampled"] < source["documents"]:
            text += f"  {source['sampled']:,} sampled"
        if source["repeated"]:
            text += f"  {source['repeated']:,} repeated"
        yield f"{split} of", text


def _split_text(counts: Mapping[str, Any], unit: str) -> str:
    share = counts["packed_trained"] / max(counts["packed_tokens"], 1)
    parts = [counted(counts["packed_documents"], unit), counted(counts["packed_tokens"], "token")]
    parts += [f"{counts['packed_trained']:,} trained ({share:.0%})", f"longest {counts['longest']:,}"]
    parts += [f"{counts[word]:,} {word}" for word in ("truncated", "split") if counts[word]]
    parts += [f"{counts['cut_prompts']:,} with a shorter prompt"] if "cut_prompts" in counts else []
    parts += [f"{counted(counts['duplicates'], 'duplicate')} kept"] if counts["duplicates"] else []
    if counts.get("dropped_pieces"):  # what an earlier version prepared does not count them
        pieces, tokens = counts["dropped_pieces"], counts["dropped_piece_tokens"]
        parts.append(f"{pieces:,} pieces of split documents dropped: no trained token in their {tokens:,}, or too few")
    for key in ("skipped", "dropped", "dropped_rows"):
        parts += [f"{count:,} {key.partition('_')[0]}: {reason}" for reason, count in counts[key].items()]
    return "  ".join(parts)


def done_line(size: int, seconds: float) -> str:
    """How much was read in how long; the rate only where there is enough for one."""
    if size < MB:
        return f"{size / 1000:,.1f} kB in {seconds:.1f} s"
    return f"{size / MB:,.1f} MB in {seconds:.1f} s, {size / MB / max(seconds, 1e-9):.1f} MB/s"


@contextmanager
def pace(
    console: Console | None, total: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """Yield the function that counts bytes as they are done; `total` is the bytes of all input.

    It says how far they are: with a live bar on a terminal, else with a line now and then.
    """
    if console is None:
        yield lambda count: None
        return
    done, started, said = 0, clock(), clock()
    with console.progress("encode MB", max(total // MB, 1)) as bar:

        def add(count: int) -> None:
            nonlocal done, said
            done, now = done + count, clock()
            rate = done / max(now - started, 1e-9)
            bar.update(done // MB, f"{rate / MB:.1f} MB/s")
            if not console.is_live and now - said >= PLAIN_EVERY_S:
                said = now
                share, left = min(done / max(total, 1), 1.0), _span(max(total - done, 0) / rate)
                console.say("encode", f"{share:.0%} of {total / MB:,.0f} MB  {rate / MB:.1f} MB/s  {left} left")

        yield add


def _span(seconds: float) -> str:
    """Seconds as `0:42` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
