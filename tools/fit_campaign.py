"""How often intervals of a fit hold what they are about: ladders of known laws, drawn many times.

    python -m tools.fit_campaign [--trials 40] [--samples 200]

Each case is a shape of ladder with a kind of noise. Points are drawn, fitted with intervals of 90 %, and the loss of a
run ten times as large as the largest rung is drawn too. Printed is how often the interval of that run held it, how
often those of E, a and b held theirs where they were identified, and the median error and width of the prediction.
Exits with 1 where fewer than 82 % of the runs were held (70 % where noise is shared by the marks of a rung) or, for
normal noise of points alone, more than 99 %.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from tests.ladder.made import SIZES, Truth, ladder
from tools.commands import asked
from tuner.ladder.fit import NEEDED_SIZES, Settings, parameters_of
from tuner.ladder.forecast import fit_widened
from tuner.ladder.points import Point, Size

LEVEL, LEAST, MOST = 0.9, 0.82, 0.99
LEAST_SHARED = 0.7
"""Of noise that all marks of a rung share: few rungs say little about it, and the page of the command says so."""


@dataclass(frozen=True)
class Case:
    """A shape of ladder, and how log L of its points deviates."""

    name: str
    sizes: tuple[float, ...]
    multiples: tuple[float, ...]
    of_points: float = 0.0
    of_rungs: float = 0.0
    tails: float = math.inf
    """Degrees of freedom of Student's noise of points: few of them make outliers."""


SMALL = tuple(1e5 * 2.4**i for i in range(5))
CASES = (
    Case("6 rungs, 4 marks", SIZES, (0.5, 1, 2, 4), 0.003),
    Case("4 rungs, 4 marks", SIZES[:4], (0.5, 1, 2, 4), 0.003),
    Case("5 small rungs, 3 marks", SMALL, (1, 2, 4), 0.005),
    Case("12 rungs, 5 marks", tuple(5e7 * 1.5**i for i in range(12)), (0.5, 1, 2, 4, 8), 0.005),
    Case("6 rungs on a line", SIZES, (1,), 0.003),
    Case("outliers", SIZES, (0.5, 1, 2, 4), 0.003, tails=2.5),
    Case("noise of whole rungs", SIZES, (0.5, 1, 2, 4), 0.002, 0.004),
)


def main() -> int:
    """Print the table."""
    options = asked(__doc__, trials=40, samples=200)
    print(f"{'case':24} {'run held':>9} {'E':>5} {'a':>5} {'b':>5} {'identified':>11} {'error':>7} {'width':>7}")
    failed = False
    for case in CASES:
        found = [trial(case, seed, options.samples) for seed in range(options.trials)]
        held = sum(one.is_held for one in found) / len(found)
        of_parameters = " ".join(f"{share([one.parameters.get(name) for one in found]):>5}" for name in "Eab")
        known = sum(len(one.parameters) for one in found) / (3 * len(found))
        errors, widths = np.median([abs(one.error) for one in found]), np.median([one.width for one in found])
        print(f"{case.name:24} {held:9.1%} {of_parameters} {known:11.0%} {errors:7.2%} {widths:7.2%}", flush=True)
        alone = case.of_rungs == 0 and math.isinf(case.tails)
        failed |= held < (LEAST_SHARED if case.of_rungs else LEAST) or (alone and held > MOST)
    return int(failed)


@dataclass(frozen=True)
class Trial:
    """Whether the interval held the run; of E, a and b that were identified, whether theirs held the truth."""

    is_held: bool
    error: float
    width: float
    parameters: dict[str, bool]


def trial(case: Case, seed: int, samples: int) -> Trial:
    """Draw a ladder and a run beyond it, and fit."""
    truth, random = law_of(case), np.random.default_rng([7, seed])
    exact = ladder(truth, sizes=case.sizes, multiples=case.multiples)
    shifts = {point.rung: case.of_rungs * random.standard_normal() for point in exact}
    points = [noisy(point, shifts[point.rung] + deviation(case, random)) for point in exact]
    size = Size(10 * case.sizes[-1], 200 * case.sizes[-1])
    run = truth.loss(size.parameters, size.tokens)
    run *= math.exp(case.of_rungs * random.standard_normal() + deviation(case, random))
    fit, _ = fit_widened(points, "loss", Settings(LEVEL, samples, seed), NEEDED_SIZES)
    predicted = fit.predict([size])[0]
    true = {"E": truth.constant, "a": truth.parameters_exponent, "b": truth.tokens_exponent}
    known = {one.name: one.value for one in parameters_of(fit) if not one.why and one.name in true}
    known = known if fit.form.line is None else {}  # on a line the one term stands for both
    return Trial(
        predicted.low <= run <= predicted.high,
        predicted.value / run - 1,
        (predicted.high - predicted.low) / run,
        {name: value.low <= true[name] <= value.high for name, value in known.items()},
    )


def law_of(case: Case) -> Truth:
    """Besiroglu's law; for small rungs one whose terms are of that size there."""
    return Truth(0.9, 26.0, 60.0, 0.28, 0.31) if case.sizes == SMALL else Truth()


def deviation(case: Case, random: np.random.Generator) -> float:
    """Of log L, of one point."""
    drawn = random.standard_normal() if math.isinf(case.tails) else random.standard_t(case.tails)
    return case.of_points * float(drawn)


def noisy(point: Point, by: float) -> Point:
    return replace(point, figures={"loss": point.figures["loss"] * math.exp(by)})


def share(held: list[bool | None]) -> str:
    """Of those that were identified."""
    known = [one for one in held if one is not None]
    return f"{sum(known) / len(known):.0%}" if known else "-"


if __name__ == "__main__":
    raise SystemExit(main())
