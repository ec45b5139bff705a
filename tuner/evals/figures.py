"""From the results of items to figures, and two models on the same items: the difference of each with an interval.

A result is a line of `evaluations/step-N/TASK.jsonl`: the item's ``id``; its ``figures``, whose means are the task's,
or, of a text, its ``sums``; and what the model said. Two models are compared by the paired bootstrap: items are drawn
with replacement, the same ones for both models, and the figure of each is computed again over what was drawn (Efron
and Tibshirani, An Introduction to the Bootstrap, 1993; paired as in Koehn, EMNLP 2004). An item that is hard for both
models adds nothing to the difference's spread: the interval is narrower than those of the two models.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tuner.config.eval_tasks import LOWER_IS_BETTER
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


SAMPLES = 10_000
CELLS = 1 << 22
"""Weights at one time: samples times items."""

LEAST_ITEMS = 6
"""With fewer, all on one side, an exact test has a probability above 0.05; drawn again, they all agree all the same."""


@dataclass(frozen=True)
class Difference:
    """How a figure of the second model differs from the first one's, ``high`` and ``low`` at the level asked for."""

    task: str
    figure: str
    first: float
    second: float
    low: float
    high: float
    items: int
    better: int
    """Items on which the second model is better."""
    worse: int
    p: float | None = None
    """Exact sign test (McNemar's for 0 and 1) of no difference between items; None of a quotient of sums."""

    @property
    def difference(self) -> float:
        """The second minus the first."""
        return self.second - self.first

    @property
    def verdict(self) -> Literal["better", "worse", "not shown"]:
        """Whether the second model is the better one, where enough items say so and the interval leaves zero out."""
        if self.items < LEAST_ITEMS or self.low <= 0 <= self.high or not math.isfinite(self.low + self.high):
            return "not shown"
        return "better" if (self.difference > 0) == (self.figure not in LOWER_IS_BETTER) else "worse"


def compare(
    first: Mapping[str, Sequence[Result]], second: Mapping[str, Sequence[Result]], level: float = 0.95, seed: int = 0
) -> list[Difference]:
    """The differences of the figures of tasks that both have, by the results of their items.

    Raises DataError where they have no task in common, or other items of one.
    """
    if not (common := [task for task in first if task in second]):
        raise DataError(
            f"no task in common: one has {', '.join(first) or 'none'}, the other {', '.join(second) or 'none'}",
            hint="score both on the same tasks: tuner eval MODEL --tasks FILE --output DIR",
        )
    paired = {task: _in_order(task, first[task], second[task]) for task in common}
    return [one for task in common for one in _of_task(task, first[task], paired[task], level, seed)]


def read_task_results(directory: Path) -> dict[str, Sequence[Result]]:
    """The results in a directory, by task: one file each. Raises DataError where there are none."""
    files = sorted(directory.glob("*.jsonl"))
    found: dict[str, Sequence[Result]] = {path.name.removesuffix(".jsonl"): read_results(path) for path in files}
    if not found:
        hint = "write them: tuner eval MODEL --tasks FILE --output DIR"
        raise DataError(f"{directory}: holds no results of tasks", hint=hint)
    return found


def _in_order(task: str, first: Sequence[Result], second: Sequence[Result]) -> list[Result]:
    """The second's results in the order of the first's items; an item that is there twice is paired in order."""
    places: dict[str, list[Result]] = {}
    for result in second:
        places.setdefault(str(result["id"]), []).append(result)
    paired = [places[own].pop(0) for result in first if places.get(own := str(result["id"]))]
    if len(paired) < len(first) or len(second) > len(first):
        alone, other = len(first) - len(paired), len(second) - len(paired)
        raise DataError(
            f"{task}: {len(paired)} items are the same; {alone} are in the first alone, {other} in the second alone",
            hint="score both on the same file",
        )
    return paired


def _of_task(task: str, first: Sequence[Result], second: Sequence[Result], level: float, seed: int) -> list[Difference]:
    before, after = figures_of(first), figures_of(second)
    names = [name for name in before if name in after]
    spreads = _bootstrap([(before[name], after[name]) for name in names], len(first), seed)
    tail = 100 * (1 - level) / 2
    found = []
    for name, drawn in zip(names, spreads, strict=True):
        one, two = before[name], after[name]
        there = np.isfinite(drawn)
        low, high = np.percentile(drawn[there], [tail, 100 - tail]).tolist() if there.any() else (math.nan, math.nan)
        gain = _gains(one, two) * (-1 if name in LOWER_IS_BETTER else 1)
        better, worse = int((gain > 0).sum()), int((gain < 0).sum())
        p = None if one.is_exponent or "sums" in first[0] else sign_test(better, worse)
        found.append(Difference(task, name, one.value, two.value, low, high, len(first), better, worse, p))
    return found


def _bootstrap(pairs: Sequence[tuple[Figure, Figure]], items: int, seed: int) -> list[npt.NDArray[np.float64]]:
    """Of each pair of figures SAMPLES differences, over items that are drawn with replacement, alike for all pairs."""
    rng = np.random.Generator(np.random.PCG64(seed))
    at_once = max(1, CELLS // items)
    drawn: list[list[npt.NDArray[np.float64]]] = [[] for _ in pairs]
    for start in range(0, SAMPLES, at_once):
        count = min(at_once, SAMPLES - start)
        places = rng.integers(0, items, (count, items)) + items * np.arange(count)[:, None]
        weights = np.bincount(places.ravel(), minlength=count * items).reshape(count, items).astype(np.float64)
        for kept, (one, two) in zip(drawn, pairs, strict=True):
            kept.append(two.values(weights) - one.values(weights))
    return [np.concatenate(kept) for kept in drawn]


def _gains(one: Figure, two: Figure) -> npt.NDArray[np.float64]:
    """By how much each item is above in the second; 0 where one of them has none."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(two.numerators / two.denominators - one.numerators / one.denominators)


def sign_test(better: int, worse: int) -> float:
    """Two-sided exact probability, where both are as likely, of counts at least so unequal; 1 without a difference."""
    count, fewer = better + worse, min(better, worse)
    if count == 0:
        return 1.0
    logs = [math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(fewer + 1)]
    return min(1.0, 2 * math.fsum(math.exp(log - count * math.log(2)) for log in logs))
