"""What commands say of their arguments, and of what they read and write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.advice.hint_place import Case
from tools.advice.hint_words import RUN, Way

EXPORT = "runs/r/exports/step-2"
SCORE = "eval runs/r --tasks {}.jsonl --output {}"


def of_run(site: str, words: str, *meant: Way, **more: Any) -> Case:
    """What a command says of a finished run."""
    return Case(f"cli/{site}", {}, meant, **{"start": "run", "words": words, **more})


def command(*lines: str) -> Way:
    """A way that is commands alone."""
    return {RUN: [*lines]}


def empty(place: Path) -> None:
    """A directory of nothing, and one of no results."""
    (place / "empty").mkdir()
    (place / "tasks").mkdir()
    (place / "tasks/t.jsonl").write_text((place / "t.jsonl").read_text())


RECIPES = (
    of_run("command.py:_source", "config check", command(f"init -m {EXPORT} -d rows.jsonl > recipe.yaml"),
        start="exported", reading={"MODEL": EXPORT, "FILE": "rows.jsonl", "   or see: tuner recipes list": ""}),
    of_run("command.py:_source", "config check", command("recipes list"), start="model", instead=True,
        reading={"write one with: tuner init -m MODEL -d FILE > recipe.yaml": ""}),
    of_run("named.py:_run_of", "runs show r.yaml", command("train r.yaml"), start="model"),
)  # fmt: skip
RESULTS = (
    of_run("compare.py:compare", "compare a a --level 2", {"--level": "0.95"}, start="scored"),
    of_run("compare.py:results_of", "compare runs/r b", command(SCORE.format("u", "d"), "compare d b"),
        start="scored", reading={"FILE": "u.jsonl", "DIR": "d", "OTHER": "b"}, instead=True),
    Case("evals/compare.py:compare", {}, (command(SCORE.format("u", "a")),), "compare a b", "scored",
        reading={"MODEL": "runs/r", "FILE": "u.jsonl", "DIR": "a"}),
    Case("evals/compare.py:read_task_results", {}, (command(SCORE.format("u", "empty")),), "compare empty b", "scored",
        change=empty, reading={"MODEL": "runs/r", "FILE": "u.jsonl", "DIR": "empty"}),
    Case("evals/figures.py:read_results", {}, (command("compare a a"),), "compare a tasks", "scored",
        change=empty, reading={"what tuner eval --output wrote": "tuner compare a a"}, instead=True),
)  # fmt: skip
CASES = (*RECIPES, *RESULTS)
