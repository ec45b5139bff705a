"""`tuner ladder`: one recipe at several sizes - planned, trained, and compared at its marks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.cli.command import Outcome, RecipeArgument, VerboseOption, command, load_for_command, overrides_of
from tuner.cli.ladder_fit import fit
from tuner.cli.ladder_view import drawn, ladder_path, marks_document, plan_table, rung_names, status_table
from tuner.errors import RecipeError, counted

if TYPE_CHECKING:
    from tuner.config.load import LoadedRecipe
    from tuner.ladder.rungs import Rung
    from tuner.runtime.console import Console

MOST_COLUMNS = 100
LADDER = "Recipe of the ladder, or the directory that holds its rungs; default ./recipe.yaml."
LadderArgument = Annotated[str | None, typer.Argument(metavar="[LADDER]", help=LADDER)]
RungOption = Annotated[
    str | None, typer.Option(metavar="RUNG", help="One rung alone: its name, or its number from 1, as job arrays have.")
]
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.command()
@command("ladder plan")
def plan(
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    rung: RungOption = None,
    device: Annotated[
        str | None,
        typer.Option(help="Predict for this device, e.g. h100-80g or cpu; default: the one in this machine."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the prediction of memory and time.")] = False,
    verbose: VerboseOption = False,
) -> Outcome:
    """Print sizes, batches, processes, steps, tokens, FLOPs, memory and time of every rung; nothing is trained."""
    loaded = _ladder_recipe(ctx, recipe)
    console = _console(loaded, verbose)
    with console.doing("loading torch", at_once=True):
        from tuner.ladder.plan import PlannedRung, predicted
        from tuner.ladder.rungs import rungs_of
    with console.doing("building models without storage"):
        every = rungs_of(loaded)
    chosen = _chosen(every, rung)
    planned = []
    for one in chosen:
        with console.doing(f"predicting {one.name}"):
            planned.append(PlannedRung(one) if quick else predicted(one, device))
    width = min(MOST_COLUMNS, shutil.get_terminal_size().columns)
    last = chosen[-1]
    table, curve = plan_table([one.plain() for one in planned]), drawn(last.name, last.loaded.recipe, width)
    return Outcome(
        f"{table}\n\n{curve}",
        artifacts={"rungs": [one.plain() for one in planned], "directory": loaded.recipe.output_dir},
        metrics={"rungs": len(planned), "flops": sum(one.flops for one in planned)},
        warnings=[warning for one in planned for warning in one.warnings],
        next=f"tuner ladder run {_shown(loaded)}",
        is_text=True,
    )


@app.command()
@command("ladder run")
def run(
    ctx: typer.Context, recipe: RecipeArgument = None, rung: RungOption = None, verbose: VerboseOption = False
) -> Outcome:
    """Train every rung that is not done, or one, and resume what was stopped or killed; rungs that are done stay."""
    loaded = _ladder_recipe(ctx, recipe)
    console = _console(loaded, verbose)
    with console.doing("loading libraries", at_once=True):
        from tuner.ladder.launch import run_rungs
        from tuner.ladder.plan import ladder_of
        from tuner.ladder.record import as_started, write_ladder
        from tuner.ladder.rungs import rungs_of
        from tuner.runtime.dist import RankInfo
    with console.doing("planning the rungs"):
        every = rungs_of(loaded)
    chosen = _chosen(every, rung)
    directory = Path(loaded.recipe.output_dir)
    ladder = as_started(ladder_of(directory, str(loaded.recipe.name), every))
    if RankInfo.from_environment().is_main:
        write_ladder(ladder)
    for one in chosen:
        if one.batch.warning is not None:
            console.warn(f"{one.name}: {one.batch.warning}")
    level = "debug" if verbose else loaded.recipe.logging.level
    results = run_rungs(chosen, level, lambda one: _announce(console, one, every))
    for each in results:
        if each.was_done:
            console.say("skipped", f"{each.rung.name}: done, {counted(each.result.total_steps, 'step')}")
    artifacts = {"rungs": {each.rung.name: str(each.result.run_dir) for each in results}}
    metrics = {each.rung.name: each.result.metrics | {"step": each.result.step} for each in results}
    if results[-1].stopped:
        console.say("stopped", f"{results[-1].rung.name}: resume with: tuner ladder run {_shown(loaded)}")
        return Outcome(str(directory), "stopped", 75, artifacts, metrics, next=f"tuner ladder run {_shown(loaded)}")
    return Outcome(str(directory), artifacts=artifacts, metrics=metrics, next=f"tuner ladder metrics {directory}")


@app.command()
@command("ladder status")
def status(ctx: typer.Context, ladder: LadderArgument = None) -> Outcome:
    """List the rungs: how far each is, which of its marks are reached, and the loss at the newest of them."""
    from tuner.ladder.record import read_ladder
    from tuner.ladder.status import statuses

    found = statuses(read_ladder(ladder_path(ladder, overrides_of(ctx))))
    done = sum(one["status"] == "finished" for one in found)
    metrics = {"rungs": len(found), "finished": done}
    return Outcome(status_table(found), artifacts={"rungs": found}, metrics=metrics, is_table=True)


@app.command()
@command("ladder metrics")
def metrics(ctx: typer.Context, ladder: LadderArgument = None) -> Outcome:
    """Print what was measured at each mark, before and after each decay, as CSV; with --json as JSON."""
    from tuner.ladder.marks import marks_csv, read_marks
    from tuner.ladder.record import read_ladder

    marks = read_marks(read_ladder(ladder_path(ladder, overrides_of(ctx))))
    text = marks_csv(marks).removesuffix("\n")
    return Outcome(text, artifacts={"marks": marks_document(marks)}, metrics={"marks": len(marks)}, is_table=True)


app.command()(fit)

def _ladder_recipe(ctx: typer.Context, recipe: str | None) -> LoadedRecipe:
    loaded = load_for_command(recipe, overrides_of(ctx))
    if not loaded.recipe.ladder.sizes:
        raise RecipeError(
            "this recipe has no ladder: it names no ladder.sizes",
            hint="write ladder: {sizes: [60M, 190M]}, or train it alone: tuner train RECIPE",
        )
    return loaded


def _chosen(rungs: Sequence[Rung], wanted: str | None) -> Sequence[Rung]:
    if wanted is None:
        return rungs
    from tuner.ladder.record import find_rung

    return [rungs[find_rung(rung_names(rungs), wanted)]]


def _announce(console: Console, rung: Rung, every: Sequence[Rung]) -> None:
    place = rung_names(every).index(rung.name) + 1
    console.say("rung", f"{rung.name}, {place} of {len(every)}: {rung.parameters:,} parameters without embeddings")


def _console(loaded: LoadedRecipe, verbose: bool) -> Console:
    from tuner.runtime.console import Console
    from tuner.runtime.dist import RankInfo

    level: Any = "debug" if verbose else loaded.recipe.logging.level
    return Console(RankInfo.from_environment().is_main, level)


def _shown(loaded: LoadedRecipe) -> str:
    """The recipe as it was given, for a command to type."""
    path = loaded.path
    if path is None:
        return "RECIPE"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
