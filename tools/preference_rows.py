"""The rows of recipes/data/preferences.jsonl: short JSON is preferred to an answer that talks.

    python -m tools.preference_rows [--held-out] [COUNT] > preferences.jsonl

A note about an order, a meeting, a contact or a parcel becomes one JSON object. The chosen answer is that object and
nothing else; the rejected one has the same facts with greetings, explanations, code fences or in prose. Everything
follows from a seed. Names and wordings of the held-out notes never occur in training.
"""

import json
import random
import sys
from collections.abc import Sequence
from typing import Any

from tools.demo.task import CITIES, FIRST_NAMES, ITEMS, LAST_NAMES, UNSEEN_FIRST_NAMES, UNSEEN_LAST_NAMES
from tools.tables import beside

SEED = 19
TRAIN_ROWS = 240
HELD_OUT_ROWS = 80
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
TOPICS = ("budget", "hiring", "release", "travel", "safety", "training", "design", "audit")
STATES = ("lost", "late", "delivered", "damaged", "returned")

KINDS: dict[str, dict[str, list[str]]] = beside(__file__)
"""Of each kind the keys, the wordings to train on, and those that are held out."""
OPENINGS = (
    "Sure! I'd be happy to help with that. Here is the information you asked for:",
    "Of course! Let me turn this note into JSON for you.",
    "Great question! Based on the note that you gave me, this is what I found:",
    "Here's a JSON object that represents the note:",
    "Certainly. To write this as JSON, we first look at the facts in the text.",
)
CLOSINGS = (
    "I hope this helps! Let me know if you need anything else.",
    "In this object, each key describes one part of the note, and each value is what the note says.",
    "Please note that you can change the values to suit your needs.",
    "Feel free to ask if you have more questions about JSON.",
    "This format is easy to read for both people and machines.",
)

Row = dict[str, Any]


def instruction(kind: str) -> str:
    """What the system says of a kind of note."""
    return f"Write the note as JSON with the keys {', '.join(KINDS[kind]['keys'])}."


def values(rng: random.Random, kind: str, firsts: Sequence[str], lasts: Sequence[str]) -> dict[str, Any]:
    """The facts of one note by their keys."""
    drawn: dict[str, Any] = {
        "name": f"{rng.choice(firsts)} {rng.choice(lasts)}", "item": rng.choice(sorted(ITEMS)),
        "quantity": rng.randint(2, 40), "topic": rng.choice(TOPICS), "day": rng.choice(DAYS),
        "hour": rng.randint(8, 18), "city": rng.choice(CITIES), "phone": str(rng.randint(1000, 9999)),
        "number": rng.randint(100, 999), "state": rng.choice(STATES),
    }
    return {key: drawn[key] for key in KINDS[kind]["keys"]}


def chatty(rng: random.Random, facts: dict[str, Any]) -> str:
    """The same facts in an answer that talks: a fenced object, an object over many lines, or prose."""
    indented = json.dumps(facts, indent=2)
    prose = " ".join(f"The {key} is {value}." for key, value in facts.items())
    body = rng.choice((f"```json\n{indented}\n```", f"```\n{json.dumps(facts)}\n```", indented, prose))
    opening, closing = rng.choice(OPENINGS), rng.choice(CLOSINGS)
    return rng.choice((f"{opening}\n\n{body}\n\n{closing}", f"{opening}\n\n{body}", f"{body}\n\n{closing}"))


def rows(part: str, count: int) -> list[Row]:
    """`count` rows with different notes, of each kind as many as of the others, from a stream of their own."""
    rng = random.Random(f"{SEED}/{part}")
    held_out = part != "train"
    firsts, lasts = (UNSEEN_FIRST_NAMES, UNSEEN_LAST_NAMES) if held_out else (FIRST_NAMES, LAST_NAMES)
    made: dict[str, Row] = {}
    while len(made) < count:
        kind = tuple(KINDS)[len(made) % len(KINDS)]
        facts = values(rng, kind, firsts, lasts)
        note = rng.choice(KINDS[kind]["held_out" if held_out else "wordings"]).format(**facts)
        prompt = [{"role": "system", "content": instruction(kind)}, {"role": "user", "content": note}]
        answers = {
            "chosen": [{"role": "assistant", "content": json.dumps(facts)}],
            "rejected": [{"role": "assistant", "content": chatty(rng, facts)}],
        }
        made.setdefault(note, {"prompt": prompt, **answers})
    return list(made.values())


def main() -> None:
    """Print rows, a line each."""
    words = [word for word in sys.argv[1:] if word != "--held-out"]
    held_out = "--held-out" in sys.argv[1:]
    count = int(words[0]) if words else HELD_OUT_ROWS if held_out else TRAIN_ROWS
    for item in rows("held-out" if held_out else "train", count):
        print(json.dumps(item))


if __name__ == "__main__":
    main()
