"""Records to examples: which form a record has, and each of its values checked.

A form is recognised by the keys of each record, in the order of `FORMS`, unless the recipe names one. A key whose
value is null counts as absent: tables fill with null what a record does not have.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Literal, NamedTuple

from tuner.config.methods import ExampleKind
from tuner.data.reading.answers import PROMPTS, SCORES, SIDES, label_key, labelled_of, learned_answer, pair_of, sides_of
from tuner.data.reading.columns import other_side, value_at
from tuner.data.reading.examples import BY_TYPE, Compared, Example, Learned, Record, answers_of, document_of
from tuner.data.reading.forms import ROLES, SPEAKERS, from_alpaca, from_text, from_tokens, from_turns, refuse_media
from tuner.data.reading.problems import RecordProblem, quoted

_NO_COLUMNS: Mapping[str, str] = {}


def parse_record(value: Record, format: str = "auto", columns: Mapping[str, str] = _NO_COLUMNS) -> Example:  # noqa: A002
    """Return the example in a record; `format` other than auto forces its form, `columns` says where our keys are.

    Parts of `value` may be in the result: neither is to be changed. Raises RecordProblem.
    """
    if format == "sharegpt" and not columns and value.get("conversations") is None and "messages" in value:
        columns = {"conversations": "messages"}
    try:
        return _parse(_renamed(value, columns) if columns else value, format, columns)
    except RecordProblem as problem:
        raise _named_as_written(problem, columns) from problem


def parse_compared(
    value: Record, kind: Literal["preference", "unpaired"], format: str = "auto",  # noqa: A002 (the recipe's word)
    columns: Mapping[str, str] = _NO_COLUMNS,
) -> Compared:
    """Return the pair of answers in a record, or the answer with its label; otherwise as `parse_record`."""
    try:
        view = _renamed(value, columns) if columns else value
        refuse_media(view)
        _refuse_flag(view)
        sides, label = sides_of(view), label_key(view)
        if kind == "preference" and sides is not None:
            return pair_of(view, sides, format)
        if kind == "unpaired" and label is not None:
            return labelled_of(view, label, format)
        raise _not_compared(view, kind)
    except RecordProblem as problem:
        raise _named_as_written(problem, columns) from problem


def read_as(value: Record, kind: ExampleKind, format: str, columns: Mapping[str, str]) -> Learned:  # noqa: A002
    """Return what a record is to a method of this kind; otherwise as `parse_record`."""
    if kind == "preference" or kind == "unpaired":  # noqa: PLR1714 (which narrows the type)
        return parse_compared(value, kind, format, columns)
    example = parse_record(value, format, columns)
    return document_of(example) if kind == "pretrain" else example


def _named_as_written(problem: RecordProblem, columns: Mapping[str, str]) -> RecordProblem:
    """The problem with its place by the record's own keys."""
    if not problem.path or problem.path[0] not in columns:
        return problem
    path = (*columns[str(problem.path[0])].split("."), *problem.path[1:])
    return RecordProblem(problem.reason, problem.col, path, problem.hint)


def _not_compared(value: Record, kind: str) -> RecordProblem:
    """What a record is that has not the answers that its method compares."""
    names = ", ".join(quoted(key) for key in list(value)[:8]) or "no keys"
    wanted = ("chosen", "rejected") if kind == "preference" else ("label",)
    for key in wanted:
        if all(name in value for name in wanted) and value[key] in (None, ""):
            return RecordProblem(f"{key} is {'null' if value[key] is None else 'empty'}", path=(key,))
    if kind == "unpaired" and sides_of(value) is not None:
        return RecordProblem("a preference row: it has two answers and no label", 1)
    but = ", but a label" if kind == "preference" and label_key(value) is not None else ""
    return RecordProblem(f"no {' + '.join(wanted)}{but}; the row has {names}", 1)


def _parse(value: Record, format: str, columns: Mapping[str, str]) -> Example:  # noqa: A002 (the recipe's word)
    if format != "text":
        refuse_media(value)
    _refuse_flag(value)
    if format == "auto" and not columns:
        _refuse_compared(value)
    if format in {"auto", "prompt_completion"} and "completion" in columns and value.get("completion") is not None:
        return learned_answer(value, "completion", other_side(value, columns["completion"]), format)
    forms = FORMS if format == "auto" else {format: FORMS[format]}
    if format == "sharegpt":
        forms = {format: FORMS[format]._replace(parse=lambda value: from_turns(value, by_speaker=True))}
    for keys, parse, _ in forms.values():
        if all(value.get(key) is not None for key in keys):
            return parse(value)
    for keys, *_ in forms.values():
        missing = next((key for key in keys if key in value and value[key] is None), None)
        if missing is not None and all(key in value for key in keys):
            raise RecordProblem(f"{missing} is null", path=(missing,))
    raise _unknown(value, [form.keys for form in forms.values()])


def _refuse_flag(value: Record) -> None:
    """Refuse a row that says of itself that it is not trained: it would be."""
    flag = value.get("train")
    if isinstance(flag, (bool, int, float)) and flag != 1:
        raise RecordProblem("train is a flag of messages: a row that is not to be trained is left out", path=("train",))


def _refuse_compared(value: Record) -> None:
    """Refuse what would learn rejected answers too."""
    sides = sides_of(value)
    if sides is not None:
        reason = f"a preference row ({', '.join(sides)}): two answers, of which one is preferred"
        raise RecordProblem(reason, path=(sides[1],))
    label = label_key(value)
    if label is not None and isinstance(value[label], bool):
        what = "it says whether the answer is wanted, and answers that are not would be learned too"
        raise RecordProblem(f"a labelled row ({label}): {what}", path=(label,))


