"""A first recipe for somebody's own rows: YAML with a comment on each line, from what a look at the rows found.

`starter.yaml.jinja` is what it is made from.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, Template

from tuner.config.methods import ExampleKind
from tuner.config.yaml import flow, one_line
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
_COMMENT = "\x1f"
"""What parts a line from the comment on it, which nobody's names hold."""
ROOM_FOR_WEIGHTS = 0.8
"""The share of the memory that these may take. `tuner profile` says what a recipe really takes."""


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
    gb = (seen.parameters or 0) / 1e9
    lines = _template().render(
        seen=seen, room=room, model=flow(model), source=_source(data, seen),
        rows=f"{counted(seen)}: {seen.form}{not_used(seen)}", bad_rows=bad_rows(seen),
        first_bad=one_line(seen.first_bad), billions=gb, trained_gb=TRAINED_BYTES * gb, frozen_gb=FROZEN_BYTES * gb,
        is_large=room.lacks(TRAINED_BYTES * gb * 1e9), is_quantized=room.lacks(FROZEN_BYTES * gb * 1e9),
        fewest_to_split=FEWEST_TO_SPLIT, longest_pretrain=LONGEST_PRETRAIN, few_steps=FEW_STEPS,
    )
    split = [line.partition(_COMMENT)[::2] for line in lines.strip("\n").split("\n")]
    width = max(len(text) for text, _ in split if len(text) <= WIDEST)
    return "\n".join(f"{text.ljust(width)}  # {note}" if note else text for text, note in split) + "\n"


def _template() -> Template:
    source = Path(__file__).with_name("starter.yaml.jinja").read_text(encoding="utf-8")
    made = Environment(line_statement_prefix="%", autoescape=False)
    made.filters["n"] = "{:,}".format
    return made.from_string(source.replace(" ## ", _COMMENT))


def _source(data: str, seen: Look) -> str:
    if seen.format == "auto" and not seen.columns:
        return flow(data)
    form = {} if seen.format == "auto" else {"format": seen.format}
    return flow({"path": data, **form, **({"columns": dict(seen.columns)} if seen.columns else {})})


def bad_rows(seen: Look) -> str:
    """How many rows are bad: `1 row cannot be read`."""
    least = "" if seen.are_bad_counted else "at least "
    return f"{least}{seen.bad:,} row{' cannot' if seen.bad == 1 else 's cannot'} be read"


def counted(seen: Look) -> str:
    """How many records there are: `1 record`, `about 4,800 records`."""
    return f"{'' if seen.is_all else 'about '}{seen.rows:,} record{'' if seen.rows == 1 else 's'}"


def not_used(seen: Look) -> str:
    """The keys whose text is not read: `; not used: context`, or nothing."""
    names = ", ".join(name if name.isprintable() else repr(name) for name in seen.unused)
    return f"; not used: {names}" if names else ""
