"""How the recipe's errors answer 136 mistakes: exit code 2, the right place, and the line to write.

python -m tools.mistakes [--verbose]

The table, `tools/mistakes.jsonl`, was written before the messages were read: keys and values of TRL, axolotl,
LLaMA-Factory, torchtune, ms-swift and Unsloth, and mistakes with keys of our own.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tools.commands import ROOT, asked
from tuner.config.load import Override, RecipeText, load_recipe
from tuner.errors import RecipeError

TABLE = ROOT / "tools" / "mistakes.jsonl"
BASE = "model: {name_or_path: owner/name}\ndata: {train: rows.jsonl}\n"
TARGET = 0.95


@dataclass(frozen=True)
class Mistake:
    """A recipe or flags with one mistake, where it is, and what the error must tell the user to write."""

    tool: str
    text: str
    flags: tuple[str, ...]
    at: str
    write: str


@dataclass(frozen=True)
class Answer:
    """What the error said, and whether that is enough."""

    mistake: Mistake
    exits_2: bool
    in_place: bool
    names_line: bool
    said: str

    @property
    def right(self) -> bool:
        """Whether it exits with 2, at the right place, with the line to write."""
        return self.exits_2 and self.in_place and self.names_line


def mistakes() -> list[Mistake]:
    """The table."""
    rows = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
    return [
        Mistake(
            row["from"],
            row.get("recipe", f"{BASE}{row['adds']}\n" if "adds" in row else BASE),
            tuple(row.get("flags", ())),
            row["at"],
            row["write"],
        )
        for row in rows
    ]


def answer(mistake: Mistake) -> Answer:
    """Load the recipe as a command does, and look at the problems it has."""
    flags = [Override(mistake.flags[0].lstrip("-"), mistake.flags[1])] if mistake.flags else []
    try:
        load_recipe(RecipeText(mistake.text, "r.yaml"), flags)
    except RecipeError as error:
        here = [str(one) for one in error.problems if _where(str(one), mistake.at)]
        text = " / ".join(here or map(str, error.problems))
        return Answer(mistake, error.exit_code == 2, bool(here), any(mistake.write in line for line in here), text)
    return Answer(mistake, False, False, False, "loads")


def _where(line: str, at: str) -> bool:
    return line.startswith((f"r.yaml:{at}  ", f"{at} ", f"{at}  "))


def main(words: Sequence[str] | None = None) -> int:
    """Print how many answers are right, by tool, and those that are not; 1 below the target."""
    verbose = asked(__doc__, {}, words, verbose=(False, "print every answer")).verbose
    answers = [answer(mistake) for mistake in mistakes()]
    for one in answers:
        if verbose or not one.right:
            faults = [name for name in ("exits_2", "in_place", "names_line") if not getattr(one, name)]
            text = " ".join(one.mistake.flags) or one.mistake.text.removeprefix(BASE).strip().replace("\n", " | ")
            print(f"{'ok  ' if one.right else 'miss'} {one.mistake.tool}: {text}\n     {one.said}")
            if faults:
                print(f"     not: {', '.join(faults)}; wanted {one.mistake.at}  {one.mistake.write}")
    right, total = (
        Counter(one.mistake.tool for one in answers if one.right),
        Counter(one.mistake.tool for one in answers),
    )
    for tool, count in total.items():
        print(f"{tool:14} {right[tool]:3} of {count}")
    for name in ("exits_2", "in_place", "names_line"):
        print(f"{name:14} {sum(getattr(one, name) for one in answers):3} of {len(answers)}")
    share = sum(right.values()) / len(answers)
    print(f"{'right':14} {sum(right.values()):3} of {len(answers)} ({share:.1%})")
    return 0 if share >= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
