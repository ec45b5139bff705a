"""From the results of items to figures: what each item adds to a figure, and the figure over all of them.

A result is a line of `evaluations/step-N/TASK.jsonl`: the item's ``id``; its ``figures``, whose means are the task's,
or, of a text, its ``sums``; and what the model said.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.errors import DataError
from tuner.runtime.files import write_atomic

Result = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Figure:
    """A figure as a quotient of sums over items: float64 ``[items]`` each, NaN where an item has none."""

    numerators: npt.NDArray[np.float64]
    denominators: npt.NDArray[np.float64]
    is_exponent: bool = False
    """Whether the figure is e to the power of the quotient."""

    @property
    def value(self) -> float:
        """Over all items."""
        return float(self.values(np.ones((1, len(self.numerators))))[0])

    def values(self, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """float64 ``[samples]``: over items that are there so many times, ``[samples, items]``."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            quotients: npt.NDArray[np.float64] = (weights @ self.numerators) / (weights @ self.denominators)
            return np.exp(quotients) if self.is_exponent else quotients


def figures_of(results: Sequence[Result]) -> dict[str, Figure]:
    """The figures of a task by name, of the results of its items."""
    if not results:
        return {}
    if "sums" in results[0]:
        nats, text = (np.array([float(result["sums"][name]) for result in results]) for name in ("nats", "bytes"))
        tokens = np.array([float(result["sums"].get("tokens", 0)) for result in results])
        per_token = {"perplexity": Figure(nats, tokens, is_exponent=True)} if tokens.any() else {}
        return {**per_token, "bits_per_byte": Figure(nats / math.log(2), text)}
    names = dict.fromkeys(name for result in results for name in result["figures"])
    return {name: _mean([result["figures"].get(name) for result in results]) for name in names}


def _mean(values: Sequence[float | None]) -> Figure:
    """The mean of those that are there."""
    there = np.array([value is not None for value in values], dtype=np.float64)
    return Figure(np.array([0.0 if value is None else float(value) for value in values]), there)


def read_results(path: Path) -> list[Result]:
    """The results in a file. Raises DataError for one that is none."""
    results: list[Result] = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            result = json.loads(line)
            if not isinstance(result, dict) or "id" not in result or not ({"figures", "sums"} & result.keys()):
                raise DataError(f"{path}:{number}: is no result of an item", hint="give what tuner eval --output wrote")
            results.append(result)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return results


def write_results(path: Path, results: Sequence[Result]) -> None:
    """Write results, one a line, whole or not at all. Raises OSError."""
    text = "".join(json.dumps(result, ensure_ascii=False) + "\n" for result in results)
    write_atomic(path, text.encode("utf-8", "replace"))
