"""A first recipe for somebody's own rows: YAML with a comment on each line, from what a look at the rows found."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.config.dump import flow, one_line
from tuner.config.methods import ExampleKind
from tuner.errors import RecipeError

FEWEST_TO_SPLIT = 50
"""With fewer rows 2% is less than one of them."""
WIDEST = 40
"""Comments stand in one column after lines of at most so many characters."""
FEW_STEPS = 50
"""Fewer optimizer steps than this teach a model little."""
TRAINED_BYTES, FROZEN_BYTES = 16, 2
"""Of each weight: in training, by AdamW in float32 with its gradient; and under an adapter, in bf16."""
LONGEST_PRETRAIN = 2048
"""Longer rows are chosen for plain text by nobody but its owner."""
ROOM_FOR_WEIGHTS = 0.8
"""The share of the memory that these may take. `tuner profile` says what a recipe really takes."""


_METHODS = {"sft": "sft", "pretrain": "pretrain", "preference": "dpo", "unpaired": "kto"}
"""The method that learns from records of a kind."""


@dataclass(frozen=True)
class Look:
    """What the rows of a source are, and the lengths and sizes that suit them."""

    form: str
    rows: int
    is_all: bool
    """Whether all rows were read: else `rows` and what follows from it are estimates."""
    kind: ExampleKind
    """What they are examples of: pretrain for plain text."""
    columns: Mapping[str, str]
    """Where our keys are in a row, where they have other names."""
    format: str
    """The form of the rows where it has to be named, else auto."""
    unused: tuple[str, ...]
    """Keys whose text is neither trained on nor shown to the model."""
    bad: int
    """Rows that cannot be used."""
    first_bad: str
    """The place of the first of them and what is wrong with it."""
    are_bad_counted: bool
    """Whether these are all: else there may be more."""
    nothing_learned: int
    """Rows of which no token would be trained, and which are left out."""
    repeats: bool
    """Whether most rows are the same as others."""
    template: str
    """The chat template that the rows need; empty for the model's own, or for none."""
    why_template: str
    """What the model's own leaves out; empty where it has none."""
    by_tokenizer: bool
    """Whether tokens were counted with the model's tokenizer: else they are estimated from characters."""
    is_counted: bool
    """Whether every document was: else lengths are those of a sample, and by its tokens for each character."""
    longest: int
    """Tokens of the longest document."""
    longer: int
    """Documents that are longer than a row."""
    longer_tokens: float
    """The share of the tokens that they hold."""
    truncates: bool
    """Whether these are cut: else they are dropped, or split where they are plain text."""
    max_length: int
    packed_rows: int
    epochs: int
    global_batch_size: int
    parameters: int | None
    """Of the model, where its weights are on this machine."""

    @property
    def pretrain(self) -> bool:
        """Whether they are plain text."""
        return self.kind == "pretrain"

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * math.ceil(self.packed_rows / self.global_batch_size)


@dataclass(frozen=True)
class Room:
    """The memory that a training has."""

    what: str
    """Whose it is: `this machine`."""
    bytes: int

    def lacks(self, needed: float) -> bool:
        """Whether so many bytes leave too little for everything else."""
        return needed > ROOM_FOR_WEIGHTS * self.bytes


def starter(model: str, data: str, seen: Look, room: Room) -> str:
    """Return the commented recipe; `data` is written as it is given, so it should suit where the recipe will lie."""
    if not model.strip() or not model.isprintable():
        raise RecipeError(f"got {model!r}; -m takes a hub name or a local directory")
    lines = [
        ("model:", ""),
        (f"  name_or_path: {flow(model)}", "hub name or local directory"),
        *_quantize(seen, room),
        *_template(seen),
        ("method:", ""),
        (f"  kind: {_METHODS[seen.kind]}", _method(seen)),
        ("data:", ""),
        (f"  train: {_source(data, seen)}", _rows(seen)),
        *_bad_rows(seen),
        _held_out(seen),
        (f"  max_length: {seen.max_length}", _length(seen)),
        *_too_long(seen),
        ("train:", ""),
        (f"  duration: {seen.epochs} epoch{'s' if seen.epochs > 1 else ''}", _duration(seen)),
        (f"  global_batch_size: {seen.global_batch_size}", _batch(seen)),
        ("  micro_batch_size: auto", "packed rows at once: on a GPU as many as fit and pay, by prediction"),
        _adapter(seen, room),
        _optimizer(seen, _is_large(seen, room)),
    ]
    width = max(len(text) for text, _ in lines if len(text) <= WIDEST)
    return "\n".join(f"{text.ljust(width)}  # {note}" if note else text for text, note in lines) + "\n"


def _is_large(seen: Look, room: Room) -> bool:
    """Whether the model is too large for the machine to train all of it."""
    return seen.parameters is not None and room.lacks(TRAINED_BYTES * seen.parameters)


def _quantize(seen: Look, room: Room) -> list[tuple[str, str]]:
    if seen.parameters is None or not room.lacks(FROZEN_BYTES * seen.parameters):
        return []
    size = f"{FROZEN_BYTES * seen.parameters / 1e9:,.0f} GB"
    return [("  quantize: nf4", f"4 bits a weight under the adapter: in bf16 they would take about {size}")]


