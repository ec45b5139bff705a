"""Columns of a step's line that follow from the lines before it: how often loss or gradient norm made a spike, and how
far the tokens are by Chinchilla's measure."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from tuner.setup.specs import TaskSections

CHINCHILLA_TOKENS = 20
"""Tokens for each parameter (Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556), of those without the input
embedding, as the rules of a ladder count them."""


class StepColumn(Protocol):
    """What is added to the line of each step: asked once for each of the run, in order, by a resumed launch again."""

    def of(self, line: Mapping[str, Any]) -> Mapping[str, float | None]:
        """The columns of a line of metrics.jsonl, by name."""


class SpikeScore:
    """The share of steps with a spike: a loss or gradient norm that is not finite, or more than ``sigmas`` standard
    deviations above the mean of the ``window`` steps before it; of all steps, and of the ``last`` ones."""

    def __init__(self, sigmas: float, window: int, last: int) -> None:
        self._sigmas = sigmas
        self._window = deque[tuple[float, float]](maxlen=window)
        self._last = deque[bool](maxlen=last)
        self._spikes = self._steps = 0

    def of(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Both shares, this step included; nothing of a step that the recipe leaves out."""
        if "reason" in line:
            return {}
        values = (line["loss"], line["grad_norm"])
        spike = None in values
        if not spike:
            if len(self._window) == self._window.maxlen:
                before = np.array(self._window)
                spike = bool((np.array(values) > before.mean(0) + self._sigmas * before.std(0, ddof=1)).any())
            self._window.append(values)
        self._last.append(spike)
        self._spikes, self._steps = self._spikes + spike, self._steps + 1
        shares = {"spike_score": self._spikes / self._steps, "spike_score_last": sum(self._last) / len(self._last)}
        return {name: round(share, 6) for name, share in shares.items()}


class Chinchilla:
    """Tokens so far, in multiples of what is compute-optimal for so many ``parameters``."""

    def __init__(self, parameters: int) -> None:
        self._optimal = CHINCHILLA_TOKENS * parameters

    def of(self, line: Mapping[str, Any]) -> dict[str, float]:
        """The multiple, the step's own tokens included."""
        return {"chinchilla": round(line["tokens"] / self._optimal, 6)}


def step_columns(sections: TaskSections) -> Iterator[StepColumn]:
    """Those of a recipe: spikes where they are asked for, Chinchilla's measure where a model begins at random."""
    logging = sections.logging
    if logging.spike_score is not None:
        yield SpikeScore(logging.spike_score, sections.spike_window, logging.spike_score_last)
    if sections.trained_from_nothing is not None:
        yield Chinchilla(sections.trained_from_nothing)
