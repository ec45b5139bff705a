"""What commands there are, from `commands.json`: a command is its row there and its file `tuner/cli/<command>.py`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("commands.json").read_text(encoding="utf-8"))
_ROWS: dict[str, dict[str, Any]] = _TABLES["commands"]
COMMANDS: dict[str, str] = {name: row["line"] for name, row in _ROWS.items()}
"""Every command and its line of help; its file is imported only when it runs."""
GROUPED: dict[str, list[str]] = {}
"""The commands as `tuner --help` groups them."""
for _name, _row in _ROWS.items():
    GROUPED.setdefault(_row["group"], []).append(_name)
GROUPS = frozenset(name for name, row in _ROWS.items() if row.get("below"))
"""Commands that are groups of others."""
WITH_FLAGS = frozenset(key for row in _ROWS.values() for key in row.get("keys", ()))
"""Commands that take keys of the recipe as flags, such as `train` and `config show`."""
TAKES_RECIPE = frozenset(name.split()[0] for name in WITH_FLAGS)
PARAMETERS: dict[str, dict[str, Any]] = _TABLES["parameters"]
"""What each command's parameters are for; those of several commands are under an empty name."""
RECIPE_KEYS: list[str] = _TABLES["recipe_keys"]
"""The recipe's sections and its other keys, as help lists them without the model of the recipe."""
EXAMPLES: dict[str, list[str]] = _TABLES["examples"]
"""Two or three command lines of each command; those of the program are under an empty name."""
BODIES: dict[str, Callable[..., None]] = {}
"""What each command runs, entered when its file is imported."""
MEANT: dict[str, str] = {word: name for name, words in _TABLES["meant"].items() for word in words.split()}
"""What other tools, or people, call a command, with its name here."""
NOT_HERE: dict[str, str] = {word: text for text, words in _TABLES["not_here"].items() for word in words.split()}
"""What other tools do and this one does not, with what there is in place of it."""
