"""Steps in fp16: the loss is scaled by torch's rule and nothing shows of it; overflows are left out, everywhere and
exactly.
"""

import copy
import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures import tables
from tests.train.synthetic import assembly_for, recipe_for
from tests.train.test_step import parents
from tuner.errors import DivergedError
from tuner.runtime.dist import RankInfo
from tuner.setup.build import Assembly, run_tensors
from tuner.train import loss_scale
from tuner.train.diagnose import diverged
from tuner.train.guard import Guard, GuardLimits
from tuner.train.loss_scale import FLOOR, INITIAL, LOSS_SCALE, LossScale
from tuner.train.step import StepResult, optimizer_step
from tuner.train.tasks import TakenStep

TRAINED = [1, 20, 3, 15]


def assembled(directory: Path, precision: str = "fp16", **sections: dict[str, Any]) -> Assembly:
    train = {"global_batch_size": 4, "precision": precision, **sections.get("train", {})}
    return assembly_for(recipe_for(directory, **{**sections, "train": train}), TRAINED, RankInfo())


def step(assembly: Assembly, index: int = 0) -> StepResult:
    return optimizer_step(assembly.train_state, index, assembly.batches.step(0), 1.0).read()


def poison(assembly: Assembly) -> Any:
    """Have the gradient of the decoder's output be infinite."""

    def watch(module: object, inputs: object, output: Any) -> None:
        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.register_hook(lambda gradient: gradient * float("inf"))

    return assembly.train_state.root.model.get_decoder().register_forward_hook(watch)


def tensors(assembly: Assembly) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run_tensors(assembly.train_state).items()}


@pytest.mark.parametrize("sections", tables.cases(__file__, "loss_norm_and_clipped_gradients_are_those_of_fp32"))
def test_loss_norm_and_clipped_gradients_are_those_of_fp32(model: Path, sections: dict[str, Any]) -> None:
    sections = {**sections, "train": {"max_grad_norm": 1e-3, **sections.get("train", {})}}
    half, plain = assembled(model, **copy.deepcopy(sections)), assembled(model, "fp32", **without_dtype(sections))
    found, wanted = step(half), step(plain)
    assert found.loss == pytest.approx(wanted.loss, rel=2e-3)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=2e-2)
    assert found.figures == {"loss_scale": INITIAL} and not found.overflowed
    # AdamW's first running average is the gradient it was given, times 1 - beta1.
    given = [tensor / (1 - 0.9) for name, tensor in tensors(half).items() if "/exp_avg/" in name]
    assert torch.nn.utils.get_total_norm(given).item() == pytest.approx(1e-3, rel=1e-3)


def without_dtype(sections: dict[str, Any]) -> dict[str, Any]:
    return {name: values for name, values in sections.items() if name != "model"}


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon", "sgd"])
def test_an_overflow_leaves_out_the_update_of_every_optimizer(model: Path, kind: str) -> None:
    assembly = assembled(model, optimizer={"kind": kind, "lr": 1e-3})
    first = step(assembly)
    before = tensors(assembly)
    handle = poison(assembly)
    found = step(assembly, 1)
    handle.remove()
    assert (found.skipped, found.halted, found.overflowed, found.loss) == (True, False, True, pytest.approx(found.loss))
    after = tensors(assembly)
    assert after.pop(LOSS_SCALE).tolist() == [INITIAL / 2, 0.0] and before.pop(LOSS_SCALE).tolist() == [INITIAL, 1.0]
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    again = step(assembly, 2)
    assert again.figures["loss_scale"] == INITIAL / 2 and not again.skipped
    assert again.loss < first.loss and again.grad_norm == pytest.approx(first.grad_norm, rel=0.5)
    assert assembly.train_state.guard.as_state() == {"judged": 3, "nonfinite": 0, "skipped": 1}


def test_at_its_floor_the_run_has_diverged_and_says_so(model: Path) -> None:
    assembly = assembled(model)
    scale = assembly.train_state.scaling
    assert isinstance(scale, LossScale)
    scale.state[0] = FLOOR
    poison(assembly)
    batches = assembly.batches.step(0)
    scalars = optimizer_step(assembly.train_state, 0, batches, 1.0)
    result = scalars.read()
    assert (result.skipped, result.halted) == (True, True)
    error = diverged(assembly.train_state, TakenStep(0, batches, 0.0, 0, 1e-3, 0.0, scalars), result, None)
    assert isinstance(error, DivergedError)
    assert "with the loss multiplied by 1, the least that fp16 is tried with" in error.message
    assert "65,504" in str(error.hint)


