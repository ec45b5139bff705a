"""The process that prepares a window while the one before it is trained: low priority, no process group, no torch.

It reads its job as JSON from standard input, `{recipe, window: {name, files}}`, and writes what came of it to standard
output: `{key, rows, warnings}`, `{empty: true}`, or `{error: {type, message, hint, exit_code}}`.
"""

import json
import os
import sys
from dataclasses import replace
from typing import Any

from tuner.config.load import load_recipe
from tuner.config.portions import Portion
from tuner.data.building.prepare import prepare
from tuner.data.building.spec import prepare_spec
from tuner.data.prepared import open_prepared
from tuner.errors import NoRowsError, as_tuner_error
from tuner.runtime.console import Console

NICENESS = 10
"""Training goes first."""


def main() -> None:
    """Do the job; the result always says how it ended."""
    os.nice(NICENESS)
    out = os.dup(1)
    os.dup2(2, 1)  # nothing but the result is written to standard output
    answer = answered(json.load(sys.stdin))
    os.write(out, json.dumps(answer).encode())


def answered(job: dict[str, Any]) -> dict[str, Any]:
    """What came of a job, as JSON values."""
    try:
        recipe = load_recipe(job["recipe"]).recipe
        window = Portion(job["window"]["name"], tuple(job["window"]["files"]))
        spec = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
        info = prepare(replace(spec, portion=window), Console())
        rows = len(open_prepared(info.path).train)
    except NoRowsError:
        return {"empty": True}
    except Exception as error:  # noqa: BLE001 - reported to the parent, which raises it when training needs the window
        known = as_tuner_error(error)
        name = type(known).__name__
        said = {"message": known.message or name, "hint": known.hint, "exit_code": int(known.exit_code)}
        return {"error": {"type": name, **said}}
    return {"key": info.key, "rows": rows, "warnings": list(info.warnings)}


if __name__ == "__main__":
    main()
