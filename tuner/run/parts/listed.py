"""The parts of launches, in the order in which they are asked."""

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

PARTS: tuple[type[Part], ...] = (
    Store,  # what the others leave behind is published, too
    OwnCode,
    Cores,
    MemoryHistory,
    Exactness,
    InitialWeights,
    Kernels,
    Reference,
    Teacher,
    Windows,
    Offload,
    LengthWarmup,
    MockBatch,
    SkippedSteps,
    EndAt,
    MarkMetrics,
    LocalLosses,
)


def parts_of(recipe: Recipe) -> tuple[Part, ...]:
    """The parts that a launch of a recipe has, new ones."""
    return tuple(part(recipe) for part in PARTS if part.wanted(recipe))
