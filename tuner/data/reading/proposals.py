"""The line to write for a record that cannot be read: only one that was tried on the source's own records.

What `columns.py` suggests by the names of keys is applied to the record and to the first ones of its source. It is
proposed where the record is then read with every text that belongs to it, and each record that was read before still
is, as before.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import orjson

from tuner.config.methods import ExampleKind
from tuner.config.yaml import flow
from tuner.data.reading.answers import label_key
from tuner.data.reading.columns import ColumnKeys, compared, is_part, key_names, labelled, learned, turns_in, words_of
from tuner.data.reading.examples import Conversation, Labelled, Learned, PlainText, PromptCompletion, Record, answers_of
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.records import form_of, has_speakers, read_as, unread_keys

COLUMNS_FORM = "columns: {instruction: YOURS, output: YOURS}"
"""What to write where no key of a row is known: the row's own keys stand for YOURS."""
_METHODS: dict[ExampleKind, str] = {"sft": "sft", "pretrain": "pretrain", "preference": "dpo", "unpaired": "kto"}
_LEARNS = {
    "dpo": "to learn which of two answers is preferred", "kto": "to learn which answers are wanted",
    "sft": "to learn the answers", "pretrain": "to learn plain text",
}  # fmt: skip
_EMPTY: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class ProposedReading:
    """How records are read: by what kind of method, and by what their source says."""

    kind: ExampleKind
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)

    def try_on(self, record: Record) -> Learned | None:
        """The example in a record, or None."""
        try:
            return read_as(record, self.kind, self.format, self.columns)
        except RecordProblem:
            return None


class Proposal(NamedTuple):
    """A reading under which a record is an example, and what of its text is left out."""

    reading: ProposedReading
    given: ProposedReading
    """How the recipe has it."""
    unread: tuple[str, ...]
    needs_template: bool

    @property
    def lines(self) -> dict[str, Any]:
        """What to write: `method`, `columns`, `format` or `chat_template`, each where it is another than is given."""
        found: dict[str, Any] = {}
        if _METHODS[self.reading.kind] != _METHODS[self.given.kind]:
            found["method"] = _METHODS[self.reading.kind]
        if self.reading.columns != self.given.columns:
            found["columns"] = dict(self.reading.columns)
        if self.reading.format != self.given.format:
            found["format"] = self.reading.format
        return found | ({"chat_template": "chatml"} if self.needs_template else {})

    def text(self, path: str) -> str:
        """The advice in words, for a source at `path`."""
        lines = self.lines
        source = {"path": path} | {key: lines[key] for key in ("format", "columns") if key in lines}
        parts = []
        if "method" in lines:
            parts.append(f"method.kind: {lines['method']}")
        if len(source) > 1:
            parts.append(f"the source as {flow(source)}")
        if "chat_template" in lines:
            parts.append(f"tokenizer.chat_template: {lines['chat_template']}")
        text = f"write {' and '.join(parts)}"
        if "method" in lines:
            text += f" {_LEARNS[lines['method']]}"
        elif "completion" in lines.get("columns", {}) and self.is_of_pair:
            text += " to learn the preferred answers"
        return text + (f" ({', '.join(map(repr, self.unread))} not read)" if self.unread else "")

    @property
    def is_of_pair(self) -> bool:
        """Whether an answer of two is learned."""
        learned = self.reading.columns.get("completion", "").lower()
        return self.reading.kind in {"sft", "pretrain"} and any(learned == side for side, _ in key_names().sides)


def ways_out(bad: Record, sample: Sequence[Record], given: ProposedReading, chats: bool, path: str) -> list[str]:
    """Return in words what may be written for a record of the source at `path`; the arguments as for `proposals`.

    Where nothing of a record's keys is known but texts, it is the form of the line.
    """
    found = proposals(bad, sample, given, chats)
    is_default = given.kind in {"sft", "pretrain"} and given == ProposedReading(given.kind)
    if found or not is_default or form_of(bad) is not None:
        return [proposal.text(path) for proposal in found]
    keys = ColumnKeys.of(bad)
    if len(keys.texts) < 2 or keys.turns or keys.sides or sum(map(is_part, bad)) > 1:
        return []  # what is known of it was tried, and does not do
    return [f"write the source as {{path: {flow(path)}, {COLUMNS_FORM}}}, with the row's own keys as YOURS"]


def proposals(bad: Record, sample: Sequence[Record], given: ProposedReading, chats: bool) -> list[Proposal]:
    """Return what may be written for a record that is not read as `given`, the likeliest first; at most one a method.

    `sample` are records of the same source, `chats` says whether the model has a chat template.
    """
    typical = _typical(bad, sample)
    found: list[Proposal] = []
    for kind in _kinds(given.kind):
        candidates = _candidates(typical, kind, given, chats)
        tried = (_tried(candidate, given, bad, sample, chats) for candidate in candidates)
        proposal = next(filter(None, tried), None)
        found += [] if proposal is None else [proposal]
        if found and not (kind == given.kind and found[0].is_of_pair):
            break
    return found


def _kinds(given: ExampleKind) -> tuple[ExampleKind, ...]:
    others: tuple[ExampleKind, ...] = ("preference", "unpaired", "sft", "pretrain")
    alike = {"sft", "pretrain"}  # both read the same records
    return (given, *(kind for kind in others if kind != given and not {kind, given} <= alike))


