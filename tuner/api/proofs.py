"""Layouts and checkpoints, held against what they stand for."""

from collections.abc import Sequence
from pathlib import Path

from tuner.api.given import RecipeSource, absolute, console_of, loaded_of
from tuner.config.ladder import require_one_run
from tuner.prove.prove import Proven
from tuner.prove.prove import prove as prove_layouts
from tuner.run.verify import ResumeProof
from tuner.run.verify import verify_resume as verify


def prove(recipe: RecipeSource, steps: int = 20, layouts: Sequence[str] = (), quiet: bool = False) -> Proven:
    """Hold layouts of a recipe against one process, on a small model of its architecture and this machine's CPU.

    ``layouts`` are names such as ``"fsdp2+tp2"``; without any, the recipe's own and all known ones are proven. The
    result's ``wrong`` holds those that are not what one process computes.
    """
    found, console = loaded_of(recipe).recipe, console_of("info", quiet)
    require_one_run(found.ladder)
    return prove_layouts(found, steps, layouts, lambda line: console.say("proven", line))


def verify_resume(run: str | Path, steps: int = 2, quiet: bool = False) -> ResumeProof:
    """Prove that a run resumes exactly on this machine. Raises VerificationError with the first difference."""
    return verify(absolute(run), steps, console_of("info", quiet))