def form_of(value: Record, columns: Mapping[str, str] = _NO_COLUMNS) -> str | None:
    """Return the form of a record by its keys; None for one of no form. RecordProblem."""
    value = _renamed(value, columns) if columns else value
    return next((name for name, form in FORMS.items() if all(value.get(key) is not None for key in form.keys)), None)


def form_read(
    value: Record, example: Learned, format: str, columns: Sequence[tuple[str, str]]  # noqa: A002 (as above)
) -> str:
    """Return the form that an example was read from: of one that compares answers, that of its prompt."""
    if (found := BY_TYPE.get(type(answers_of(example)[0]))) is not None:
        return found
    if format != "auto":
        return format
    told = ((form.keys[0], name) for name, form in FORMS.items() if name not in BY_TYPE.values())
    forms = (name for key, name in told if value.get(key) is not None or any(key == ours for ours, _ in columns))
    return next(forms, "prompt_completion")


def _unknown(value: Record, wanted: list[tuple[str, ...]]) -> RecordProblem:
    known = [key for keys in wanted for key in keys]
    matches = {key: get_close_matches(key, known, 1, 0.7) for key in list(value)[:64] if key not in known}
    near = [f"{quoted(key)} (did you mean {match[0]!r}?)" for key, match in matches.items() if match]
    names = ", ".join(near[:8] or [quoted(key) for key in list(value)[:8]]) or "no keys"
    return RecordProblem(f"no {' or '.join(' + '.join(keys) for keys in wanted)}; the row has {names}", 1)


def has_speakers(value: Record) -> bool:
    """Whether a record has messages whose role is one of ShareGPT's names, which the form `sharegpt` reads."""
    lists = (value[key] for key in ("messages", "conversations", "prompt") if isinstance(value.get(key), list))
    roles = {item.get("role") for items in lists for item in items if isinstance(item, dict)}
    return any(isinstance(role, str) and role in SPEAKERS and role not in ROLES for role in roles)


def unread_keys(value: Record, columns: Mapping[str, str] = _NO_COLUMNS, kind: ExampleKind = "sft") -> list[str]:
    """Return the keys of a record that are neither learned nor given to the chat template. RecordProblem."""
    view = _renamed(value, columns) if columns else value
    read = _read_keys(view, kind, "completion" in columns)
    outer = {theirs.partition(".")[0] for theirs in columns.values()}
    return [key for key in value if key not in read and (key not in outer or key in view and key not in columns)]


def _read_keys(view: Record, kind: ExampleKind, answers: bool) -> Set[str]:
    """The keys that are read of a record by our names; `answers` where its completion answers a prompt of any form."""
    if kind == "preference" or kind == "unpaired" or answers:  # noqa: PLR1714 (as above)
        compared = [label_key(view), *SCORES, "margin", *(key for keys in SIDES for key in keys)]
        prompt = next((key for key in PROMPTS.values() if view.get(key) is not None), None)
        more = ("input", "history") if prompt == "instruction" else ()
        answer = "output" if prompt == "instruction" and view.get("completion") is None else "completion"
        return {*more, prompt, answer, "system", "tools", *([] if answers else compared)}
    form = form_of(view)
    return set() if form is None else {*FORMS[form].keys, *FORMS[form].also_read}


def unused_texts(value: Record, columns: Mapping[str, str] = _NO_COLUMNS, kind: ExampleKind = "sft") -> tuple[str, ...]:
    """Return the keys of a record whose text is not read."""
    if form_of(value, columns) == "tokens":
        return ()
    texts = ((key, value[key]) for key in unread_keys(value, columns, kind))
    return tuple(key for key, text in texts if isinstance(text, str) and text.strip())


def _renamed(value: Record, columns: Mapping[str, str]) -> Record:
    """The record under our names; what was renamed is not seen under its own."""
    view = {key: item for key, item in value.items() if key not in columns.values()}
    for ours, theirs in columns.items():
        item, found = value_at(value, theirs)
        if found:
            view[ours] = item
        elif ours not in _OPTIONAL:
            near = get_close_matches(theirs, list(value)[:64], 1, 0.6)
            hint = f"; did you mean {quoted(near[0])}?" if near else ""
            raise RecordProblem(f"no {theirs!r}, which columns names for {ours}{hint}", 1)
    return view


class RecordForm(NamedTuple):
    """A form of record, recognised by having all of the ``keys``."""

    keys: tuple[str, ...]
    parse: Callable[[Record], Example]
    also_read: tuple[str, ...] = ()
    """What it may read apart from these."""


_OF_CHATS = ("system", "tools")
FORMS: dict[str, RecordForm] = {
    "messages": RecordForm(("messages",), lambda value: from_turns(value, "messages"), _OF_CHATS),
    "sharegpt": RecordForm(("conversations",), from_turns, _OF_CHATS),
    "prompt_completion": RecordForm(
        ("prompt", "completion"), lambda row: learned_answer(row, "completion", None, "prompt_completion"), _OF_CHATS
    ),
    "alpaca": RecordForm(("instruction", "output"), from_alpaca, ("input", "history", *_OF_CHATS)),
    "text": RecordForm(("text",), from_text),
    "tokens": RecordForm(("input_ids",), from_tokens),
}
_OPTIONAL = {"system", "tools", "input", "history", "labels", "loss_mask", "margin", "score_chosen", "score_rejected"}
"""Keys that a record may leave out."""
