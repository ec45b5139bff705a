"""Points of which the law is known, and published ones.

And a tiny ladder: a directory with a model's config, rows of text and the recipe `ladder.yaml`.
"""

import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML

from tests.caches import new_cache
from tuner.config.paths import recipes_dir
from tuner.ladder.fit import CurveFamily
from tuner.ladder.points import Point, short

CEREBRAS = Path(__file__).with_name("cerebras.csv")
"""Losses on the Pile's test split, and mean accuracy of tasks: Dey et al., Cerebras-GPT, 2023 (arXiv:2304.03208)."""
SIZES = (60e6, 100e6, 190e6, 370e6, 760e6, 1.3e9)
MULTIPLES = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Truth:
    """E, A, B, a and b; as they stand those of Besiroglu et al., Chinchilla Scaling: A replication attempt, 2024."""

    constant: float = 1.8172
    parameters_factor: float = 482.01
    tokens_factor: float = 2085.43
    parameters_exponent: float = 0.3478
    tokens_exponent: float = 0.3658

    def loss(self, parameters: float, tokens: float) -> float:
        """L = E + A/N^a + B/D^b."""
        by_size = self.parameters_factor / parameters**self.parameters_exponent
        return self.constant + by_size + self.tokens_factor / tokens**self.tokens_exponent


def ladder(
    truth: Truth,
    noise: float = 0.0,
    seed: int = 0,
    sizes: Sequence[float] = SIZES,
    multiples: Sequence[float] = MULTIPLES,
) -> list[Point]:
    """Rungs at multiples of 20 tokens a parameter; `noise` is the standard deviation of log L, of each point alone."""
    random = np.random.default_rng(seed)
    return [
        Point(
            short(size),
            size,
            20 * size * multiple,
            {"loss": truth.loss(size, 20 * size * multiple) * math.exp(noise * random.standard_normal())},
        )
        for size in sizes
        for multiple in multiples
    ]


def with_scores(points: Sequence[Point], noise: float = 0.0, seed: int = 0) -> list[Point]:
    """The same points with an accuracy that is a sigmoid of the loss: 0.25 to 0.95 about 2.6, with k = 5."""
    random = np.random.default_rng(seed)
    scores = [accuracy(point.figures["loss"]) + noise * float(random.standard_normal()) for point in points]
    return [
        Point(point.rung, point.parameters, point.tokens, {**point.figures, "task/acc": score}, point.is_decayed)
        for point, score in zip(points, scores, strict=True)
    ]


def accuracy(loss: float) -> float:
    """The score at a loss."""
    return 0.25 + 0.7 / (1 + math.exp(5 * (loss - 2.6)))


def require_derivatives(curve: CurveFamily, at: Sequence[float], step: float = 1e-6) -> None:
    """That a curve's derivatives there are those of differences."""
    here, moves = np.array([at]), step * np.eye(len(at))
    up, down = curve.at(here + moves).values, curve.at(here - moves).values
    np.testing.assert_allclose(curve.at(here).derivatives[0], (up - down).T / (2 * step), atol=1e-8)


WORDS = ("the", "rung", "above", "learns", "a", "little", "more", "of", "same", "text", "than", "below")


def ladder_tree(**ladder: Any) -> dict[str, Any]:
    """The recipe of `ladder.yaml` beside this file, with keys of its ladder replaced."""
    tree = dict(YAML(typ="safe").load(Path(__file__).with_name("ladder.yaml")))
    tree["ladder"] |= ladder
    return tree


def write_ladder_files(directory: Path, **ladder: Any) -> Path:
    """Write the files; the recipe's path."""
    shutil.copytree(recipes_dir() / "models" / "tiny-llama", directory / "model")
    new_cache(directory / "cache")
    rng = random.Random(0)
    texts = (" ".join(rng.choices(WORDS, k=rng.randint(10, 60))) for _ in range(120))
    (directory / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = directory / "ladder.yaml"
    path.write_text(json.dumps(ladder_tree(**ladder)))
    return path
