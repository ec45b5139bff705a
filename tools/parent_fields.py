"""Every field of the four frameworks that tuner descends from: its counterpart here, or why there is none.

    python -m tools.parent_fields [--missing]

`parents/NAME.yaml` has an entry for each field of NAME's configuration, by its class: lines of a recipe (`write`), a
command (`run`), or a reason of one of a few kinds (:data:`REASONS`). Every recipe is checked. `docs/how-to/from-*.md`
are made of them. Prints what is missing, or how many there are of each kind; exits with 1 where a recipe is refused.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tools.advice.keys import BASE, problems_of
from tools.advice.proposals import written
from tools.commands import asked
from tuner.config.yaml import Problems, flow, read_yaml

HERE = Path(__file__).with_name("parents")
TITLES = {
    "arctictraining": "ArcticTraining", "xtuner_v1": "XTuner V1", "olmo_core": "OLMo-core", "recis": "RecIS",
}  # fmt: skip
REASONS = {
    "framework": "a mechanism of that framework, which nothing here asks for",
    "hardware": "for hardware or inputs that tuner does not have",
    "chosen": "chosen by tuner, from data, model and device",
    "out": "left out, as [What tuner does not do](../not-supported.md) says", "missing": "not there yet",
}


@dataclass(frozen=True)
class Answer:
    """What becomes of a field of another framework, by its class and name."""

    field: str
    says: str
    write: Mapping[str, Any] | None = None
    run: str | None = None
    reason: str | None = None

    @property
    def kind(self) -> str:
        """What the answer is: a recipe's lines, a command, nothing at all to write, or the kind of a reason."""
        return self.reason or ("run" if self.run is not None else "write" if self.write else "same")

    @property
    def shown(self) -> str:
        """What stands in the page's second column."""
        if self.reason is not None:
            return "-"
        if self.run is not None:
            return f"`{self.run}`"
        return ", ".join(f"`{key}: {flow(value)}`" for key, value in (self.write or {}).items()) or "as it is"


@cache
def answers(name: str) -> tuple[Answer, ...]:
    """The table of one framework. Raises ValueError for an entry that is none."""
    problems = Problems()
    path = HERE / f"{name}.yaml"
    table = read_yaml(path.read_text(encoding="utf-8"), path.name, HERE, problems).plain()
    if problems.found or not isinstance(table, dict):
        raise ValueError(f"{path}: {problems.found}")
    found = []
    for field, entry in table.items():
        answer = Answer(field, **entry)
        if [answer.write is None, answer.run is None, answer.reason is None].count(False) != 1 or not answer.says:
            raise ValueError(f"{path}: {field} has to have one of write, run and reason")
        if answer.reason is not None and answer.reason not in REASONS:
            raise ValueError(f"{path}: {field} has no kind of reason: {answer.reason}")
        found.append(answer)
    return tuple(found)


def refused(answer: Answer) -> str:
    """What is wrong with a recipe that has the lines of an answer; empty where nothing is, or where it has none."""
    problems = problems_of(written(BASE, dict(answer.write or {})))
    return "; ".join(f"{problem.key}: {problem.message}" for problem in problems)


def page(name: str) -> str:
    """The page for people who come from a framework."""
    title, head = TITLES[name], (HERE / f"{name}.md").read_text(encoding="utf-8")
    parts = [f"# Coming from {title}\n\n{head.rstrip()}\n"]
    for kind in dict.fromkeys(answer.field.rpartition(".")[0] for answer in answers(name)):
        parts.append(f"## {kind}\n\n| field | here | |\n| --- | --- | --- |")
        own = (answer for answer in answers(name) if answer.field.rpartition(".")[0] == kind)
        parts[-1] += (
            "".join(f"\n| `{one.field.rpartition('.')[2]}` | {_cell(one.shown)} | {_cell(_said(one))} |" for one in own)
            + "\n"
        )
    return "\n".join(parts)


def _said(answer: Answer) -> str:
    return answer.says if answer.reason is None else f"{answer.says.rstrip('.')} ({REASONS[answer.reason]})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Print what there is, or what is missing."""
    wants_missing, bad = asked(__doc__, missing=False).missing, 0
    for name, title in TITLES.items():
        found = answers(name)
        print(f"{title}: {len(found)} fields, {dict(Counter(answer.kind for answer in found))}")
        for answer in found:
            if wants_missing and answer.reason == "missing":
                print(f"  {answer.field}: {answer.says}")
            if problem := refused(answer):
                bad += 1
                print(f"  {answer.field}: {problem}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