def reading_for(records: Sequence[Record], chats: bool) -> ProposedReading:
    """Return the reading that makes the most of the first records of a source: the plainest of those that do."""
    typical = _typical({}, records)
    kinds: tuple[ExampleKind, ...] = ("preference", "unpaired", "sft")
    mapped = (candidate for kind in kinds for candidate in _candidates(typical, kind, ProposedReading(kind), chats))
    best = max([*map(ProposedReading, kinds), *mapped], key=lambda reading: _used(reading, records))
    return best if _used(best, records) else ProposedReading("sft")


def _used(reading: ProposedReading, records: Sequence[Record]) -> int:
    """Two points for each record that is read; one where a part of it is not, which is no reason for `columns`."""
    points = 0
    for record in records:
        example = reading.try_on(record)
        if example is not None and _is_learned(example, reading, record):
            points += (not reading.columns) if lost(record, example, reading) else 2
    return points


def _is_learned(example: Learned, reading: ProposedReading, record: Record) -> bool:
    """Whether an example has something to learn; numbers for labels may be classes of anything."""
    if isinstance(example, Labelled):
        label = record.get(reading.columns.get("label", label_key(record) or "label"))
        return str(label).strip().lower() in {"true", "false"}
    return not isinstance(example, Conversation) or has_answer(example)


def _typical(bad: Record, sample: Sequence[Record]) -> dict[str, Any]:
    """One record with a value of each key that records like `bad` have: the first one of the commonest type."""
    values: dict[str, list[Any]] = {}
    for record in sample:
        if not bad or len(record.keys() & bad.keys()) * 2 > len(bad):
            for key, value in record.items():
                values.setdefault(key, []).extend([] if value in _EMPTY else [value])
    found = {key: _commonest(each) for key, each in values.items() if each}
    return found | {key: value for key, value in bad.items() if value not in _EMPTY}


def _commonest(values: Sequence[Any]) -> Any:
    kind = Counter(map(type, values)).most_common(1)[0][0]
    return next(value for value in values if type(value) is kind)


def _candidates(typical: Record, kind: ExampleKind, given: ProposedReading, chats: bool) -> Iterator[ProposedReading]:
    """Readings that may be meant, the likeliest first."""
    if given.format != "auto":
        form = form_of(typical)
        yield from [ProposedReading(kind, form, given.columns)] if form is not None else []
    yield ProposedReading(kind, "auto", given.columns)
    if has_speakers(typical):
        yield ProposedReading(kind, "sharegpt", given.columns)
    suggested = {"preference": compared, "unpaired": labelled}.get(kind, learned)
    yield from (ProposedReading(kind, "auto", columns) for columns in suggested(typical, chats))


def _tried(
    candidate: ProposedReading, given: ProposedReading, bad: Record, sample: Sequence[Record], chats: bool
) -> Proposal | None:
    """The proposal of a reading; None where it does not do."""
    example = candidate.try_on(bad)
    if candidate == given or example is None or not is_whole(example) or lost(bad, example, candidate):
        return None
    if candidate.kind != given.kind and isinstance(example, PlainText) != (candidate.kind == "pretrain"):
        return None
    for record in sample:
        before, after = given.try_on(record), candidate.try_on(record)
        same = after == before if candidate.kind == given.kind else after is not None
        if (before is not None and not same) or (after is not None and lost(record, after, candidate)):
            return None
    is_chat = any(isinstance(part, Conversation) for part in answers_of(example))
    return Proposal(candidate, given, _aside(bad, example, candidate), not chats and is_chat)


def is_whole(example: Learned) -> bool:
    """Whether what is learned answers something: a text apart, it has a prompt and ends with the answer to it."""
    if isinstance(example, PromptCompletion):
        return bool(example.prompt.strip())
    return not isinstance(example, Conversation) or (
        has_answer(example) and example.messages[-1]["role"] == "assistant"
    )


def has_answer(example: Conversation) -> bool:
    """Whether an answer that may be learned comes after something that it answers."""
    roles = [message["role"] for message in example.messages]
    first = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    return any(role == "assistant" and example.train[i] is not False for i, role in enumerate(roles) if i > first)


def lost(record: Record, example: Learned, reading: ProposedReading) -> list[str]:
    """Return the keys of what belongs to a prompt or an answer, by their names, and is in no part of the example."""
    unread = _unread(record, example, reading)
    return [key for key, value in unread if is_part(key) or turns_in(value) is not None]


def _aside(record: Record, example: Learned, reading: ProposedReading) -> tuple[str, ...]:
    """The keys of texts of several words that are not read, though their names do not say that they are aside."""
    unread, aside = _unread(record, example, reading), key_names().aside
    texts = [(key, text) for key, text in unread if isinstance(text, str) and aside.isdisjoint(words_of(key))]
    return tuple(key for key, text in texts if len(text.split()) > 1)


def _unread(record: Record, example: Learned, reading: ProposedReading) -> list[tuple[str, Any]]:
    """The keys, with their values, of which a text is in no part of the example; but not of the other answer."""
    said = "\n".join(texts_in([*chain.from_iterable(answers_of(example))]))
    sides = ColumnKeys.of(record).sides or ()
    keys = (key for key in unread_keys(record, reading.columns, reading.kind) if key not in sides)
    return [(key, record[key]) for key in keys if any(text.strip() not in said for text in texts_in(record[key]))]


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value that are not blank, but for who speaks."""
    if isinstance(value, str):
        if turns_in(value) is not None:
            yield from texts_in(orjson.loads(value))
        elif value.strip():
            yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in {"role", "from"}:
                yield from texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)