def _adapter(seen: Look, room: Room) -> tuple[str, str]:
    line = "adapter: {kind: lora, r: 16}"
    if not _is_large(seen, room):
        faster = "; the reference then needs no pass of its own" if seen.kind in {"preference", "unpaired"} else ""
        return f"# {line}", f"a small adapter instead of all weights{faster}"
    assert seen.parameters is not None
    billions = seen.parameters / 1e9
    needed = f"to train all {billions:,.1f} billion weights takes about {TRAINED_BYTES * billions:,.0f} GB"
    return line, f"{needed}, and {room.what} has {room.bytes / 1e9:,.0f}: an adapter leaves them as they are"


def _template(seen: Look) -> list[tuple[str, str]]:
    if not seen.template:
        return []
    lost = f"the model's own leaves something out: {seen.why_template}"
    why = lost if seen.why_template else "the tokenizer has none"
    note = f"{why}; or llama3, qwen, gemma, ..., or the path of a jinja file"
    return [("tokenizer:", ""), (f"  chat_template: {seen.template}", note)]


def _held_out(seen: Look) -> tuple[str, str]:
    if seen.rows >= FEWEST_TO_SPLIT and not seen.repeats:
        return "  eval: 2%", "held out, never trained on; or a file"
    why = "too few here" if seen.rows < FEWEST_TO_SPLIT else "too many here that are the same"
    return "  # eval: held_out.jsonl", f"records never trained on; there are {why} to split some off"


def _method(seen: Look) -> str:
    if seen.pretrain:
        return f"{seen.form} records: every token is learned"
    if seen.kind == "preference":
        return "preference records: which of two answers is preferred is learned"
    if seen.kind == "unpaired":
        return "labelled records: which answers are wanted is learned"
    plain = ", without a chat template" if seen.form == "prompt_completion" else ""
    return f"{seen.form} records: the answers are learned{plain}"


def _optimizer(seen: Look, is_adapted: bool) -> tuple[str, str]:
    if seen.kind in {"preference", "unpaired"}:
        if is_adapted:
            return "optimizer: {lr: 1e-5}", "far smaller than for sft; about 1e-6 without an adapter"
        return "optimizer: {lr: 1e-6}", "far smaller than for sft; about 1e-5 with an adapter"
    return "# optimizer: {lr: 1e-4}", "auto suits the model's size; tuner config show prints the rest"


def _source(data: str, seen: Look) -> str:
    if seen.format == "auto" and not seen.columns:
        return flow(data)
    form = {} if seen.format == "auto" else {"format": seen.format}
    return flow({"path": data, **form, **({"columns": dict(seen.columns)} if seen.columns else {})})


def _bad_rows(seen: Look) -> list[tuple[str, str]]:
    if not seen.bad:
        return []
    must = f"{bad_rows(seen)} and must be fixed, or left out so; the first: {one_line(seen.first_bad)}"
    return [("  # on_bad_row: skip", must)]


def bad_rows(seen: Look) -> str:
    """How many rows are bad: `1 row cannot be read`."""
    least = "" if seen.are_bad_counted else "at least "
    return f"{least}{seen.bad:,} row{' cannot' if seen.bad == 1 else 's cannot'} be read"


def _rows(seen: Look) -> str:
    nothing = f"; {seen.nothing_learned:,} with nothing to learn, left out" if seen.nothing_learned else ""
    return f"{counted(seen)}: {seen.form}{not_used(seen)}{nothing}"


def counted(seen: Look) -> str:
    """How many records there are: `1 record`, `about 4,800 records`."""
    return f"{'' if seen.is_all else 'about '}{seen.rows:,} record{'' if seen.rows == 1 else 's'}"


def not_used(seen: Look) -> str:
    """The keys whose text is not read: `; not used: context`, or nothing."""
    names = ", ".join(name if name.isprintable() else repr(name) for name in seen.unused)
    return f"; not used: {names}" if names else ""


def _length(seen: Look) -> str:
    how = "by the model's tokenizer" if seen.by_tokenizer else "estimated from characters"
    about = "about " if seen.by_tokenizer and not seen.is_counted else ""
    note = f"tokens of a packed row; longest {_unit(seen)}: {about}{seen.longest:,} ({how})"
    if not seen.longer:
        return note
    fate = "split" if seen.pretrain else "cut" if seen.truncates else "dropped: see data.too_long"
    why = ": longer rows would be too few" if seen.pretrain and seen.max_length < LONGEST_PRETRAIN else ""
    longer = f"{seen.longer:,} {_unit(seen)}{'' if seen.longer == 1 else 's'}"
    are = "is" if seen.longer == 1 else "are"
    return f"{note}; {about}{longer} ({seen.longer_tokens:.1%} of the tokens) {are} longer and {fate}{why}"


def _too_long(seen: Look) -> list[tuple[str, str]]:
    if not seen.truncates:
        return []
    return [("  too_long: truncate", f"the model has no more positions, and most {_unit(seen)}s are longer")]


def _unit(seen: Look) -> str:
    return "pair" if seen.kind == "preference" else "document"


def _duration(seen: Look) -> str:
    return "or 500 steps, 2B tokens" if seen.epochs == 1 else "few records: each is seen several times; or 500 steps"


def _batch(seen: Look) -> str:
    epochs = f" x {seen.epochs} epochs" if seen.epochs > 1 else ""
    rows = f"{seen.packed_rows:,} row{'' if seen.packed_rows == 1 else 's'}{epochs}"
    note = f"packed rows per step: about {rows} / {seen.global_batch_size}"
    few = ", which is few: more data or epochs would help" if seen.steps < FEW_STEPS else ""
    return f"{note} = {seen.steps:,} step{'' if seen.steps == 1 else 's'}{few}"
