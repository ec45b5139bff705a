"""A run that lies in an object store (`output_dir: s3://...`), and is trained in its stage on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.config.load import LoadedRecipe
from tuner.config.recipe import Recipe
from tuner.config.store_rules import inputs_of
from tuner.errors import MachineError
from tuner.run.parts.part import LaunchContext, Part, TaskNeeds
from tuner.rundir.in_store import bring, bring_inputs, not_published, publish
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.setup.resolve import Resolved
from tuner.stages import url_of
from tuner.train.tasks import Task

if TYPE_CHECKING:
    from tuner.run.store import Publisher


@contextmanager
def in_store(loaded: LoadedRecipe, console: Console, writes: bool = True) -> Iterator[None]:
    """Around a command's launch: its run and what it reads are fetched before, and what came after its last step is
    published, such as exports. Nothing of what is on a disk. Raises MachineError where a store cannot be read or
    written, RecipeError where it has no such data.
    """
    run_dir = Path(loaded.recipe.output_dir)
    with console.doing("fetching from the store") if url_of(run_dir) is not None else nullcontext():
        bring(run_dir, console.say)
    bring_inputs(inputs_of(loaded.recipe), console.say)
    yield
    if writes and RankInfo.from_environment().is_main:
        try:
            publish(run_dir)
        except MachineError as error:
            raise not_published(run_dir, error) from error


class Store(Part):
    """Rank 0 holds the lease and publishes; the command around the launch has fetched the run."""

    after_saves = True

    def __init__(self, recipe: Recipe) -> None:
        self._stage = Path(recipe.output_dir)
        self._publisher: Publisher | None = None

    @staticmethod
    def wanted(recipe: Recipe) -> bool:
        """Where the run's directory stands for one in a store."""
        return url_of(Path(recipe.output_dir)) is not None

    def planned(self, resolved: Resolved, rank_info: RankInfo, console: Console) -> None:
        """Say where the run is."""
        console.say("store", f"{url_of(self._stage)} gets each save of {self._stage}")

    @contextmanager
    def around(self, resolved: Resolved, rank_info: RankInfo, console: Console) -> Iterator[None]:
        """Under the run's lease, to the end of the last upload. Raises MachineError where another launch has it."""
        if not rank_info.is_main:
            yield
            return
        from tuner.run.store import Publisher

        with Publisher(self._stage, console) as self._publisher:
            yield

    def tasks(self, context: LaunchContext, needs: TaskNeeds) -> Sequence[Task]:
        """What hands saves over, on rank 0."""
        return () if self._publisher is None else (self._publisher.task(),)
