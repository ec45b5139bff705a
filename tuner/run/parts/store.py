"""A run that lies in an object store (`output_dir: s3://...`), and is trained in its stage on this machine."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tuner.checkpoint.save import WriteShards
from tuner.checkpoint.storage import write_shards
from tuner.config.recipe import Recipe
from tuner.run.parts.part import LaunchContext, Part, TaskNeeds
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.setup.resolve import Resolved
from tuner.stages import url_of
from tuner.train.tasks import Task


class Store(Part):
    """Rank 0 holds the lease and publishes; the command around the launch has fetched the run."""

    after_saves = True

    def __init__(self, recipe: Recipe) -> None:
        self._stage = Path(recipe.output_dir)
        self._published: Sequence[Task] = ()
        self._write: WriteShards = write_shards

    @staticmethod
    def wanted(recipe: Recipe) -> bool:
        """Where the run's directory stands for one in a store."""
        return url_of(Path(recipe.output_dir)) is not None

    def after_plan(self, resolved: Resolved, rank_info: RankInfo, console: Console) -> None:
        """Say where the run is."""
        console.say("store", f"{url_of(self._stage)} gets each save of {self._stage}")

    @contextmanager
    def around(self, resolved: Resolved, rank_info: RankInfo, console: Console) -> Iterator[None]:
        """Under the run's lease, to the end of the last upload. Raises MachineError where another launch has it."""
        from tuner.run import store  # which others do without

        self._write = store.writer(self._stage, rank_info)
        with ExitStack() as held:
            if rank_info.is_main:
                self._published = (held.enter_context(store.Publisher(self._stage, console)),)
            yield

    def tasks(self, context: LaunchContext, needs: TaskNeeds) -> Sequence[Task]:
        """What hands saves over, on rank 0; and how all ranks write them."""
        needs.write_by(self._write)
        return self._published
