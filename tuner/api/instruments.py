"""What recipes take and whether runs are what they should be; predicted and proven."""

from collections.abc import Sequence
from pathlib import Path

from tuner.api.given import RecipeSource, absolute, console_of, loaded_of
from tuner.config.ladder import require_one_run
from tuner.config.load import LoadedRecipe
from tuner.profile.choose import predict_settled
from tuner.profile.fit import fit as find
from tuner.profile.predict import Target
from tuner.profile.prediction import Prediction
from tuner.profile.search import Choice
from tuner.prove.prove import Proven
from tuner.prove.prove import prove as prove_layouts
from tuner.run.measure import target_of
from tuner.run.verify import ResumeProof
from tuner.run.verify import verify_resume as verify
from tuner.setup.settled import with_whole_batches


def profile(
    recipe: RecipeSource, device: str | None = None, processes: str | None = None, memory: str | None = None
) -> Prediction:
    """Predict the memory and time of a recipe, as `tuner profile` does: for `device`, such as ``"h100-80g"``."""
    found = loaded_of(recipe)
    return predict_settled(found, _target(found, device, processes, memory))[1]


def fit(
    recipe: RecipeSource, memory: str | None = None, device: str | None = None, processes: str | None = None,
    quiet: bool = False,
) -> list[Choice]:
    """Find settings that fit into so much memory for each process, such as ``"24GiB"``, the fastest first.

    Without ``memory`` it is that of the device. Raises MemoryLimitError where nothing fits.
    """
    found, console = loaded_of(recipe), console_of("info", quiet)
    target = _target(found, device, processes, memory)
    whole = with_whole_batches(found, target.rank_info.world_size).recipe
    return find(whole, target, lambda line: console.say("tried", line)).choices


def _target(loaded: LoadedRecipe, device: str | None, processes: str | None, memory: str | None) -> Target:
    require_one_run(loaded.recipe.ladder)
    return target_of(loaded.recipe, device, processes, memory)


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
