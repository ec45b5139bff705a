"""The cores that a process of a machine with several memories keeps to (`parallel.numa_binding`)."""

from collections.abc import Iterator
from contextlib import contextmanager

from tuner.config.recipe import Recipe
from tuner.run.parts.part import Part
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.setup.resolve import Resolved


class Cores(Part):
    """Binds after the process group is there: how many threads the process has is settled by then."""

    def __init__(self, recipe: Recipe) -> None:
        self._mode = recipe.parallel.numa_binding

    @contextmanager
    def around(self, resolved: Resolved, rank_info: RankInfo, console: Console) -> Iterator[None]:
        """Bound, which is said."""
        from tuner.runtime.numa import bound

        assert self._mode != "none", "such a launch has no such part"
        with bound(self._mode, rank_info, resolved.facts.kind) as cores:
            console.say("cores", f"{cores} (parallel.numa_binding: {self._mode})")
            yield
