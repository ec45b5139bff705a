"""The demo's task: an order written in many wordings becomes one JSON object. Everything follows from a seed.

Names of the held-out messages never occur in training; the second held-out set uses other wordings too. The rows to
train on, for the tutorial:

    python -m tools.demo.task [COUNT] > orders.jsonl
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.tables import beside

SEED = 7
TRAIN_ROWS = 1500
HELD_OUT_ROWS = 50
FIELDS = ("name", "city", "item", "quantity", "total_usd")
INSTRUCTION = f"Answer with one JSON object with the keys {', '.join(FIELDS)}."

_TABLE: dict[str, Any] = beside(__file__)
FIRST_NAMES, LAST_NAMES = _TABLE["first_names"], _TABLE["last_names"]
UNSEEN_FIRST_NAMES, UNSEEN_LAST_NAMES = _TABLE["unseen_first_names"], _TABLE["unseen_last_names"]
CITIES, WORDINGS, UNSEEN_WORDINGS = _TABLE["cities"], _TABLE["wordings"], _TABLE["unseen_wordings"]
ITEMS: dict[str, str] = _TABLE["items"]

Row = dict[str, Any]


def row(rng: random.Random, firsts: Sequence[str], lasts: Sequence[str], wordings: Sequence[str]) -> Row:
    """One row in the messages format: instruction, order, and the object that the model shall answer with."""
    item = rng.choice(sorted(ITEMS))
    values = {
        "name": f"{rng.choice(firsts)} {rng.choice(lasts)}", "city": rng.choice(CITIES), "item": item,
        "quantity": rng.randint(2, 40), "total_usd": rng.randint(10, 990),
    }
    text = rng.choice(wordings).format(
        name=values["name"], city=values["city"], items=ITEMS[item], quantity=values["quantity"],
        total=values["total_usd"],
    )
    return {
        "messages": [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": text},
            {"role": "assistant", "content": json.dumps(values)},
        ]
    }


def rows(part: str, count: int, firsts: Sequence[str], lasts: Sequence[str], wordings: Sequence[str]) -> list[Row]:
    """`count` rows with different messages, drawn from a stream of their own."""
    rng = random.Random(f"{SEED}/{part}")
    made: dict[str, Row] = {}
    while len(made) < count:
        drawn = row(rng, firsts, lasts, wordings)
        made.setdefault(drawn["messages"][1]["content"], drawn)
    return list(made.values())


def train_rows() -> list[Row]:
    """The rows to train on."""
    return rows("train", TRAIN_ROWS, FIRST_NAMES, LAST_NAMES, WORDINGS)


def held_out() -> dict[str, list[Row]]:
    """The two held-out sets: names never seen, and neither names nor wordings ever seen."""
    return {
        "unseen names": rows("names", HELD_OUT_ROWS, UNSEEN_FIRST_NAMES, UNSEEN_LAST_NAMES, WORDINGS),
        "unseen names and wordings": rows(
            "wordings", HELD_OUT_ROWS, UNSEEN_FIRST_NAMES, UNSEEN_LAST_NAMES, UNSEEN_WORDINGS
        ),
    }


def eval_rows() -> list[Row]:
    """Twelve held-out rows for the loss and the sample answers shown in training, none of them scored afterwards."""
    return rows("eval", 12, UNSEEN_FIRST_NAMES, UNSEEN_LAST_NAMES, WORDINGS)


def write_jsonl(path: Path, items: Sequence[Row]) -> None:
    """Write one row a line."""
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")


def main() -> None:
    """Print the first rows to train on, as many as are asked for, a line each."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else TRAIN_ROWS
    for item in train_rows()[:count]:
        print(json.dumps(item))


if __name__ == "__main__":
    main()
