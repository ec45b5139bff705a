"""What a ladder says about a size that was not trained: the law, its error on rungs left out, losses and scores."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tuner.errors import DataError, RecipeError
from tuner.ladder.fit import Estimate, LawFit, Settings
from tuner.ladder.held_out import LadderHeldOut, compared, fit_widened
from tuner.ladder.law import NEEDED_SIZES, LawForm, form_of
from tuner.ladder.points import LOSS, Point, Size, by_rung, require_figure, short, with_figure
from tuner.ladder.score import ScoreFit, fit_score

FAR = 10.0
"""How many times the FLOPs of the largest point a target may have before that is said."""


@dataclass(frozen=True)
class ForecastQuestion:
    """What is asked: the loss and scores by their figures, and a target, by a rung's name or a size."""

    settings: Settings = field(default_factory=Settings)
    loss: str = LOSS
    scores: tuple[str, ...] = ()
    chance: float | None = None
    rung: str | None = None
    size: Size | None = None


@dataclass(frozen=True)
class Forecast:
    """The answer: a fit, each rung predicted from the others, and the target with its scores.

    `target` was left out of the fit where it was trained: `checked` has it next to what was measured.
    """

    fit: LawFit
    left_out: list[LadderHeldOut]
    scores: list[ScoreFit]
    target: Size | None
    loss: Estimate | None
    predicted_scores: dict[str, Estimate]
    measured_scores: dict[str, float]
    checked: LadderHeldOut | None
    notes: list[str]


def forecast(points: Sequence[Point], question: ForecastQuestion) -> Forecast:
    """Fit and predict. Raises RecipeError for figures and rungs that are not there, DataError for too few points."""
    measured = with_figure(points, question.loss)
    missing = len(points) - len(measured)
    notes = [f"{missing} points have no finite {question.loss} above 0 and are left out"] if missing else []
    own = _own_points(measured, question.rung)
    rest = [point for point in measured if point.rung != question.rung]
    decayed = [point for point in rest if point.is_decayed]
    if len(decayed) < len(rest):
        notes.append(
            f"{len(rest) - len(decayed)} points before the decay of the learning rate are not fitted by the law"
        )
    target = own[-1].size if own else question.size
    if target is not None:
        _require_on_line(form_of(decayed), target)
        notes += _far(decayed, target)
    for figure in question.scores:
        require_figure(rest, figure)  # a misspelt one is said before the fit, which takes seconds
    law, left_out = fit_widened(decayed, question.loss, question.settings, NEEDED_SIZES)
    loss = None if target is None else law.predict([target])[0]
    scores, predicted = [], {}
    for figure in question.scores:
        try:
            fit = fit_score(rest, question.loss, figure, question.settings, question.chance)
        except DataError as error:
            notes.append(f"no sigmoid of {figure}: {error.message}")
            continue
        scores.append(fit)
        if target is not None and loss is not None:
            predicted[figure] = fit.predict(law.draws([target])[:, 0], loss.value)
    return Forecast(
        fit=law,
        left_out=left_out,
        scores=scores,
        target=target,
        loss=loss,
        predicted_scores=predicted,
        measured_scores={name: own[-1].figures[name] for name in predicted if own and name in own[-1].figures},
        checked=compared(law, own) if own else None,
        notes=notes,
    )


def _own_points(points: Sequence[Point], rung: str | None) -> list[Point]:
    """The decayed points of the rung that is asked about, by tokens."""
    if rung is None:
        return []
    rungs = by_rung([point for point in points if point.is_decayed])
    if rung not in rungs:
        raise RecipeError(f"no rung {rung} has a loss", hint=f"there are: {', '.join(rungs)}")
    return rungs[rung]


def _require_on_line(form: LawForm, target: Size) -> None:
    """Raise DataError where the law says nothing about a target."""
    if form.line is not None and not form.is_on_line(target):
        raise DataError(
            f"every point has {form.line.words()}: nothing says what a model of {short(target.parameters)} reaches "
            f"after {short(target.tokens)} tokens",
            hint="ask for a size on that line, or train rungs at several multiples of tokens",
        )


def _far(points: Sequence[Point], target: Size) -> list[str]:
    most = max(point.size.flops for point in points)
    if target.flops <= FAR * most:
        return []
    times = f"{target.flops / most:,.0f} times the FLOPs of the largest point"
    return [f"the target has {times}: no rung that was left out tested such a distance"]
