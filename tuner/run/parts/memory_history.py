"""What CUDA's allocator did in a whole launch, each block with its line of code (`profile.memory: all`)."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tuner.config.recipe import Recipe
from tuner.errors import MemoryLimitError, RecipeError, is_out_of_memory
from tuner.run.parts.part import LaunchContext, Part, TaskNeeds
from tuner.rundir.layout import PROFILE
from tuner.runtime import torch_private
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import TMP_PREFIX
from tuner.setup.resolve import Resolved
from tuner.train.tasks import Task


class MemoryHistory(Part):
    """It is kept from before the model is built, and written once: where memory runs out, else at the launch's end."""

    def __init__(self, recipe: Recipe) -> None:
        self._directory, self._entries = Path(recipe.output_dir) / PROFILE, recipe.profile.entries
        self._write: Callable[[], None] | None = None
        """What writes it; None where it is not kept yet, and as soon as it is written."""

    def after_plan(self, resolved: Resolved, rank_info: RankInfo, console: Console) -> None:
        """Refuse a device whose allocator keeps none. Raises RecipeError."""
        if resolved.facts.kind != "cuda":
            message = "profile.memory: all is a history of CUDA's allocator, and this run is not on CUDA"
            raise RecipeError(message, hint="write profile.memory: true")

    @contextmanager
    def around(self, resolved: Resolved, rank_info: RankInfo, console: Console) -> Iterator[None]:
        """Kept, and written at the end, also of a launch that fails. Raises MachineError where torch has none."""
        path = self._directory / f"memory-all-rank{rank_info.rank}.pickle"
        self._write = partial(_written, torch_private.dump_snapshot, path, console)
        torch_private.record_memory_history("all", context="alloc", stacks="python", max_entries=self._entries)
        try:
            yield
        finally:
            self.write()
            torch_private.record_memory_history(None)

    def tasks(self, context: LaunchContext, needs: TaskNeeds) -> Sequence[Task]:
        """What writes it where a step runs out of memory, before anything that was held is given back."""
        return (_AtLimit(self),)

    def write(self) -> None:
        """Write what is kept, unless it is written; what fails is a warning."""
        write, self._write = self._write, None
        if write is not None:
            write()


def _written(dump: Callable[[str], None], path: Path, console: Console) -> None:
    part = path.with_name(f"{TMP_PREFIX}{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        dump(str(part))
        os.replace(part, path)
    except Exception as error:  # the allocator's own too
        console.warn(f"the memory's history could not be written: {type(error).__name__}: {error}")
    else:
        console.say("profile", f"the memory's history: {path}")


class _AtLimit(Task):
    """Stands inside of what looks at a step that failed."""

    def __init__(self, history: MemoryHistory) -> None:
        self._history = history

    @contextmanager
    def around_step(self, number: int) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, MemoryLimitError) else error
            if cause is not None and is_out_of_memory(cause):
                self._history.write()
            raise
