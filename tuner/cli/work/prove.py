"""What `tuner prove` does and shows: layouts held against one process, or a model against its class."""

from collections.abc import Sequence

from tuner.cli.command import Outcome
from tuner.cli.output import fitted
from tuner.config.load import LoadedRecipe
from tuner.errors import ExitCode
from tuner.prove.compare import EXACT, LayoutProof, unequal
from tuner.prove.prove import Proven, prove
from tuner.prove.training import prove_weights
from tuner.runtime.console import LABEL_WIDTH, Console

COLUMNS = {
    "loss": "loss", "grad_norm": "grad norm", "gradients": "gradients", "weights": "weights", "copies": "copies",
    "saved": "saved", "resumed": "resumed",
}  # fmt: skip
"""What is compared, and its column."""
HINT = "do not train with such a layout; docs/prove.md says what each column compares"


def layouts(loaded: LoadedRecipe, steps: int, names: Sequence[str], console: Console) -> Outcome:
    """Train under every layout and show what each column is off by."""
    with console.doing("training a small model under every layout"):
        found = prove(loaded.recipe, steps, names, console.debug)
    console.say("twin", "\n".join(found.assumptions))

    lines = table(found)
    console.say("proven", fitted(lines, console.width - LABEL_WIDTH, right=range(1, len(lines[0]) - 1)))
    for proof in found.proofs:
        if proof.cause is not None:
            console.say(proof.verdict, f"{proof.layout}: {proof.cause}")
    return _outcome(found)


def weights(loaded: LoadedRecipe, console: Console) -> Outcome:
    """What a launch proves of short documents, by the whole model with the values that its files have."""
    with console.doing("holding the model to its class"):
        report, route = prove_weights(loaded.recipe)
    found = {"leak": report.leak, "against_alone": report.against_alone, "route": route}
    said = f"a document moves another by {report.leak:.1e}, and is {report.against_alone:.1e} from the model alone"
    return Outcome(f"weights: {said}", metrics=found, is_text=True)


def table(found: Proven) -> list[list[str]]:
    """The layouts that were trained, one a line, what is furthest apart in each column, and the verdict."""
    rows = [_cells(proof) for proof in found.proofs if proof.verdict != "refused"]
    return [["layout", *COLUMNS.values(), "verdict"], *rows]


def _cells(proof: LayoutProof) -> list[str]:
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
