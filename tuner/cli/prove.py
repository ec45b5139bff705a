"""`tuner prove`: hold every layout of a recipe against one process before it is trusted with a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.command import Outcome, RecipeArgument, VerboseOption, command, load_for_command, overrides_of
from tuner.cli.table import fitted
from tuner.errors import ExitCode, RecipeError

if TYPE_CHECKING:
    from tuner.config.load import LoadedRecipe
    from tuner.prove.compare import Proof
    from tuner.prove.prove import Proven

COLUMNS = {
    "loss": "loss", "grad_norm": "grad norm", "gradients": "gradients", "weights": "weights", "copies": "copies",
    "saved": "saved", "resumed": "resumed",
}  # fmt: skip
"""What is compared, and its column."""
HINT = "do not train with such a layout; docs/prove.md says what each column compares"


@command("prove")
def prove(
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    steps: Annotated[int, typer.Option(min=2, max=1000, help="Steps that each layout trains.")] = 20,
    layouts: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Layouts to prove, such as fsdp4,fsdp2+tp2; default: the recipe's own and all others."
        ),
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Hold the model itself, with its weights, to its class; no layouts.")
    ] = False,
    verbose: VerboseOption = False,
) -> Outcome:
    """Train a small model of the recipe's architecture on this CPU under every layout, each against one process.

    Losses, gradients, norms, weights, copies and checkpoints are compared. Exit code 6 where any is unequal.
    """
    loaded = load_for_command(recipe, overrides_of(ctx))
    if weights:
        return _weights(loaded, verbose)
    names = [] if layouts is None else [name.strip() for name in layouts.split(",") if name.strip()]
    if layouts is not None and not names:
        raise RecipeError("--layouts: names no layout", hint="write some, such as fsdp2,tp2")
    from tuner.config.ladder import require_one_run
    from tuner.runtime.console import LABEL_WIDTH, Console

    require_one_run(loaded.recipe.ladder)
    console = Console(level="debug" if verbose else "info")
    with console.doing("loading torch", at_once=True):
        from tuner.prove.prove import prove as prove_layouts

    with console.doing("training a small model under every layout"):
        found = prove_layouts(loaded.recipe, steps, names, console.debug)
    console.say("twin", "\n".join(found.assumptions))

    lines = table(found)
    console.say("proven", fitted(lines, console.width - LABEL_WIDTH, right=range(1, len(lines[0]) - 1)))
    for proof in found.proofs:
        if proof.cause is not None:
            console.say(proof.verdict, f"{proof.layout}: {proof.cause}")
    return _outcome(found)


def _weights(loaded: LoadedRecipe, verbose: bool) -> Outcome:
    """What a launch proves of short documents, by the whole model with the values that its files have."""
    from tuner.config.ladder import require_one_run
    from tuner.runtime.console import Console

    require_one_run(loaded.recipe.ladder)
    console = Console(level="debug" if verbose else "info")
    with console.doing("loading torch", at_once=True):
        from tuner.prove.weights import prove_weights

    with console.doing("holding the model to its class"):
        report, route = prove_weights(loaded.recipe)
    found = {"leak": report.leak, "against_alone": report.against_alone, "route": route}
    said = f"a document moves another by {report.leak:.1e}, and is {report.against_alone:.1e} from the model alone"
    return Outcome(f"weights: {said}", metrics=found, is_text=True)


def table(found: Proven) -> list[list[str]]:
    """The layouts that were trained, one a line, what is furthest apart in each column, and the verdict."""
    rows = [_cells(proof) for proof in found.proofs if proof.verdict != "refused"]
    return [["layout", *COLUMNS.values(), "verdict"], *rows]


def _cells(proof: Proof) -> list[str]:
    from tuner.prove.compare import EXACT, unequal

    wrong = unequal(proof.figures)

    def cell(name: str) -> str:
        if name not in proof.figures:
            return "-"
        figure = proof.figures[name]
        shown = f"{figure:.0e}" if name not in EXACT else "differ" if figure else "equal"
        return f"{shown} !" if name in wrong else shown

    return [proof.layout, *map(cell, COLUMNS), proof.verdict]


def _outcome(found: Proven) -> Outcome:
    counts = {verdict: sum(proof.verdict == verdict for proof in found.proofs) for verdict in VERDICTS}
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    metrics = {"layouts": [proof.as_json() for proof in found.proofs], **counts, "assumptions": [*found.assumptions]}
    outcome = Outcome(f"layouts: {said}", metrics=metrics, is_text=True)
    if found.wrong:
        first = found.wrong[0]
        outcome.status, outcome.exit_code = "failed", int(ExitCode.VERIFICATION)
        message = f"{first.layout} is not what one process computes: {first.cause}"
        outcome.error = {"type": "VerificationError", "message": message, "hint": HINT}
    return outcome


VERDICTS = ("equal", "unequal", "failed", "refused")
"""In the order in which they are counted."""
