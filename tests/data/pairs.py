"""Rows that compare answers, and the specs that prepare them, for tests."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.data import tiny
from tuner.config.methods import Examples
from tuner.data.building.spec import PrepareSpec

PREFERENCE, UNPAIRED = Examples("preference", "last_assistant"), Examples("unpaired", "last_assistant")


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def rows(count: int, words: int = 6) -> list[dict[str, Any]]:
    """Pairs of every common form, of different lengths."""
    made: list[dict[str, Any]] = []
    for i in range(count):
        user, good, bad = f"question {i}", "yes " * (i % words + 1), "no " * (i * 5 % words + 1)
        forms: list[dict[str, Any]] = [
            {"prompt": user, "chosen": f" {good}", "rejected": f" {bad}"},
            {"prompt": [said("user", user)], "chosen": [said("assistant", good)], "rejected": [said("assistant", bad)]},
            {"chosen": [said("user", user), said("assistant", good)],
             "rejected": [said("user", user), said("assistant", bad)], "score_chosen": i, "score_rejected": 1.5},
            {"conversations": [{"from": "human", "value": user}], "chosen": {"from": "gpt", "value": good},
             "rejected": {"from": "gpt", "value": bad}, "system": "brief"},
            {"instruction": user, "input": "now", "chosen": good, "rejected": bad, "margin": 0.25},
        ]  # fmt: skip
        made.append(forms[i % len(forms)])
    return made


def spec(
    tmp_path: Path, written: Sequence[dict[str, Any]], examples: Examples = PREFERENCE, **data: Any
) -> PrepareSpec:
    """What prepares rows, which are written to a file."""
    path = tiny.write_rows(tmp_path / "rows.jsonl", written)
    built = tiny.request(tmp_path / "cache", data.pop("train", path), max_length=data.pop("max_length", 200), **data)
    return replace(built, examples=examples)
