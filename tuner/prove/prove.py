"""`tuner prove`: every layout of a recipe against one process, on a small model, in float32."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.config.recipe import Recipe
from tuner.errors import MachineError, RecipeError, VerificationError
from tuner.prove.compare import Proof, Verdict, unequal
from tuner.prove.layouts import ALONE, Layout, laid_out, layouts_of
from tuner.prove.processes import Failure, in_processes
from tuner.prove.training import Setting, train_layout, train_plain
from tuner.prove.twin import Twin, make_twin
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import scratch_dir
from tuner.setup.specs import mesh_of, meta_model_of

STEPS = 20


@dataclass(frozen=True)
class Proven:
    """What was found of all layouts, in the order in which they were asked for."""

    proofs: tuple[Proof, ...]
    assumptions: tuple[str, ...]

    @property
    def wrong(self) -> tuple[Proof, ...]:
        """Those that are not what one process computes, or that failed."""
        return tuple(proof for proof in self.proofs if proof.verdict in {"unequal", "failed"})


def prove(recipe: Recipe, steps: int, layouts: Sequence[str], say: Callable[[str], None]) -> Proven:
    """Train a small model of a recipe's architecture in one process, then under each layout, and compare.

    ``layouts`` are names (:func:`~tuner.prove.layouts.parse`); none means the recipe's own and all known ones. ``say``
    gets a line for each that is done. Raises RecipeError where no small model can be made, and VerificationError where
    one process cannot train it.
    """
    if RankInfo.is_given():
        raise RecipeError("prove starts its processes itself", hint="run it without torchrun or srun")
    chosen = layouts_of(recipe.parallel, layouts)
    with scratch_dir("tuner-prove-") as place:
        (place / "model").mkdir()
        twin = make_twin(recipe, place / "model")
        setting = Setting(twin, steps, place)
        meta_model_of(twin.resolved(ALONE))  # imports its class: forked processes have it then
        found = {layout: proof for layout in chosen if (proof := refused(twin, layout)) is not None}
        left = [layout for layout in chosen if layout not in found]
        if left:
            train_alone(setting)
            say("one process trained")
        for layout, proof in proofs_of(setting, left):
            found[layout] = proof
            say(f"{layout.name}: {proof.verdict}")
    return Proven(tuple(found[layout] for layout in chosen), twin.assumptions)


def refused(twin: Twin, layout: Layout) -> Proof | None:
    """Why a layout is not possible for a model, or not supported, as far as shows before a process starts."""
    try:
        laid_out(twin.own, layout)  # where the small model leaves out what the recipe's rules refuse
        mesh_of(twin.resolved(layout).recipe, layout.rank_info(0))
    except (RecipeError, MachineError) as error:
        return Proof(layout.name, layout.processes, "refused", cause=_reason(error))
    return None


def _reason(error: RecipeError | MachineError) -> str:
    """The reason alone, without where in a recipe that nobody wrote it stands."""
    problems = error.problems if isinstance(error, RecipeError) else ()
    return problems[0].message if problems else error.message


def train_alone(setting: Setting) -> None:
    """Train the small model in one process of its own. Raises VerificationError where that fails."""

    def work(job: int, rank: int) -> None:
        train_plain(setting)

    (setting.place / "alone").mkdir()
    for answer in in_processes(1, 1, work, setting.place / "alone"):
        if isinstance(answer, Failure):
            raise VerificationError(
                f"one process cannot train the small model: {answer.message}", hint="tuner train shows it on its own"
            )


def proofs_of(setting: Setting, layouts: Sequence[Layout]) -> Iterator[tuple[Layout, Proof]]:
    """The proofs of layouts, those with as many processes one after the other in the same group."""
    for processes in sorted({layout.processes for layout in layouts}):
        some = [layout for layout in layouts if layout.processes == processes]
        place = Path(tempfile.mkdtemp(prefix=f"of-{processes}-", dir=setting.place))

        def work(job: int, rank: int, some: list[Layout] = some, place: Path = place) -> dict[str, Any]:
            return _answer(setting, some[job], rank, place)

        answers = in_processes(processes, len(some), work, place)
        yield from ((layout, _proof(layout, answer)) for layout, answer in zip(some, answers, strict=True))


def _answer(setting: Setting, layout: Layout, rank: int, place: Path) -> dict[str, Any]:
    try:
        figures, cause = train_layout(setting, layout, rank, place)
    except RecipeError as error:  # raised on every rank, before anything is computed
        return {"refused": _reason(error)}
    return {"figures": {name: str(value) for name, value in figures.items()}, "cause": cause}


def _proof(layout: Layout, answer: Any) -> Proof:
    if isinstance(answer, Failure):
        return Proof(layout.name, layout.processes, "failed", cause=answer.message)
    if "refused" in answer:
        return Proof(layout.name, layout.processes, "refused", cause=answer["refused"])
    figures = {name: float(value) for name, value in answer["figures"].items()}
    verdict: Verdict = "unequal" if unequal(figures) else "equal"
    return Proof(layout.name, layout.processes, verdict, figures, answer["cause"])
