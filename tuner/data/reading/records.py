"""Records to examples: which form a record has, and each of its values checked.

A form is told from the keys of each record, in the order of `FORMS`, unless the recipe names one. A key whose value is
null counts as absent: tables fill with null what a record does not have.
"""

from collections.abc import Mapping, Set
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

from tuner.data.reading.columns import COLUMNS_FORM, columns_line, proposed_answers, proposed_columns
from tuner.data.reading.examples import (
    Compared,
    Conversation,
    Example,
    Labelled,
    Pair,
    PlainText,
    PromptCompletion,
    Record,
    Tokens,
)
from tuner.data.reading.forms import ALSO_READ, FORMS, from_sharegpt
from tuner.data.reading.messages import ROLES, SPEAKERS
from tuner.data.reading.preferences import LABELS, SIDES, label_key, labelled_of, pair_of, read_keys, sides_of
from tuner.data.reading.problems import RecordProblem, quoted

__all__ = [
    "ROLES", "SPEAKERS", "Compared", "Conversation", "Example", "Labelled", "Pair", "PlainText", "PromptCompletion",
    "Tokens", "parse_compared", "parse_record",
]  # fmt: skip
if TYPE_CHECKING:
    from tuner.config.methods import ExampleKind

_MEDIA = ("image", "images", "audio", "audios", "video", "videos")
_UNUSUAL = frozenset(("tools", *LABELS, *_MEDIA, *(key for pair in SIDES for key in pair)))
"""Keys next to `messages` that need a look."""
_PLAIN_ROLES = frozenset(("system", "user", "assistant"))
_NO_COLUMNS: Mapping[str, str] = {}


def parse_record(value: Record, format: str = "auto", columns: Mapping[str, str] = _NO_COLUMNS) -> Example:  # noqa: A002
    """Return the example in a record; `format` other than auto forces its form, `columns` says where our keys are.

    Parts of `value` may be in the result: neither is to be changed. Raises RecordProblem.
    """
    if not columns and format in {"auto", "messages"}:
        plain = _plain(value)
        if plain is not None:
            return plain
    if format == "sharegpt" and not columns and value.get("conversations") is None and "messages" in value:
        columns = {"conversations": "messages"}
    try:
        return _parse(_renamed(value, columns) if columns else value, format, columns)
    except RecordProblem as problem:
        raise _named_as_written(problem, columns) from problem


def parse_compared(
    value: Record,
    kind: Literal["preference", "unpaired"],
    format: str = "auto",  # noqa: A002 (the recipe's word)
    columns: Mapping[str, str] = _NO_COLUMNS,
) -> Compared:
    """Return the pair of answers in a record, or the answer with its label; otherwise as `parse_record`."""
    try:
        view = _renamed(value, columns) if columns else value
        _refuse_media(view)
        sides, label = sides_of(view), label_key(view)
        if kind == "preference" and sides is not None:
            return pair_of(view, sides, format)
        if kind == "unpaired" and label is not None:
            return labelled_of(view, label, format)
        raise _not_compared(view, kind, columns)
    except RecordProblem as problem:
        raise _named_as_written(problem, columns) from problem


def _named_as_written(problem: RecordProblem, columns: Mapping[str, str]) -> RecordProblem:
    """The problem with its place by the record's own keys."""
    if not problem.path or problem.path[0] not in columns:
        return problem
    path = (*columns[str(problem.path[0])].split("."), *problem.path[1:])
    return RecordProblem(problem.reason, problem.col, path, problem.hint, problem.chat_hint)


def _not_compared(value: Record, kind: str, columns: Mapping[str, str]) -> RecordProblem:
    """What a record is that has not the answers that its method compares, and the line to write."""
    names = ", ".join(quoted(key) for key in list(value)[:8]) or "no keys"
    form = form_of(value)
    if kind == "unpaired" and sides_of(value) is not None:
        what = "a preference row has no label: method.kind: dpo learns which of two answers is preferred"
        return RecordProblem(what, 1, hint="method.kind: dpo")
    if kind == "preference" and form is not None and label_key(value) is not None:
        what = "no chosen + rejected, but a label: method.kind: kto learns which answers are wanted"
        return RecordProblem(what, 1, hint="method.kind: kto")
    wanted = "chosen + rejected" if kind == "preference" else "label"
    if kind == "preference" and not columns:
        plain, chats = (proposed_answers(value, chats) for chats in (False, True))
        if plain:
            lines = columns_line(plain), columns_line(chats)
            return RecordProblem(f"no {wanted}; the row has {names}", 1, hint=lines[0], chat_hint=lines[1])
    learns = None if form is None else f"method.kind: {'pretrain' if form == 'text' else 'sft'}"
    more = "" if learns is None else f": {learns} learns such rows"
    return RecordProblem(f"no {wanted}; the row has {names}{more}", 1, hint=learns)


def _plain(value: Record) -> Conversation | None:
    """The commonest record, messages of a role and a string each; None where a closer look is needed."""
    messages = value.get("messages")
    if type(messages) is not list or not messages or (len(value) > 1 and not _UNUSUAL.isdisjoint(value)):
        return None
    for message in messages:
        if (
            type(message) is not dict
            or len(message) != 2
            or type(message.get("content")) is not str
            or type(role := message.get("role")) is not str
            or role not in _PLAIN_ROLES
        ):
            return None
    return Conversation(messages, [None] * len(messages), None)


