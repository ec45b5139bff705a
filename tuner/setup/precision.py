"""What a recipe computes in on a device: chosen where that is left open, checked where it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.config.recipe import TrainSection
from tuner.errors import MachineError
from tuner.runtime.device import VOLTA, DeviceFacts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Numerics:
    """How exactly a resolved recipe computes."""

    precision: str
    tf32: bool
    deterministic: bool

    @property
    def products(self) -> str:
        """What products are rounded to: of those in fp32, TF32 where units for it may be used."""
        return "tf32" if self.precision == "fp32" and self.tf32 else self.precision


def precision_for(written: str, facts: DeviceFacts) -> tuple[str, str]:
    """What is computed in, and why. Where that is left open, what the device's units for matrix products take.

    fp8 is never chosen: it changes what is learned more than rounding to bf16 does.
    """
    if written != "auto":
        return written, "as written"
    if facts.bf16_fast:
        return "bf16", f"bf16 is fast on this {facts.kind}"
    if facts.kind == "cuda" and facts.generation >= VOLTA:
        return "fp16", f"{facts.name} has fp16 units and none for bf16; the loss is scaled"
    return "fp32", f"bf16 is slow on this {facts.kind}"


def frozen_dtype(precision: str, facts: DeviceFacts) -> str:
    """The type in which frozen weights are kept for a precision.

    For fp16 as checkpoints have them: bf16, which every use rounds. On a CPU, whose norms take one type alone, they are
    float32, as what is added up from layer to layer.
    """
    if precision == "fp16":
        return "fp32" if facts.kind == "cpu" else "bf16"
    return "bf16" if precision == "fp8" else precision


def kernels_problem(precision: str, dtype: str, facts: DeviceFacts) -> str | None:
    """Why kernels in Triton cannot be left to choose for weights of a type; None where they can."""
    if facts.kind == "cuda" and precision == "fp16" and dtype == "bf16" and not facts.bf16_fast:
        return "frozen weights in bf16, which kernels in Triton take from compute capability 8.0 on"
    return None


def require_precision(precision: str, facts: DeviceFacts) -> None:
    """Raise MachineError for one that a device has no units for; a CPU computes in all of them, if slowly."""
    if precision == "fp8" and facts.kind == "cuda" and not facts.has_fp8:
        raise MachineError(
            f"train.precision: fp8: {facts.name} has no units for it",
            hint="write precision: auto; GPUs have them from compute capability 8.9 on: L4, RTX 4090, H100",
        )


def fp8_reason(train: TrainSection, model: PreTrainedModel) -> dict[str, str]:
    """Which layers of a model multiply in fp8, where that is computed in. Raises RecipeError where none can."""
    if train.precision != "fp8":
        return {}
    from tuner.model.float8 import Float8Layers  # most runs go without

    return {"fp8": Float8Layers.of(model, train.fp8_except).described()}
