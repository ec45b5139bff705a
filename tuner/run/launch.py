"""Where a recipe runs: in this process, among those that torchrun or srun started, or in local ranks started here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from tuner.config.ladder import require_one_run
from tuner.config.load import LoadedRecipe
from tuner.config.recipe import WEBHOOK_VARIABLE, ParallelSection, Recipe
from tuner.errors import MachineError, RecipeError
from tuner.run.main import train
from tuner.run.options import JOB, RESULT, HandedOver, LaunchOptions, RankJob, RunResult
from tuner.run.preflight import preflight
from tuner.run.rank import exports_of, train_rank
from tuner.run.settle import LaunchData, settled_for
from tuner.run.status import RunStatus
from tuner.rundir.directory import RunDir
from tuner.runtime import startup
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.environment import command_line
from tuner.runtime.stop import undone
from tuner.setup.resolve import check_division
from tuner.setup.settled import reopened, with_batch_of, with_whole_batches
from tuner.setup.specs import require_groups

if TYPE_CHECKING:
    from tuner.run.webhook import Webhook


RunRanks = Callable[..., dict[str, Any]]
"""Such as `runtime.spawn.run_ranks`."""


@dataclass(frozen=True)
class Placement:
    """The processes of a command: this one is `rank_info` of them, or starts `local` ranks and takes no part."""

    rank_info: RankInfo
    local: int = 1
    on_each: int | None = None
    """Of a Ray cluster, how many are on one machine."""
    run: RunRanks | None = None
    """What starts them, where that is not this machine's."""

    @staticmethod
    def of(recipe: Recipe) -> Placement:
        """This process's part among those of torchrun or srun; else as many local ranks as the recipe asks for."""
        if RankInfo.is_given():
            return Placement(RankInfo.from_environment())
        return Placement(RankInfo(), local_processes(recipe.parallel, recipe.train.device))

    @property
    def planned(self) -> RankInfo:
        """The first of the processes, for what is only planned here."""
        return self.rank_info if self.local == 1 else RankInfo(0, self.local, 0, self.on_each or self.local)

    def check(self, loaded: LoadedRecipe) -> None:
        """Raise RecipeError where the global batch does not divide into the ranks that are to be started here."""
        if self.local > 1:
            recipe = with_whole_batches(loaded, self.local).recipe
            require_groups(recipe, self.planned)
            check_division(recipe, self.local)


def launch(
    loaded: LoadedRecipe, options: LaunchOptions, own_process: bool = False, status: RunStatus | None = None
) -> RunResult:
    """Train the recipe, in as many processes as it asks for, with its exports during and after the run.

    Where ranks start here, this process checks the recipe and the run directory and prepares the data, and takes no
    part in training. A single one is this process, or with ``own_process`` one of its own. ``status`` is what the
    command saw of the run directory, which is looked at here without it. Raises TunerError children,
    with the failing rank's message and exit code; once the run is complete, the error of an export that failed; and
    KeyboardInterrupt.
    """
    require_one_run(loaded.recipe.ladder)
    if not startup.is_begun():
        startup.begin()
    with _placed(loaded.recipe, options.on) as place:
        loaded, main = _as_resumed(loaded, place.planned.world_size), place.rank_info.is_main
        place.check(loaded)
        console = Console(main, options.level)
        if options.dry_run:
            return train(loaded, options, place.planned, console, status=status)
        with _webhook(loaded.recipe, console, main) as webhook, exports_of(loaded, console) as exporter:
            if place.local == 1 and not own_process and place.run is None:
                result = train(loaded, options, place.rank_info, console, exporter, status)
            else:
                result = _train_in_ranks(loaded, options, place, console, status)
            if exporter is not None and main:
                exporter.finish(result)
            if webhook is not None:
                webhook.ended(result)
        return result


@contextmanager
def _placed(recipe: Recipe, on: Literal["here", "ray"]) -> Iterator[Placement]:
    """Where the processes of a launch are; those of a Ray cluster for as long as this process has joined it."""
    if on == "here":
        yield Placement.of(recipe)
        return
    if RankInfo.is_given():
        said = "--on ray starts processes itself, and torchrun or srun started this one as one of several"
        raise RecipeError(said, hint="start the command once, or leave out --on ray")
    from tuner.runtime.ray_cluster import cluster_for, run_ranks

    section = recipe.parallel
    wanted = None if section.processes == "auto" else section.processes
    with cluster_for(wanted, recipe.train.device) as layout:
        run = partial(run_ranks, layout, section.timeout.seconds)
        yield Placement(RankInfo(), layout.ranks, layout.on_each, run)


def _as_resumed(loaded: LoadedRecipe, processes: int) -> LoadedRecipe:
    """The recipe with what its run settled, as far as these processes can keep to it."""
    record = RunDir(Path(loaded.recipe.output_dir)).read_record()
    return reopened(record, with_batch_of(record, loaded), processes)


def _train_in_ranks(
    loaded: LoadedRecipe, options: LaunchOptions, place: Placement, console: Console, status: RunStatus | None
) -> RunResult:
    from tuner.runtime.spawn import run_ranks

    processes = place.local
    with console.doing("checking the run directory and the data"):
        ready = preflight(loaded, options, console, status)
    if isinstance(ready, RunResult):
        return ready
    logs = ready.status.run.logs
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"{logs}: {error.strerror}", hint="choose an output_dir that can be written") from error
    checkpoint = None if ready.status.checkpoint is None else ready.status.checkpoint.path
    settled = None
    if place.run is None:
        where = LaunchData.of(ready.data_dir, ready.spec.cache_dir, is_planned=False, starts=True)
        settled = settled_for(ready, loaded, place.planned, where, console)
    parts = {part.name: plain for part in ready.parts if (plain := part.handed_over()) is not None}
    given = HandedOver(ready.data_dir.absolute(), checkpoint, tuple(command_line()), settled, parts)
    job = JOB.dump_python(RankJob.of(loaded, replace(options, handed_over=given)), mode="json")
    says = f"starting {processes} process{'es' if processes > 1 else ''}" if console.is_heard else ""
    return RESULT.validate_python((place.run or run_ranks)(train_rank, job, processes, logs, says))


def local_processes(section: ParallelSection, device: str) -> int:
    """How many processes a launch without a launcher's variables has: `auto` is one for each CUDA device, at least one.

    Asks the driver for the number of devices alone, so that this process takes no memory of any.
    """
    if section.processes != "auto":
        return section.processes
    return 1 if device == "cpu" else max(1, torch.cuda.device_count())


@contextmanager
def _webhook(recipe: Recipe, console: Console, main: bool) -> Iterator[Webhook | None]:
    """What sends the launch's end to a webhook; None, and nothing imported, where there is none."""
    address = recipe.notify.webhook or os.environ.get(WEBHOOK_VARIABLE)
    if not address or not main:
        yield None
        return
    from tuner.run.webhook import Webhook

    webhook = Webhook(recipe.notify, address, Path(recipe.output_dir), recipe.name, console)
    with webhook, undone(webhook.interrupted):
        yield webhook
