"""The tools that scores of tasks are held to: what they make."""

import json
from pathlib import Path

from tools import eval_tasks
from tuner.evals.task import read_items


def test_two_of_the_tasks_are_made_without_the_network(tmp_path: Path) -> None:
    eval_tasks.make(tmp_path / "a", 320, sums=False)
    eval_tasks.make(tmp_path / "b", 320, sums=False)
    for name, kind in (("functions", "choice"), ("documentation", "text")):
        items = read_items(tmp_path / "a" / f"{name}.jsonl")
        assert (items.kind, len(items.items)) == (kind, 320) and len(set(items.ids)) == 320
        assert (tmp_path / "a" / f"{name}.jsonl").read_bytes() == (tmp_path / "b" / f"{name}.jsonl").read_bytes()
    assert json.loads((tmp_path / "a" / "made.json").read_text())["files"].keys() == {
        "functions.jsonl", "documentation.jsonl",
    }  # fmt: skip
