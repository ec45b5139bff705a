"""The rows of recipes/data/orders.jsonl: an order in words becomes one JSON object.

    python -m tools.order_rows [COUNT] > orders.jsonl

Each wording occurs as often as the others, and a person stands before a city in about as many as after it: a model
must read who lives where, and cannot go by the place in the sentence. Everything follows from a seed.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tools.demo.task import CITIES, FIRST_NAMES, ITEMS, LAST_NAMES

SEED = 23
ROWS = 112
ASKED = "Write as JSON: "
MORE_CITIES = (
    "Accra", "Basel", "Bogota", "Bristol", "Bruges", "Calgary", "Cardiff", "Cork", "Dakar", "Dallas", "Fargo",
    "Florence", "Genoa", "Graz", "Havana", "Leeds", "Malmo", "Manila", "Mumbai", "Naples", "Odense", "Perth", "Phoenix",
    "Quebec", "Riga", "Salzburg", "Tallinn", "Tampa", "Tokyo", "Utrecht", "Valencia", "York",
)  # fmt: skip
COLOURS = ("black", "blue", "brown", "green", "grey", "white", "yellow")
WORDINGS = (
    "please send {quantity} {items} to {name} in {city}; the total is {total} dollars.",
    "Send {quantity} {items} to {city} for {name}, {total} dollars in all.",
    "{name} from {city} orders {quantity} {items} and pays {total} dollars.",
    "{city}: {name} bought {quantity} {items} for {total} dollars.",
    "Order note - customer {name}, {city}: {quantity} x {item}, {total} dollars in all.",
    "Hi, I am {name} and live in {city}. I need {quantity} {items}, {total} dollars.",
    "To {city}, please: {quantity} {items}. The bill of {total} dollars goes to {name}.",
    "{quantity} {items} for {name} in {city}, ${total}.",
    "{quantity} {items} to {city}, ${total}, paid by {name}.",
    "{name} would like {quantity} {items}, sent to {city}. That is {total} dollars.",
    "Our customer in {city}, {name}, asks for {quantity} {items}; we agreed on ${total}.",
    "For {total} dollars {name} gets {quantity} {items}; the parcel goes to {city}.",
    "We received {total} dollars from {name} in {city}, who wants {quantity} {items}.",
    "Invoice of ${total} to {name} ({city}): {quantity} {items}.",
    "wanted by {name}: {quantity} {items}. Deliver to {city}; the price is {total} dollars.",
    "Is {city} on your way? {name} waits there for {quantity} {items} and pays ${total}.",
)

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
            "name": f"{next(firsts)} {next(lasts)}",
            "city": next(cities),
            "item": f"{colour}{item}",
            "quantity": rng.randint(2, 40),
            "total_usd": rng.randint(10, 400),
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
