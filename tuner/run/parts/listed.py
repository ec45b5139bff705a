"""The parts of launches, in the order in which they are asked, and which recipes ask for each."""

from collections.abc import Callable

from tuner.config.methods import DistillMethod
from tuner.config.optimizers import keeps_states_on_host
from tuner.config.recipe import Recipe
from tuner.run.parts.cores import Cores
from tuner.run.parts.ends import EndAt
from tuner.run.parts.exactness import Exactness
from tuner.run.parts.initial_weights import InitialWeights
from tuner.run.parts.kernels import Kernels
from tuner.run.parts.length_warmup import LengthWarmup
from tuner.run.parts.local_loss import LocalLosses
from tuner.run.parts.mark_metrics import MarkMetrics
from tuner.run.parts.memory_history import MemoryHistory
from tuner.run.parts.mock_batch import MockBatch
from tuner.run.parts.offload import Offload
from tuner.run.parts.own_code import OwnCode
from tuner.run.parts.part import Part
from tuner.run.parts.reference import Reference
from tuner.run.parts.skipped_steps import SkippedSteps
from tuner.run.parts.store import Store
from tuner.run.parts.teacher import Teacher
from tuner.run.parts.windows import Windows


def _may_offload(recipe: Recipe) -> bool:
    """Unless the recipe says that nothing goes to the host: an `auto` may still become one."""
    on_host = recipe.parallel.offload == "host" or keeps_states_on_host(recipe.optimizer)
    return on_host or recipe.train.offload_activations is not False


PARTS: dict[type[Part], Callable[[Recipe], object]] = {
    Store: Store.wanted,  # what the others leave behind is published, too
    OwnCode: lambda recipe: True,  # the method and the schedule say themselves whether they are the user's
    Cores: lambda recipe: recipe.parallel.numa_binding != "none",
    MemoryHistory: lambda recipe: recipe.profile.memory == "all",
    Exactness: lambda recipe: recipe.train.deterministic or recipe.train.tf32,
    InitialWeights: lambda recipe: recipe.model.init_from,
    Kernels: lambda recipe: recipe.train.device != "cpu",
    Reference: lambda recipe: True,  # a method of the user's own says what it needs once it is built
    Teacher: lambda recipe: isinstance(recipe.method, DistillMethod),
    Windows: lambda recipe: recipe.data.windows.is_on,
    Offload: _may_offload,
    LengthWarmup: lambda recipe: recipe.train.length_warmup.is_on,
    MockBatch: lambda recipe: recipe.train.mock_batch is not False,
    SkippedSteps: lambda recipe: recipe.train.steps_to_skip,
    EndAt: lambda recipe: recipe.train.end_at is not None,
    MarkMetrics: lambda recipe: recipe.eval.marks or recipe.checkpoint.marks or recipe.checkpoint.at_start,
    LocalLosses: lambda recipe: recipe.logging.metrics_of == "all",
}


def parts_of(recipe: Recipe) -> tuple[Part, ...]:
    """The parts that a launch of a recipe has, new ones."""
    return tuple(part(recipe) for part, asks in PARTS.items() if asks(recipe))
