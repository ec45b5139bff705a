"""What a command does around the launch of a run in an object store: fetch before it, publish after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tuner.config.load import LoadedRecipe
from tuner.config.store_rules import inputs_of
from tuner.errors import MachineError
from tuner.rundir.in_store import bring, bring_inputs, not_published, publish
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.stages import url_of


@contextmanager
def in_store(loaded: LoadedRecipe, console: Console, writes: bool = True) -> Iterator[None]:
    """Around a command's launch: its run and what it reads are fetched before, and what came after its last step is
    published, such as exports. Nothing of what is on a disk. Raises MachineError where a store cannot be read or
    written, RecipeError where it has no such data.
    """
    run_dir, rank_info = Path(loaded.recipe.output_dir), RankInfo.from_environment()
    if url_of(run_dir) is not None:
        with console.doing("fetching from the store"):
            if writes and rank_info.world_size > rank_info.local_world_size:
                from tuner.run.store import bring_to_all  # with torch, which processes of one machine need not ask

                bring_to_all(run_dir, rank_info, loaded.recipe.parallel.timeout.seconds, console.say)
            else:
                bring(run_dir, console.say)
    bring_inputs(inputs_of(loaded.recipe), console.say)
    yield
    if writes and rank_info.is_main:
        try:
            publish(run_dir)
        except MachineError as error:
            raise not_published(run_dir, error) from error
