"""Whole configurations of other tools, imported: what the recipe says, what is named as lost, what is refused.

    python -m tools.advice.files [--verbose] [--plant]

`files.jsonl` was written from the other tools' documents by somebody who had not seen the answers: each line is a file,
the recipe's keys that it comes to, and the keys that have to be named because they cannot be kept; null where refusing
is the right answer. A file of a tool that `tuner import` does not read may be refused, too. Exits with 1 where one is
imported wrongly.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.advice.proposals import resolved, written
from tools.commands import asked, read_lines, workplace
from tuner.config.imported import import_text
from tuner.config.load import flatten, recipe_dict
from tuner.config.other_methods import PAIRS
from tuner.config.yaml import flow
from tuner.errors import RecipeError

TABLE = Path(__file__).resolve().parent / "files.jsonl"
READ = {"axolotl", "LLaMA-Factory", "TRL", "torchtune", "ms-swift", "unsloth", "ArcticTraining"}


class Found(NamedTuple):
    """What became of a file: right, refused (where its tool is not read), or wrong, and why."""

    name: str
    verdict: str
    why: str


def judged(row: Mapping[str, Any]) -> Found:
    """Import a file and hold the recipe against what is meant."""
    with workplace() as place:
        try:
            made = import_text(row["text"], row["name"], directory=place)
        except RecipeError as error:
            return Found(row["id"], *_refused(row, str(error)))
        except Exception as error:  # whatever it is: a file that cannot be read is an error of the recipe's kind
            return Found(row["id"], "wrong", repr(error))
    if row["meant"] is None:
        return Found(row["id"], "wrong", f"taken for {made.tool}'s: {row['why']}")
    values = flatten(recipe_dict(made.recipe))
    wanted = [row["meant"], *(one for one in row.get("also", ()) if one)]
    missing = [_missing(one, values, made.left) for one in wanted]
    why = min(missing, key=len)
    return Found(row["id"], "wrong" if why else "right", "; ".join(why))


def _refused(row: Mapping[str, Any], said: str) -> tuple[str, str]:
    if row["meant"] is None or any(one is None for one in row.get("also", ())):
        return "right", said
    return ("wrong" if row["tool"] in READ and not row["name"].endswith(".py") else "refused"), said


def _missing(meant: Mapping[str, Any], values: Mapping[str, Any], left: Sequence[str]) -> list[str]:
    """What of a file is not in the recipe, and what is neither there nor named as lost."""
    tree = written({"model": {"name_or_path": "owner/name"}, "data": {"train": ["rows.jsonl"]}}, {})
    is_pair = values["method.kind"] in PAIRS  # a row holds both answers, where others' lengths are of one
    wrong = []
    for key, value in meant["keys"].items():
        if "[" in key:
            name, _, rest = key.partition("[")
            place, _, inner = rest.partition("].")
            sources = values.get(name)
            here = sources[int(place)].get(inner) if isinstance(sources, list) and len(sources) > int(place) else None
            same = str(here).endswith(str(value).removeprefix("./"))
        else:
            here = _under(key, values)
            same = _same(key, here, value, tree) or (key == "data.max_length" and is_pair and here == 2 * value)
        if not same:
            wrong.append(f"{key}: {flow(here)}, meant is {flow(value)}")
    names = " ".join(left)
    return wrong + [f"{lost}: lost in silence" for lost in meant["lost"] if lost.rpartition(".")[2] not in names]


def _under(key: str, values: Mapping[str, Any]) -> Any:
    inner = {name.removeprefix(f"{key}."): value for name, value in values.items() if name.startswith(f"{key}.")}
    return inner or values.get(key)


def _same(key: str, here: Any, value: Any, tree: Mapping[str, Any]) -> bool:
    if here == value or (key == "data.packing" and value is True and here == "auto"):
        return True
    if key in {"output_dir", "model.name_or_path"}:
        return str(here).rstrip("/").endswith(str(value).removeprefix("./").rstrip("/"))
    if key.startswith(("method.", "adapter.", "optimizer.", "schedule.")) and not key.endswith(".kind"):
        return False
    try:
        return bool(resolved(written(tree, {key: value})).get(key) == here)
    except RecipeError:
        return False


def rows() -> list[dict[str, Any]]:
    """The table."""
    return read_lines(TABLE)


def main(words: Sequence[str] | None = None) -> int:
    """Say how many are right, and print those that are wrong."""
    options = asked(__doc__, {}, words, verbose=(False, "print what is said of those that are refused, too"))
    found = [judged(row) for row in rows()]
    for one in found:
        if one.verdict == "wrong" or options.verbose:
            print(f"{one.verdict} {one.name}: {one.why[:600]}")
    counts = Counter(one.verdict for one in found)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("right", "refused", "wrong")))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
