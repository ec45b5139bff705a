"""Memory and time of recipes, predicted."""

from tuner.api.given import RecipeSource, console_of, loaded_of
from tuner.config.ladder import require_one_run
from tuner.config.load import LoadedRecipe
from tuner.profile.choose import predict_settled
from tuner.profile.fit import fit as find
from tuner.profile.predict import Target
from tuner.profile.prediction import Prediction
from tuner.profile.search import Choice
from tuner.run.measure import target_of
from tuner.setup.settled import with_whole_batches


def profile(
    recipe: RecipeSource, device: str | None = None, processes: str | None = None, memory: str | None = None
) -> Prediction:
    """Predict the memory and time of a recipe, as `tuner profile` does: for `device`, such as ``"h100-80g"``."""
    found = loaded_of(recipe)
    return predict_settled(found, _target(found, device, processes, memory))[1]


def fit(
    recipe: RecipeSource,
    memory: str | None = None,
    device: str | None = None,
    processes: str | None = None,
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
