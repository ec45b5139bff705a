"""One optimizer step: normalisation, clipping, refusal of what is not finite, dropout by position."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.synthetic import assembly_for, recipe_for
from tuner.runtime.dist import RankInfo
from tuner.setup.build import run_tensors
from tuner.train.step import StepResult, microbatch_terms, optimizer_step

TRAINED = [1, 20, 3, 15]
ONE = RankInfo()


def step(model: Path, **train: object) -> tuple[StepResult, dict[str, torch.Tensor]]:
    recipe = recipe_for(model, train={"global_batch_size": 4, "micro_batch_size": 2, **train})
    assembly = assembly_for(recipe, TRAINED, ONE)
    result = optimizer_step(assembly.train_state, 0, assembly.batches.step(0), 1.0).read()
    return result, {name: p.detach().clone() for name, p in assembly.train_state.parameters.items()}


def test_loss_is_the_mean_over_all_trained_tokens(model: Path) -> None:
    recipe = recipe_for(model, train={"global_batch_size": 4, "micro_batch_size": 1})
    assembly = assembly_for(recipe, TRAINED, ONE)
    batches = assembly.batches.step(0)
    with torch.no_grad():
        state = assembly.train_state
        terms = [microbatch_terms(state.root, state.method, b, state.step_config) for b in batches.micro]
        losses = [one.losses["loss"].value.item() for one in terms]
    result, _ = step(model)
    assert result.loss == pytest.approx(sum(losses) / sum(TRAINED), rel=1e-6)
    assert (result.skipped, result.halted) == (False, False)


def test_accumulation_takes_the_same_step(model: Path) -> None:
    whole, after = step(model, micro_batch_size=4, max_grad_norm="never")
    parts, also = step(model, micro_batch_size=1, max_grad_norm="never")
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    for name, weight in after.items():
        # The first AdamW step is lr times the gradient's sign, so only near-zero gradients may differ in it.
        assert (weight - also[name]).abs().mean() < 1e-7, name


def test_clipping_scales_the_update_and_reports_the_norm_before(model: Path) -> None:
    recipe = recipe_for(model, train={"global_batch_size": 4, "max_grad_norm": 1e-3})
    assembly = assembly_for(recipe, TRAINED, ONE)
    result = optimizer_step(assembly.train_state, 0, assembly.batches.step(0), 1.0).read()
    assert result.grad_norm > 1e-2
    # AdamW's first running average is the gradient it was given, times 1 - beta1.
    state = assembly.train_state.optimizer.state_tensors()
    given = [tensor / (1 - 0.9) for name, tensor in state.items() if "/exp_avg/" in name]
    assert torch.nn.utils.get_total_norm(given).item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_left_out_and_so_is_all_after_it(model: Path, bad: float) -> None:
    assembly = assembly_for(recipe_for(model, train={"global_batch_size": 4}), TRAINED, ONE)
    train_state, batches = assembly.train_state, assembly.batches.step(0)
    optimizer_step(train_state, 0, batches, 1.0)
    before = {n: t.clone() for n, t in run_tensors(assembly.train_state).items()}
    handle = train_state.root.model.get_decoder().register_forward_hook(poison(bad))
    result = optimizer_step(train_state, 1, batches, 1.0).read()
    assert (result.skipped, result.halted) == (True, True)
    handle.remove()
    later = optimizer_step(train_state, 2, batches, 1.0).read()
    assert (later.skipped, later.halted) == (True, True)
    for name, tensor in run_tensors(assembly.train_state).items():
        assert torch.equal(tensor, before[name]), name


def poison(value: float) -> Any:
    def replace(module: torch.nn.Module, inputs: object, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * value
        return output

    return replace


def test_a_skipped_step_leaves_the_next_one_as_if_it_had_not_been(model: Path) -> None:
    def weights(with_bad_step: bool) -> dict[str, torch.Tensor]:
        recipe = recipe_for(model, train={"global_batch_size": 4, "nonfinite": {"skip": 1}})
        assembly = assembly_for(recipe, TRAINED, ONE)
        train_state, batches = assembly.train_state, assembly.batches.step(0)
        optimizer_step(train_state, 0, batches, 1.0)
        if with_bad_step:
            handle = train_state.root.model.get_decoder().register_forward_hook(poison(float("nan")))
            result = optimizer_step(train_state, 1, batches, 1.0).read()
            handle.remove()
            assert (result.skipped, result.halted) == (True, False)
        optimizer_step(train_state, 2, batches, 1.0)
        return {n: t.clone() for n, t in run_tensors(assembly.train_state).items()}

    with_bad, without = weights(True), weights(False)
    for name, tensor in without.items():
        assert torch.equal(tensor, with_bad[name]), name


def test_a_step_between_logs_reads_nothing_from_the_device(model: Path) -> None:
    recipe = recipe_for(model, train={"global_batch_size": 4, "micro_batch_size": 2, "skip_spikes": 6})
    assembly = assembly_for(recipe, TRAINED, ONE)
    optimizer_step(assembly.train_state, 0, assembly.batches.step(0), 1.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer_step(assembly.train_state, 1, assembly.batches.step(0), 1.0)
    events = profile.events()
    assert "aten::_fused_adamw_" in {event.name for event in events}, "the profile saw the step"
    reads = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero"}
    # The fused kernel for CPUs looks at its own step counters, which lie in host memory; nothing else may.
    outside = [e for e in events if e.name in reads and "aten::_fused_adamw_" not in parents(e)]
    assert not outside, [(event.name, parents(event)) for event in outside]


def parents(event: Any) -> list[str]:
    names = []
    while event.cpu_parent is not None:
        event = event.cpu_parent
        names.append(event.name)
    return names


def test_weight_decay_leaves_norms_alone(model: Path) -> None:
    recipe = recipe_for(model, optimizer={"weight_decay": 0.5, "lr": 1e-3})
    assembly = assembly_for(recipe, TRAINED, ONE)
    train_state = assembly.train_state
    before = {name: parameter.detach().clone() for name, parameter in train_state.parameters.items()}
    for parameter in train_state.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    train_state.optimizer.set_factor(0.5)
    train_state.optimizer.step()
    for name, parameter in train_state.parameters.items():
        kept = 1.0 if "norm" in name else 1 - 0.5 * 1e-3 * 0.5
        torch.testing.assert_close(parameter.detach(), before[name] * kept, rtol=1e-6, atol=0.0)


def test_first_step_is_adamw_by_the_book(model: Path) -> None:
    """After one step from zero moments every weight moves by lr against its gradient's sign (up to eps)."""
    assembly = assembly_for(recipe_for(model, train={"global_batch_size": 4, "max_grad_norm": "never"}), TRAINED, ONE)
    before = {n: p.detach().clone() for n, p in assembly.train_state.parameters.items()}
    optimizer_step(assembly.train_state, 0, assembly.batches.step(0), 1.0)
    state = assembly.train_state.optimizer.state_tensors()
    for name, parameter in assembly.train_state.parameters.items():
        g = state[f"optimizer/exp_avg/{name}"] / (1 - 0.9)
        expected = before[name] - 1e-3 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-7)


def test_dropout_depends_on_the_position_alone(model: Path) -> None:
    def losses(indices: list[int]) -> list[float]:
        adapter = {"kind": "lora", "r": 4, "dropout": 0.5}
        assembly = assembly_for(recipe_for(model, adapter=adapter, train={"global_batch_size": 4}), TRAINED, ONE)
        with torch.no_grad():
            for name, p in assembly.train_state.parameters.items():
                if "lora_B" in name:
                    p.fill_(0.1)
        torch.rand(len(indices))  # the generator's state must not matter
        return [optimizer_step(assembly.train_state, i, assembly.batches.step(0), 0.0).read().loss for i in indices]

    a, b = losses([3, 4])
    assert a != b
    assert losses([4]) == [b]
