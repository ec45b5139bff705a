"""Meanings of RecIS's training arguments that need code of their own: its model bank and its windows."""

import re
from collections.abc import Mapping
from itertools import count
from typing import Any

from tuner.config.other_rules import Given, Lines, number

_NO_WEIGHTS = ("", "*", "io_state", "global_step", "train_io", "eval_io", "recis.dense.optim")
"""Globs of no weights, or of all."""


def bank(value: Any, given: Given) -> Lines | str | None:
    """A list of ``{path, load, exclude, oname, is_dynamic, ignore_error, skip}``; later ones win there, too."""
    cadences = ((number(given.get(f"load_update_{unit}")), unit) for unit in ("steps", "windows", "epochs"))
    every, found = [f"{often} {unit}" for often, unit in cadences if often], []
    for item in value if isinstance(value, list) else ():
        said = item if isinstance(item, Mapping) else {"path": item}
        names = said.get("oname") or {}
        pairs = [pair for each in (names if isinstance(names, list) else [names]) for pair in each.items()]
        entry = {"path": said.get("path"), "rename": {there: _numbered(here) for here, there in pairs}}
        entry |= {key: [name for name in said.get(key) or () if name not in _NO_WEIGHTS] for key in ("load", "exclude")}
        entry |= {"every": every if said.get("is_dynamic") is True else []}
        entry |= {"strict": False} if said.get("ignore_error") is True else {}
        if said.get("skip") is not True:
            found.append({key: part for key, part in entry.items() if part not in ([], {})})
    return {"model.init_from": found}


def _numbered(name: str) -> str:
    """A name here, by what the wildcards of the one there stand for in their order."""
    numbers = count(1)
    return re.sub(r"\*", lambda found: f"{{{next(numbers)}}}", name)


def duration(value: Any, given: Given) -> Lines | str | None:
    """Steps are those of each epoch."""
    steps, epochs = number(given.get("train_steps")), number(given.get("train_epoch", 1))
    return {"train.duration": f"{value} epochs" if not steps or not epochs else f"{steps * epochs} steps"}


def windows(value: Any, given: Given) -> Lines | str | None:
    """Numbers of windows, which are files here until the recipe says otherwise."""
    own = {"per_launch": given.get("window_iter"), "save_every": given.get("save_every_n_windows")}
    counted = {key: found for key, found in own.items() if found}
    return {"data.windows": {"files": 1, "passes": "stream", **counted}, "schedule.kind": "constant"}
