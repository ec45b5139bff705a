"""What is computed in: chosen by the device, refused where it has no units, and frozen weights that go with it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.model.tiny import tiny_config
from tests.train.synthetic import MAX_LENGTH, recipe_for
from tuner.errors import ExitCode, MachineError
from tuner.profile.devices import find_device
from tuner.profile.estimate import HALF_REACHED, REACHED, Sizes, StepSetting, computing
from tuner.runtime.device import DeviceFacts
from tuner.runtime.dist import RankInfo
from tuner.setup.machine_torch import _computes
from tuner.setup.resolve import Resolved, resolve
from tuner.setup.specs import step_sections

GIB = 1 << 30
T4 = DeviceFacts("cuda", "Tesla T4", 15 * GIB, 15 * GIB, False, 1, 7)
P100 = DeviceFacts("cuda", "Tesla P100", 16 * GIB, 16 * GIB, False, 1, 6)
A100, H100, L4 = (find_device(name).facts() for name in ("a100-80g", "h100-80g", "l4-24g"))
OLD_CPU = DeviceFacts("cpu", "a processor", 8 * GIB, 8 * GIB, False, 1)
LORA: dict[str, Any] = {"kind": "lora"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_config("llama").save_pretrained(directory)
    return directory


def resolved(model: Path, facts: DeviceFacts, precision: str = "auto", **sections: dict[str, Any]) -> Resolved:
    recipe = recipe_for(model, train={"device": "auto", "precision": precision}, **sections)
    return resolve(recipe, MAX_LENGTH, RankInfo(), facts=facts)


@pytest.mark.parametrize(
    ("facts", "precision"), [(T4, "fp16"), (P100, "fp32"), (A100, "bf16"), (H100, "bf16"), (OLD_CPU, "fp32")]
)
def test_auto_is_what_the_device_is_fast_at(model: Path, facts: DeviceFacts, precision: str) -> None:
    found = resolved(model, facts)
    assert found.recipe.train.precision == precision
    if facts is T4:
        assert found.reasons["train.precision"] == "Tesla T4 has fp16 units and none for bf16; the loss is scaled"
        assert found.recipe.train.compile is True


@pytest.mark.parametrize(
    ("facts", "precision", "dtype"),
    [(T4, "fp16", "bf16"), (OLD_CPU, "fp16", "fp32"), (H100, "fp8", "bf16"), (OLD_CPU, "fp8", "bf16")],
)
def test_frozen_weights_are_as_checkpoints_have_them(
    model: Path, facts: DeviceFacts, precision: str, dtype: str
) -> None:
    found = resolved(model, facts, precision, adapter=LORA)
    assert found.recipe.model.dtype == dtype
    if facts is T4:
        assert (found.recipe.train.compile, found.recipe.model.kernels) == (False, "torch")


@pytest.mark.parametrize("facts", [H100, L4, OLD_CPU])
def test_fp8_says_which_layers(model: Path, facts: DeviceFacts) -> None:
    assert resolved(model, facts, "fp8").reasons["fp8"] == "products of 14 of the decoder's 14 linear layers"


@pytest.mark.parametrize("facts", [A100, T4])
def test_fp8_is_refused_without_units_for_it(model: Path, facts: DeviceFacts) -> None:
    with pytest.raises(MachineError, match=f"train.precision: fp8: {facts.name} has no units for it") as caught:
        resolved(model, facts, "fp8")
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert "write precision: auto" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("facts", "units"),
    [(P100, "fp32"), (T4, "fp32, fp16"), (A100, "fp32, bf16, fp16"), (H100, "fp32, bf16, fp16, fp8")],
)
def test_a_doctor_says_what_there_are_units_for(facts: DeviceFacts, units: str) -> None:
    assert _computes(facts) == units


@pytest.mark.parametrize(("precision", "times"), [("bf16", 1.0), ("fp16", 1.0), ("fp32", 2.0), ("fp8", 0.8)])
def test_the_estimated_time_goes_by_precision(model: Path, precision: str, times: float) -> None:
    """In fp8 four fifths of the arithmetic take three quarters of the time."""
    parts = {"layers": 8e15, "attention": 1e15, "head": 1e15}
    batch = SimpleNamespace(lengths=(8192,), trained_positions=range(8192))
    work: Any = SimpleNamespace(batches=SimpleNamespace(micro=[batch]), tokens_per_row=8192, extra_forwards=0)
    flops: Any = SimpleNamespace(parts=lambda lengths, trained: dict(parts))
    train = {"precision": precision, "gradient_checkpointing": "none", "micro_batch_size": 1, "global_batch_size": 1}
    place = StepSetting(find_device("h100-80g"), RankInfo(), work)
    sections = step_sections(SimpleNamespace(recipe=recipe_for(model, train=train)))  # type: ignore[arg-type]
    found = computing(sections, flops, Sizes(1, 64, 0, ()), place)
    reached = 989.4e12 * REACHED * 8192 / (8192 + HALF_REACHED)
    assert found.seconds == pytest.approx(times * 1e16 / reached, rel=5e-3)