def _parse(value: Record, format: str, columns: Mapping[str, str]) -> Example:  # noqa: A002 (the recipe's word)
    if format != "text":
        _refuse_media(value)
    if format == "auto" and not columns:
        _refuse_compared(value)
    forms = FORMS if format == "auto" else {format: FORMS[format]}
    if format == "sharegpt":
        forms = {format: (FORMS[format][0], from_sharegpt)}
    for keys, parse in forms.values():
        if all(value.get(key) is not None for key in keys):
            return parse(value)
    for keys, parse in forms.values():  # null is judged as a value only where no other form fits
        if all(key in value for key in keys):
            return parse(value)
    raise _unknown(value, [keys for keys, _ in forms.values()], columns)


def _refuse_media(value: Record) -> None:
    for key in _MEDIA:
        if value.get(key):
            raise RecordProblem("images, audio and video cannot be trained", path=(key,))


def _refuse_compared(value: Record) -> None:
    """Refuse what would learn rejected answers too, with the method that learns from them and with another way."""
    sides = sides_of(value)
    if sides is not None:
        ours = "messages" if isinstance(value[sides[0]], list) else "completion"
        raise RecordProblem(
            f"a preference row ({', '.join(sides)}): write method.kind: dpo to learn which of the two is preferred; "
            "sft can learn the chosen answers",
            path=(sides[1],),
            hint=columns_line({ours: sides[0]}),
        )
    label = label_key(value)
    if label is not None and isinstance(value[label], bool):
        raise RecordProblem(
            f"a true or false {label} makes this a preference row: write method.kind: kto to learn from the labels; "
            "sft would learn answers labelled false too, and does where the format is named",
            path=(label,),
            hint=f"format: {form_of(value) or 'messages'}",
        )


def form_of(value: Record, columns: Mapping[str, str] = _NO_COLUMNS) -> str | None:
    """Return the form of a record by its keys; None for one of no form. RecordProblem."""
    value = _renamed(value, columns) if columns else value
    matching = (form for form, (keys, _) in FORMS.items() if all(value.get(key) is not None for key in keys))
    return next(matching, None)


def _unknown(value: Record, wanted: list[tuple[str, ...]], columns: Mapping[str, str]) -> RecordProblem:
    known = [key for keys in wanted for key in keys]
    matches = {key: get_close_matches(key, known, 1, 0.7) for key in list(value)[:64] if key not in known}
    near = [f"{quoted(key)} (did you mean {match[0]!r}?)" for key, match in matches.items() if match]
    names = ", ".join(near[:8] or [quoted(key) for key in list(value)[:8]]) or "no keys"
    reason = f"no {' or '.join(' + '.join(keys) for keys in wanted)}; the row has {names}"
    form = form_of(value)
    if form is not None:
        return RecordProblem(reason, 1, hint=f"format: {form}")
    fallback = COLUMNS_FORM if len(wanted) > 1 and value and not columns and not near else None
    plain, chats = ({} if columns else proposed_columns(value, chats) for chats in (False, True))
    hint, chat_hint = (columns_line(proposed) if proposed else fallback for proposed in (plain, chats))
    return RecordProblem(reason, 1, hint=hint, chat_hint=chat_hint)


def compared_by(value: Record, columns: Mapping[str, str] = _NO_COLUMNS) -> "ExampleKind":
    """Return what a record is an example of, by its keys, where it compares answers; sft where it does not."""
    try:
        value = _renamed(value, columns) if columns else value
    except RecordProblem:
        return "sft"
    if sides_of(value) is not None or (form_of(value) is None and not columns and proposed_answers(value)):
        return "preference"
    label = label_key(value)
    known = label is not None and form_of(value) not in (None, "text", "tokens") and isinstance(value[label], bool)
    return "unpaired" if known else "sft"


def unused_texts(
    value: Record, columns: Mapping[str, str] = _NO_COLUMNS, kind: "ExampleKind" = "sft"
) -> tuple[str, ...]:
    """Return the keys of a record whose text is not read: neither trained on nor given to the chat template."""
    value = _renamed(value, columns) if columns else value
    if kind == "preference":
        return _texts_but(value, read_keys(value))
    form = form_of(value)
    if form is None or form == "tokens":
        return ()
    return _texts_but(value, {*FORMS[form][0], *ALSO_READ.get(form, ())})


def _texts_but(value: Record, read: Set[str]) -> tuple[str, ...]:
    return tuple(key for key, text in value.items() if key not in read and isinstance(text, str) and text.strip())


def _renamed(value: Record, columns: Mapping[str, str]) -> Record:
    """The record under our names; what was renamed is not seen under its own."""
    view = {key: item for key, item in value.items() if key not in columns.values()}
    for ours, theirs in columns.items():
        item, found = _at(value, theirs)
        if found:
            view[ours] = item
        elif ours not in _OPTIONAL:
            near = get_close_matches(theirs, list(value)[:64], 1, 0.6)
            hint = f"; did you mean {quoted(near[0])}?" if near else ""
            raise RecordProblem(f"no {theirs!r}, which columns names for {ours}{hint}", 1)
    return view


def _at(value: Record, name: str) -> tuple[Any, bool]:
    """The value at a key, or at a dotted path into objects, and whether it is there."""
    if name in value:
        return value[name], True
    item: Any = value
    for part in name.split("."):
        if not isinstance(item, dict) or part not in item:
            return None, False
        item = item[part]
    return item, True


_OPTIONAL = frozenset(
    ("system", "tools", "input", "history", "labels", "loss_mask", "margin", "score_chosen", "score_rejected")
)
"""Keys that a record may leave out."""
