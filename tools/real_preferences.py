"""Real preference rows for comparisons with other tools: those that LLaMA-Factory ships with its source.

They are fetched when a comparison runs and are no part of this project.
"""

import json
from pathlib import Path
from typing import Any

from tools.import_campaign import PACKAGES, fetch

PACKAGE = "llamafactory==0.9.5"
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

Row = dict[str, Any]


def data_directory(sources: Path) -> Path:
    """Where the rows lie, fetched where they are not there yet."""
    fetch(sources, {PACKAGE: PACKAGES[PACKAGE]})
    return next(path for path in sources.glob("llamafactory-*/data") if path.is_dir())


def pairs(sources: Path) -> list[Row]:
    """600 pairs of answers, first the 300 in English, as messages under `prompt`, `chosen` and `rejected`."""
    directory = data_directory(sources)
    found = []
    for name in ("dpo_en_demo.json", "dpo_zh_demo.json"):
        for item in json.loads((directory / name).read_text(encoding="utf-8")):
            turns = [_message(turn) for turn in item["conversations"]]
            answers = {side: [_message(item[side])] for side in ("chosen", "rejected")}
            found.append({"prompt": turns, **answers})
    return found


def labelled(sources: Path) -> list[Row]:
    """300 answers with a label, as messages under `messages`."""
    return list(json.loads((data_directory(sources) / "kto_en_demo.json").read_text(encoding="utf-8")))


def shortest(rows: list[Row], count: int) -> list[Row]:
    """The rows with the fewest characters, in their own order."""
    order = sorted(range(len(rows)), key=lambda index: len(json.dumps(rows[index], ensure_ascii=False)))
    return [rows[index] for index in sorted(order[:count])]


def _message(turn: dict[str, str]) -> dict[str, str]:
    return {"role": ROLES[turn["from"]], "content": turn["value"]}
