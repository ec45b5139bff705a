"""Names of jinja2's filters, tests and functions and of methods, by what is known of them.

`template_names.json` is the table. What is in none of its rows is refused, or not understood.
"""

import json
from pathlib import Path

_TABLE: dict[str, str] = json.loads(Path(__file__).with_name("template_names.json").read_bytes())


def names(row: str) -> frozenset[str]:
    """The names of a row."""
    return frozenset(_TABLE[row].split())
