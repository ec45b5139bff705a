"""Keys of other tools: what the recipe's error says of them, followed, and what `tuner import` makes of them.

    python -m tools.advice.keys [--verbose] [--plant] [--only WORD]

`foreign_keys.jsonl` was written from the other tools' documents by somebody who had not seen the answers. Each line is
a few keys with their values, and what they mean in a recipe (null: it has no counterpart). The lines that the errors
propose are written in place of these keys; the recipe that comes of that has to be the one that is meant. Where a key
has no counterpart, no line may be proposed. Then the same keys stand in a configuration of their tool, and the recipe
that `tuner import` makes has to differ from that without them by just what is meant.

An answer is right, or silent (nothing that can be written is proposed, and nothing is wrong), or wrong. Without a line,
a recipe that is the meant one only because that is the default is silent. Where a key has no counterpart, the answer
has to say so: a line or a key of ours in its place is wrong, and `unknown` with a list of keys is silent, as is an
import that drops what is needed without a word. Exits with 1 where one is wrong, or where one of `keys_right.txt` is
right no longer.
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tools.advice.proposals import differences, merged, proposed, resolved, without, written
from tools.commands import asked, read_lines, workplace
from tools.tables import beside
from tuner.config.check import check
from tuner.config.imported import import_text
from tuner.config.other_configs import Tool
from tuner.config.other_methods import PAIRS
from tuner.config.yaml import Problems, flow, read_yaml, tree_of
from tuner.errors import Problem, RecipeError

HERE = Path(__file__).resolve().parent
TABLE = HERE / "foreign_keys.jsonl"
RIGHT = HERE / "keys_right.txt"
"""What is answered rightly, one `way id` a line: none of it may be lost."""
BASE: dict[str, Any] = {
    "model": {"name_or_path": "owner/name"},
    "data": {"train": "rows.jsonl", "eval": "held.jsonl"},
}
Way = Literal["error", "import"]
Verdict = Literal["right", "silent", "wrong", "elsewhere"]
_TOOLS: dict[str, tuple[Tool, dict[str, Any]]] = {
    name: (tool["called"], tool["base"]) for name, tool in beside(__file__).items()
}
_NEEDED: tuple[dict[str, Any], ...] = ({"adapter.kind": "lora"}, {"train.gradient_checkpointing": "full"})
"""Of keys that are nothing without another one, what that is."""


@dataclass(frozen=True)
class Case:
    """Keys of another tool, and every recipe that they may mean; none where they have no counterpart."""

    name: str
    tool: str
    given: dict[str, Any]
    meant: tuple[dict[str, Any], ...]
    script: str | None
    form: str | None
    in_recipe: tuple[dict[str, Any], ...] = ()
    """What they may mean too where they stand in a recipe, which says less than a configuration of their tool."""
    in_tool: tuple[dict[str, Any], ...] = ()
    """The same where they stand in a configuration of their tool, whose defaults count."""


@dataclass(frozen=True)
class Answer:
    """What was said of a case, and whether that is right."""

    case: Case
    way: Way
    verdict: Verdict
    said: str
    came: str = ""

    @property
    def key(self) -> str:
        """Its line in the list of those that are right."""
        return f"{self.way} {self.case.name}"


def cases() -> list[Case]:
    """The table."""
    found = []
    for row in read_lines(TABLE):
        meant = () if row["meant"] is None else (row["meant"],)
        also = tuple(other for other in row.get("also", ()) if other is not None)
        form = row.get("form")
        found.append(Case(row["id"], row["tool"], _read(row["yaml"], form), meant + also, row.get("script"), form,
                          tuple(row.get("in_recipe", ())), tuple(row.get("in_tool", ()))))  # fmt: skip
    return found


def _read(text: str, form: str | None) -> dict[str, Any]:
    if form == "toml":
        import tomllib

        return tomllib.loads(text)
    problems = Problems()
    tree = read_yaml(text, "case", Path(), problems)
    assert not problems.found, (text, problems.found)
    plain = tree.plain()
    assert isinstance(plain, dict)
    return plain


def problems_of(tree: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with a recipe."""
    problems = Problems()
    check(tree_of(tree, "recipe", Path()), problems)
    return list(problems.found)


