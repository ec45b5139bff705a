"""The rows of recipes/data/orders.jsonl: an order in words becomes one JSON object.

    python -m tools.order_rows [COUNT] > orders.jsonl

Each wording occurs as often as the others, and a person stands before a city in about as many as after it: a model
must read who lives where, and cannot go by the place in the sentence. Everything follows from a seed.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tools.demo.task import CITIES, FIRST_NAMES, ITEMS, LAST_NAMES
from tools.tables import beside

SEED = 23
ROWS = 112
ASKED = "Write as JSON: "
_TABLE: dict[str, list[str]] = beside(__file__)
MORE_CITIES, COLOURS, WORDINGS = _TABLE["more_cities"], _TABLE["colours"], _TABLE["wordings"]

Row = dict[str, Any]


def deck(rng: random.Random, cards: Sequence[str]) -> Iterator[str]:
    """Each of the cards once, in an order by chance, and so on: none comes much more often than others."""
    while True:
        yield from rng.sample(cards, len(cards))


def rows(count: int = ROWS) -> list[Row]:
    """`count` rows in the messages format, with different orders, of each wording as many as of the others."""
    rng = random.Random(SEED)
    firsts, lasts = deck(rng, FIRST_NAMES), deck(rng, LAST_NAMES)
    cities, items = deck(rng, [*CITIES, *MORE_CITIES]), deck(rng, sorted(ITEMS))
    made = []
    for number in range(count):
        item, colour = next(items), rng.choice(("", "", *(f"{name} " for name in COLOURS)))
        facts = {
            "name": f"{next(firsts)} {next(lasts)}", "city": next(cities), "item": f"{colour}{item}",
            "quantity": rng.randint(2, 40), "total_usd": rng.randint(10, 400),
        }
        wording = WORDINGS[number % len(WORDINGS)]
        order = wording.format(**facts, items=f"{colour}{ITEMS[item]}", total=facts["total_usd"])
        answer = {"role": "assistant", "content": json.dumps(facts)}
        made.append({"messages": [{"role": "user", "content": ASKED + order}, answer]})
    rng.shuffle(made)
    return made


def main() -> None:
    """Print the rows, a line each."""
    for item in rows(int(sys.argv[1]) if len(sys.argv) > 1 else ROWS):
        print(json.dumps(item))


if __name__ == "__main__":
    main()
