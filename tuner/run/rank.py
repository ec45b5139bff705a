"""What each rank that a launch starts does."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from tuner.config.load import LoadedRecipe
from tuner.run.main import train
from tuner.run.options import JOB, RESULT
from tuner.runtime import startup
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo

if TYPE_CHECKING:
    from tuner.run.tasks.export import Exporter


def train_rank(work: dict[str, Any]) -> dict[str, Any]:
    """Train as one of the ranks that a launch starts, from its job as plain values to its result as such.

    Rank 0 exports while it trains, the process that started it after.
    """
    startup.begin(with_process=True)
    job = JOB.validate_python(work)
    loaded, rank_info = job.loaded(), RankInfo.from_environment()
    console = Console(rank_info.is_main, job.options.level)
    with exports_of(loaded, console) as exporter:
        result = train(loaded, job.options, rank_info, console, exporter)
        if exporter is not None and rank_info.is_main:
            exporter.finish(result, at_end=False)
    sys.stderr.flush()
    plain: dict[str, Any] = RESULT.dump_python(result, mode="json")
    return plain


def exports_of(loaded: LoadedRecipe, console: Console) -> AbstractContextManager[Exporter | None]:
    """What exports checkpoints of the run; None, and nothing imported, where the recipe asks for no exports."""
    if loaded.recipe.export.every is None and not loaded.recipe.export.at_end:
        return nullcontext()
    from tuner.run.tasks.export import Exporter

    return Exporter(loaded.recipe, console)