def by_error(case: Case) -> Answer:
    """Follow what the errors say of the keys in a recipe, and hold the recipe against the meant ones."""
    tree = merged(BASE, case.given)
    try:
        problems = problems_of(tree)
    except Exception as error:  # whatever it is: a recipe's error says what is wrong
        return Answer(case, "error", "wrong", repr(error))
    said = " / ".join(f"{problem.key}: {problem.message}" for problem in problems)
    lines: dict[str, Any] = {}
    try:
        for problem in problems:
            found = _proposed(problem)
            against = [key for key, value in found.items() if key in lines and lines[key] not in (value, ...)]
            if against and not any(isinstance(found[key], tuple) for key in against):
                return Answer(case, "error", "wrong", said, f"two answers contradict each other: {against}")
            lines |= {key: value for key, value in found.items() if not isinstance(value, tuple)}
            lines = {key: value[0] for key, value in found.items() if isinstance(value, tuple)} | lines
    except ValueError as error:
        return Answer(case, "error", "wrong", said, str(error))
    for problem in problems:
        value = _at(tree, problem.key)
        lines = {key: value if line is ... else line for key, line in lines.items()}
        if not problem.message.startswith("not with kind"):  # the key stays, its section's kind is another one
            tree = without(tree, problem.key)
    try:
        values = resolved(written(merged(BASE, tree), lines))
    except RecipeError as error:
        return Answer(case, "error", "wrong" if lines else "silent", said, str(error.problems[0]))
    return _judged(case, "error", said, values, resolved(BASE), bool(lines))


def _proposed(problem: Problem) -> dict[str, Any]:
    return proposed(problem.message, problem.key)


_NO_LINE = ("is a guess", "not supported", "not needed", "has no counterpart", "leave it out", "a hook of your own")
_A_LINE = re.compile(r"\bwrite \b|\bdid you mean |its counterpart here is |; here it is ")
_ONLY_UNKNOWN = re.compile(r"[\w.]+: (?:unknown; [\w. ]+ has [a-z_]+, |got .*allowed: )")


def _of_none(said: str, is_line: bool) -> Verdict:
    """The verdict on an answer to keys that have no counterpart: a line is wrong, whatever it changes."""
    if any(word in said for word in _NO_LINE):
        return "right"
    if is_line or _A_LINE.search(said):
        return "wrong"
    return "silent" if all(_ONLY_UNKNOWN.match(part) for part in said.split(" / ") if part) else "right"


def _judged(
    case: Case, way: Way, said: str, values: Mapping[str, Any], base: Mapping[str, Any], is_line: bool
) -> Answer:
    changed = dict(differences(values, base))
    came = ", ".join(f"{key}: {flow(value)}" for key, value in changed.items())
    if not case.meant:
        return Answer(case, way, _of_none(said, is_line), said, came)
    wanted = [dict(differences(one, base)) for one in _meant(case, BASE, case.in_recipe)]
    assert wanted, f"{case.name}: what is meant is no recipe"
    if changed in wanted and (is_line or changed or not said or {} in case.meant + case.in_recipe):
        return Answer(case, way, "right", said, came)
    is_part = any(changed.items() <= one.items() for one in wanted)
    return Answer(case, way, "silent" if not is_line or is_part else "wrong", said, came)


def _meant(case: Case, base: Mapping[str, Any], more: tuple[dict[str, Any], ...] = ()) -> list[dict[str, Any]]:
    """What is meant, as the recipe resolves it, with what some keys need beside them."""
    found = []
    for one in case.meant + more:
        for needed in ({}, *_NEEDED):
            try:
                found.append(resolved(written(base, needed | one)))
                break
            except RecipeError:
                continue
    return found


