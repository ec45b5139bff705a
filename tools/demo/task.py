"""The demo's task: an order written in many wordings becomes one JSON object. Everything follows from a seed.

Names of the held-out messages never occur in training; the second held-out set uses other wordings too. The rows to
train on, for the tutorial:

    python -m tools.demo.task [COUNT] > orders.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SEED = 7
TRAIN_ROWS = 1500
HELD_OUT_ROWS = 50
FIELDS = ("name", "city", "item", "quantity", "total_usd")
INSTRUCTION = f"Answer with one JSON object with the keys {', '.join(FIELDS)}."

FIRST_NAMES = (
    "Ana Bruno Carla Dmitri Elena Farid Greta Hugo Ingrid Jonas Keiko Luca Maria Nadia Omar Paula Quentin Rosa "
    "Stefan Tara Ulrich Vera Walter Ximena Yusuf Zoe Amir Bella Cedric Dora Emil Freya Goran Hana Igor Julia Karim "
    "Leila Marco Nina Oscar Petra Rafael Sofia Tomas Ursula Viktor Wendy Yara Zack Alice Boris Celine Daniel Edith "
    "Felix Gloria Henry Irene Jack Karen Liam Mona Noah Olga Peter Ruth Simon Tina Uma Victor Willa"
).split()
LAST_NAMES = (
    "Berg Costa Dubois Eriksen Fischer Garcia Hansen Ivanov Jensen Kowalski Lopez Moreau Novak Olsen Petrov Quinn "
    "Rossi Silva Tanaka Ueda Vargas Weber Xavier Yilmaz Zimmer Adler Becker Cruz Diaz Engel Ferrari Gruber Haas "
    "Ibsen Jung Klein Lang Meyer Nagy Ortiz Peters Reyes Sato Torres Urban Vidal Wagner Young Zeman Arnold Bauer "
    "Conti Dahl Evans Franco Gomez Holm Iqbal James Keller Lund Marin Nolan Owen Price Russo Stein Turner Unger "
    "Vance Walsh"
).split()
UNSEEN_FIRST_NAMES = (
    "Wanda Priya Mateo Astrid Kenji Fatima Oliver Chiara Nikolai Beatriz Lars Amara Pascal Mei Gideon Lucia Rashid "
    "Helga Tobias Noor Esther Diego Marta Callum Aisha"
).split()
UNSEEN_LAST_NAMES = (
    "Zhou Okafor Lindgren Marchetti Nakamura Haddad Fernandez Schulz Popov Almeida Brandt Kaplan Sorensen Gallo "
    "Mbeki Rivera Hoffman Castillo Dvorak Ahmed Larsen Bianchi Murphy Santos Chandra"
).split()
CITIES = (
    "Oslo Lisbon Vienna Prague Dublin Madrid Athens Warsaw Helsinki Zurich Geneva Milan Porto Lyon Hamburg Bergen "
    "Krakow Seville Turin Ghent Boston Denver Seattle Toronto Chicago Austin Lima Quito Cairo Nairobi Osaka Seoul "
    "Delhi Sydney"
).split()
ITEMS = {
    "garden hose": "garden hoses",
    "desk lamp": "desk lamps",
    "coffee mug": "coffee mugs",
    "bread knife": "bread knives",
    "wool blanket": "wool blankets",
    "paint brush": "paint brushes",
    "water bottle": "water bottles",
    "wall clock": "wall clocks",
    "office chair": "office chairs",
    "phone case": "phone cases",
    "rain coat": "rain coats",
    "flower pot": "flower pots",
    "bike light": "bike lights",
    "tea kettle": "tea kettles",
    "door mat": "door mats",
    "camping tent": "camping tents",
    "hand saw": "hand saws",
    "book shelf": "book shelves",
    "picture frame": "picture frames",
    "notebook": "notebooks",
    "backpack": "backpacks",
    "candle": "candles",
    "umbrella": "umbrellas",
    "pillow": "pillows",
}
WORDINGS = (
    "{name} from {city} orders {quantity} {items} for {total} dollars.",
    "Please send {quantity} {items} to {name} in {city}. The total is ${total}.",
    "Order note - customer {name}, city {city}, {quantity} {items}, total {total} USD.",
    "Hi, I am {name}. I live in {city} and need {quantity} {items}. I pay {total} dollars.",
    "To {city}, please: {quantity} {items}. Invoice of {total} dollars goes to {name}.",
    "{quantity} {items} at ${total} in all, to be delivered to {city} for {name}.",
    "We got {total} dollars from {name} ({city}) for {quantity} {items}.",
    "Ship to: {name}, {city}. Goods: {quantity} {items}. Amount: ${total}.",
    "For ${total}, {name} buys {quantity} {items}; the parcel goes to {city}.",
    "Could you get {quantity} {items} to {city}? {name} will pay {total} USD.",
    "New sale: {quantity} {items}, {total} dollars, buyer {name}, destination {city}.",
    "{city} store: {name} picked up {quantity} {items} and paid ${total}.",
    "This is {name} writing from {city}: {quantity} {items}, please. I was told {total} dollars.",
    "Bill {name} {total} dollars for {quantity} {items}. Address: {city}.",
    "A customer in {city}, {name}, wants {quantity} {items}. Price agreed: {total} USD.",
    "{name} asked for {quantity} {items}, sent to {city}, and the bill comes to ${total}.",
)
UNSEEN_WORDINGS = (
    "Yesterday {name} phoned us: {quantity} {items} should go to {city}, and ${total} is what they cost together.",
    "{items} wanted! {quantity} of them, {total} dollars, for {name} of {city}.",
    "Dear team, kindly pack {quantity} {items} for our client {name}. She is in {city} and has sent {total} USD.",
    "Receipt: ${total}. Paid by: {name}. Purchased: {quantity} {items}. Place: {city}.",
    "Our driver leaves for {city} with {quantity} {items}; {name} hands over {total} dollars on arrival.",
    "Can {name} in {city} still have {quantity} {items}? The offer was {total} dollars.",
    "{total} dollars were charged to {name} when {quantity} {items} left the warehouse for {city}.",
    "Gift for a friend in {city}: {quantity} {items}, ordered by {name}, ${total} with wrapping.",
)

Row = dict[str, Any]


def row(rng: random.Random, firsts: Sequence[str], lasts: Sequence[str], wordings: Sequence[str]) -> Row:
    """One row in the messages format: instruction, order, and the object that the model shall answer with."""
    item = rng.choice(sorted(ITEMS))
    values = {
        "name": f"{rng.choice(firsts)} {rng.choice(lasts)}",
        "city": rng.choice(CITIES),
        "item": item,
        "quantity": rng.randint(2, 40),
        "total_usd": rng.randint(10, 990),
    }
    text = rng.choice(wordings).format(
        name=values["name"],
        city=values["city"],
        items=ITEMS[item],
        quantity=values["quantity"],
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
