"""Rows and what becomes of them, one case on each line of `cases/*.jsonl`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tuner.data.reading.examples import Conversation, Labelled, Pair, PlainText, PromptCompletion, Tokens

_CASES = Path(__file__).with_name("cases")


def cases(file: str, *keys: str, name: str = "name") -> list[Any]:
    """The values of these keys of each case, named by another one; an `example` as it is parsed."""
    found = [json.loads(line) for line in (_CASES / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()]
    named = [(str(case[name]) if name != "row" else " ".join(case["row"]), case) for case in found]
    return [
        pytest.param(*(example_of(case[key]) if key == "example" else case[key] for key in keys), id=each)
        for each, case in named
    ]


def example_of(value: dict[str, Any]) -> Any:
    """The example that a case writes down."""
    if "chosen" in value:
        return Pair(example_of(value["chosen"]), example_of(value["rejected"]), value.get("margin"))
    if "label" in value:
        return Labelled(example_of(value["example"]), value["label"])
    if "messages" in value:
        train = value.get("train", [None] * len(value["messages"]))
        return Conversation(value["messages"], train, value.get("tools"))
    if "input_ids" in value:
        return Tokens(value["input_ids"], value.get("trained"))
    return PlainText(**value) if "text" in value else PromptCompletion(**value)