def _at(tree: Any, key: str) -> Any:
    for part in key.split(".") if key else ():
        tree = tree[int(part)] if isinstance(tree, list) else tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def by_import(case: Case) -> Answer:
    """Import the keys in a configuration of their tool, and hold the recipe against that without them."""
    if case.tool not in _TOOLS:
        return Answer(case, "import", "elsewhere", "")
    tool, base = _TOOLS[case.tool]
    try:
        plain, _, text = _imported(flow({**base}), tool, case.script)
        values, left, _ = _imported(flow({**base, **case.given}), tool, case.script)
    except RecipeError as error:
        return Answer(case, "import", "silent" if case.meant else "right", str(error))
    except Exception as error:
        return Answer(case, "import", "wrong", repr(error))
    said = " / ".join(left)
    wanted = _meant(case, _in_pairs(case, text, plain), case.in_tool) or [plain]
    changed = dict(differences(values, plain))
    came = ", ".join(f"{key}: {flow(value)}" for key, value in changed.items())
    if not case.meant and (left or not case.in_tool):
        is_needless = not left and "not needed" in by_error(case).said
        return Answer(case, "import", "right" if is_needless else _of_none(said, bool(changed)), said, came)
    if values in wanted:
        return Answer(case, "import", "right", said, came)
    parts = [dict(differences(one, plain)) for one in wanted]
    is_part = bool(left) and any(changed.items() <= one.items() for one in parts)
    return Answer(case, "import", "silent" if is_part else "wrong", said, came)


def _in_pairs(case: Case, text: dict[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of a tool's configuration, with twice the length where pairs are learned from: a row holds both."""
    kinds = {one.get("method.kind") for one in case.meant}
    length = plain["data.max_length"]
    if kinds & PAIRS and not isinstance(length, str) and "data.max_length" not in case.meant[0] and not case.script:
        return written(text, {"data.max_length": 2 * length})
    return text


@cache
def _imported(text: str, tool: Tool, script: str | None) -> tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]:
    if script is None:
        found = import_text(text, "case.yaml", tool)
    else:
        with workplace() as place:
            (place / "case.yaml").write_text(text, encoding="utf-8")
            found = import_text(f"python {script}.py --config case.yaml", "case.sh", directory=place)
    tree = _read(found.text, None)
    return resolved(tree), found.left, tree


def answers(only: str = "") -> list[Answer]:
    """Every answer, by both ways."""
    chosen = [case for case in cases() if only in case.name]
    return [way(case) for case in chosen for way in (by_error, by_import)]


def lost(found: Sequence[Answer]) -> list[str]:
    """What was answered rightly and is not any more."""
    right = {answer.key for answer in found if answer.verdict == "right"}
    known = {answer.key for answer in found}
    return [line for line in RIGHT.read_text(encoding="utf-8").splitlines() if line in known - right]


def main(words: Sequence[str] | None = None) -> int:
    """Say how many are right, and print the others."""
    options = asked(
        __doc__, {}, words, only=("", "cases whose name has this"), verbose=(False, "print what is silent, too"),
        plant=(False, "plant wrong answers, each of which has to be found"), keep=(False, "write down what is right"),
    )
    if options.plant:
        from tools.advice.planted_keys import found_planted

        return found_planted()
    found = answers(options.only)
    for answer in found:
        if answer.verdict == "wrong" or (options.verbose and answer.verdict == "silent"):
            meant = " | ".join(flow(one) for one in answer.case.meant) or "no counterpart"
            print(f"{answer.verdict} {answer.way} {answer.case.name}\n  given  {flow(answer.case.given)}\n"
                  f"  meant  {meant}\n  said   {answer.said[:400]}\n  came   {answer.came[:300]}")  # fmt: skip
    if options.keep:
        right = sorted({answer.key for answer in found if answer.verdict == "right"})
        RIGHT.write_text("".join(f"{line}\n" for line in right), encoding="utf-8")
    for way in ("error", "import"):
        counts = Counter(answer.verdict for answer in found if answer.way == way)
        print(f"{way}: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("right", "silent", "wrong")))
    gone = lost(found) if RIGHT.exists() else []
    print("\n".join(f"lost: {line}" for line in gone))
    return int(any(answer.verdict == "wrong" for answer in found) or bool(gone))


if __name__ == "__main__":
    sys.exit(main())
