"""How exactly kernels compute, where the recipe says more than that they are torch's own."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from tuner.run.parts.part import Part
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.setup.precision import Numerics
from tuner.setup.resolve import Resolved


class Exactness(Part):
    """`train.deterministic` and `train.tf32`."""

    def around(self, resolved: Resolved, rank_info: RankInfo, console: Console) -> AbstractContextManager[None]:
        """As the recipe says."""
        return exactness(resolved.numerics)


@contextmanager
def exactness(numerics: Numerics) -> Iterator[None]:
    """The kernels that are so exact, within."""
    if not numerics.deterministic and not numerics.tf32:
        yield
        return
    from tuner.runtime.deterministic import deterministic, tf32_products

    with deterministic(numerics.deterministic), tf32_products(numerics.tf32):
        yield
