"""Training as commands start it: its exports beside it, its steps looked at, here or in the processes it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tuner.config.load import LoadedRecipe, load_recipe
from tuner.exporting.exporter import Exporter
from tuner.profile.watch import watch_run
from tuner.run.launch import launch, plain_result, train_as_rank
from tuner.run.preflight import LaunchOptions, RunResult
from tuner.runtime.console import Console, Level
from tuner.runtime.dist import RankInfo

RANK_MODULE = "tuner.attached.rank"


def launch_attached(loaded: LoadedRecipe, options: LaunchOptions, level: Level) -> RunResult:
    """`tuner.run.launch.launch`, with exports during training and after it, and steps recorded, as the recipe says.

    Raises what that raises and, once the run is complete, the error of an export that failed.
    """
    section = loaded.recipe.export
    options = replace(options, watch=watch_run)
    if section.every is None and not section.at_end:
        return launch(loaded, options, level, RANK_MODULE)
    main = RankInfo.from_environment().is_main
    with Exporter(loaded.recipe, Console(main, level)) as exporter:
        result = launch(loaded, replace(options, attach=exporter.attach), level, RANK_MODULE)
        if main:
            exporter.finish(result)
        return result


def train_attached_as_rank(work: Mapping[str, Any]) -> dict[str, Any]:
    """What each process started by `launch` does; rank 0 exports while it trains, the parent at the end."""
    place, section = RankInfo.from_environment(), load_recipe(work["recipe"]).recipe.export
    if section.every is None and not section.at_end:
        return plain_result(train_as_rank(work, watch=watch_run))
    with Exporter(load_recipe(work["recipe"]).recipe, Console(place.is_main, work["level"])) as exporter:
        result = train_as_rank(work, exporter.attach, watch_run)
        if place.is_main:
            exporter.finish(result, at_end=False)
        return plain_result(result)