def test_a_run_is_the_same_bits_resumed_from_any_step(model: Path) -> None:
    """With an overflow on the way, and the scale doubled after two steps in which there was none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tuner.train.loss_scale.INTERVAL", 2)
        assembly, states, results = assembled(model), list[Any](), list[StepResult]()
        for index in range(5):
            guard = json.dumps(assembly.train_state.guard.as_state())
            states.append((tensors(assembly), guard))
            handle = poison(assembly) if index == 1 else None
            results.append(step(assembly, index))
            if handle is not None:
                handle.remove()
        wanted = tensors(assembly)
        assert [one.figures["loss_scale"] / INITIAL for one in results] == [1, 1, 0.5, 0.5, 1]
        for start in (2, 3, 4):
            saved, guard = states[start]
            resumed = assembled(model)
            with torch.no_grad():
                for name, tensor in run_tensors(resumed.train_state).items():
                    tensor.copy_(saved[name])
            resumed.train_state.guard.restore(json.loads(guard))
            resumed.train_state.optimizer.set_step_count(start - 1)
            assert [step(resumed, index) for index in range(start, 5)] == results[start:]
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors(resumed).items())


def test_a_step_reads_nothing_from_the_device(model: Path) -> None:
    assembly = assembled(model)
    step(assembly)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer_step(assembly.train_state, 1, assembly.batches.step(0), 1.0)
    reads = [one for one in profile.events() if one.name in {"aten::_local_scalar_dense", "aten::item"}]
    assert not [one for one in reads if "aten::_fused_adamw_" not in parents(one)]


def test_the_output_layer_is_told_what_reaches_its_loss(model: Path) -> None:
    assembly = assembled(model)
    step(assembly)
    told = assembly.train_state.root.parts.gradient_scale()
    assert told is not None and float(told) == pytest.approx(INITIAL / sum(TRAINED))


CPU = torch.device("cpu")
FINE, TOO_LARGE, NO_NUMBER = (2.0, 1.0), (2.0, math.inf), (math.nan, math.nan)


def take(scale: LossScale, guard: Guard, step: tuple[float, float]) -> tuple[bool, bool]:
    """Whether an update of this loss and norm is left out, and whether the run ends."""
    values = torch.tensor(step, dtype=torch.float64)
    skip, halt = guard.judge(values, scale.judge(*values.unbind()))
    return bool(skip), bool(halt)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), max_size=30))
def test_it_grows_and_shrinks_as_torchs_scaler_does(overflows: list[bool]) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], 0.1)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    ours, guard = LossScale(CPU), Guard(CPU)
    ours.state[0] = 2.0**40
    with patch.object(loss_scale, "INTERVAL", 3):
        for overflow in overflows:
            theirs.scale(torch.zeros(1))
            parameter.grad = torch.full((1,), math.inf if overflow else 1.0)
            theirs.step(optimizer)
            theirs.update()
            assert take(ours, guard, TOO_LARGE if overflow else FINE) == (overflow, False)
            assert (float(ours.scale), int(ours.state[1])) == (theirs.get_scale(), theirs._get_growth_tracker())


def test_the_scale_falls_to_its_floor_and_only_then_ends_the_run() -> None:
    scale, guard = LossScale(CPU), Guard(CPU)
    found = [take(scale, guard, TOO_LARGE) for _ in range(17)]
    assert found == [(True, False)] * 16 + [(True, True)]
    assert float(scale.scale) == FLOOR
    assert take(scale, guard, FINE) == (True, True), "nothing is updated after that"


def test_steps_without_a_number_are_the_guards_and_leave_the_scale() -> None:
    scale, guard = LossScale(CPU), Guard(CPU, GuardLimits(nonfinite_skips=1))
    found = [take(scale, guard, one) for one in (FINE, NO_NUMBER, FINE)]
    assert found == [(False, False), (True, False), (False, False)]
    assert (float(scale.scale), float(scale.state[1])) == (INITIAL, 2)
    assert take(scale, guard, TOO_LARGE) == (True, False)
    assert guard.as_state() == {"judged": 4, "nonfinite": 1, "skipped": 2}
    assert take(scale, guard, NO_NUMBER) == (True, True)


def test_an_overflow_is_no_usual_norm() -> None:
    guard = Guard(CPU, GuardLimits(spike_sigmas=6.0))
    scale = LossScale(CPU)
    take(scale, guard, FINE)
    take(scale, guard, TOO_LARGE)
    assert torch.tensor(guard.as_state()["recent"]).isfinite().all()


def test_it_never_grows_to_infinity() -> None:
    scale, guard = LossScale(CPU), Guard(CPU)
    scale.state[0] = 2.0**127
    with patch.object(loss_scale, "INTERVAL", 1):
        take(scale, guard, FINE)
    assert float(scale.scale) == 2.0**127


@pytest.mark.parametrize(("counts", "share"), [({"tokens": 40.0}, 40), ({}, 1), ({"tokens": 0.0}, 1)])
def test_what_reaches_a_term_is_known_before_the_forward_pass(counts: dict[str, float], share: float) -> None:
    scale = LossScale(CPU)
    scale.begin(counts)
    assert float(scale.of_term()) == pytest.approx(INITIAL / share)
