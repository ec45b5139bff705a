"""How exactly kernels compute, where the recipe says more than that they are torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from tuner.config.recipe import Recipe, TrainSection
from tuner.run.parts.part import Part
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.setup.resolve import Resolved


class Exactness(Part):
    """`train.deterministic` and `train.tf32`."""

    @staticmethod
    def wanted(recipe: Recipe) -> bool:
        """Where one of them is on."""
        return bool(recipe.train.deterministic or recipe.train.tf32)

    def around(self, resolved: Resolved, rank_info: RankInfo, console: Console) -> AbstractContextManager[None]:
        """As the recipe says."""
        return exactness(resolved.recipe.train)


@contextmanager
def exactness(train: TrainSection) -> Iterator[None]:
    """The kernels that a section asks for, within."""
    if not train.deterministic and not train.tf32:
        yield
        return
    from tuner.runtime.deterministic import deterministic, tf32_products

    with deterministic(train.deterministic), tf32_products(train.tf32):
        yield
