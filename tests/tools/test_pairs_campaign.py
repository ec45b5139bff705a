"""Mutated rows that compare answers are judged as the oracle judges them, and a product that is wrong is found."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.pair_oracle import judge
from tools.pairs_campaign import FAULTS, compare, rows
from tuner.data.encoding import encode
from tuner.data.reading import answers


@pytest.mark.parametrize("kind", ["preference", "unpaired"])
def test_mutated_rows_are_judged_alike_and_become_the_oracles_texts(kind: str, tmp_path: Path) -> None:
    found = compare(kind, list(rows(kind, 250, 7)), tmp_path)
    assert {fault: getattr(found, fault) for fault in FAULTS} == dict.fromkeys(FAULTS, 0), found.examples
    assert found.good > 100 and len(found.classes) >= 8


def always(value: Any) -> Callable[..., Any]:
    return lambda *_: value


@pytest.mark.slow(
    "tuner.data.encoding.encode-_equal_tokens-<lambda>",
    "tuner.data.reading.answers-_margin-<lambda>",
    "tuner.data.reading.answers-_says-<lambda>",
)
@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (encode, "_equal_tokens", lambda batch, counts: counts >= 0),
        (answers, "_says", always(True)),
        (answers, "_margin", always(1.0)),
        (answers, "_equal_messages", always(1)),
        (encode, "_margins", lambda examples: np.zeros(len(examples), np.float32)),
    ],
)
def test_a_wrong_product_is_found(
    module: Any, name: str, wrong: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    found = compare("preference", list(rows("preference", 300, 2)), tmp_path)
    assert sum(getattr(found, fault) for fault in FAULTS) > 0


def test_the_oracle_itself() -> None:
    said = [{"role": "assistant", "content": text} for text in "ab"]
    good = {"prompt": "q", "chosen": [said[0]], "rejected": [said[1]]}
    assert not judge(good, "preference").faults and len(judge(good, "preference").documents) == 2
    cases = [
        ({**good, "rejected": [said[0]]}, "equal"),
        ({**good, "rejected": "b"}, "kinds"),
        ({**good, "rejected": []}, "empty"),
        ({**good, "margin": "x"}, "margin"),
        ({**good, "prompt": None}, "no prompt"),
        ({**good, "image": "x"}, "media"),
        ({"messages": said}, "other method"),
    ]
    for row, fault in cases:
        assert fault in judge(json.loads(json.dumps(row)), "preference").faults
    assert judge({"prompt": "q", "completion": "a", "label": "yes"}, "unpaired").faults == {"label"}
