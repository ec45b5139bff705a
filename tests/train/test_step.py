"""One optimizer step: normalisation, clipping, refusal of what is not finite, dropout by position."""

from pathlib import Path

import pytest
import torch

from tests.train.synthetic import assembly_for, recipe_for, write_model
from tuner.errors import DivergedError
from tuner.runtime.launch import Launch
from tuner.train.step import StepResult, microbatch_loss, optimizer_step

TRAINED = [1, 20, 3, 15]
ONE = Launch()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


def step(model: Path, **train: object) -> tuple[StepResult, dict[str, torch.Tensor]]:
    recipe = recipe_for(model, train={"global_batch_size": 4, "micro_batch_size": 2, **train})
    assembly = assembly_for(recipe, TRAINED, ONE)
    result = optimizer_step(assembly.learner, 0, assembly.batches.step(0), 1.0, (True, False))
    return result, {name: p.detach().clone() for name, p in assembly.learner.parameters.items()}


def test_loss_is_the_mean_over_all_trained_tokens(model: Path) -> None:
    recipe = recipe_for(model, train={"global_batch_size": 4, "micro_batch_size": 1})
    assembly = assembly_for(recipe, TRAINED, ONE)
    batches = assembly.batches.step(0)
    with torch.no_grad():
        losses = [microbatch_loss(assembly.learner.root, b, assembly.learner.numerics).item() for b in batches.micro]
    result, _ = step(model)
    assert result.loss == pytest.approx(sum(losses) / sum(TRAINED), rel=1e-6)
    assert result.wishes == (True, False)


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
    seen: list[float] = []
    real = assembly.learner.optimizer.step

    def spy() -> None:
        gradients = [p.grad for p in assembly.learner.parameters.values()]
        seen.append(torch.nn.utils.get_total_norm(gradients).item())
        real()

    assembly.learner.optimizer.step = spy  # type: ignore[method-assign]
    result = optimizer_step(assembly.learner, 0, assembly.batches.step(0), 1.0, ())
    assert result.grad_norm > 1e-2
    assert seen == [pytest.approx(1e-3, rel=1e-3)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stops_before_the_update(model: Path, bad: float) -> None:
    assembly = assembly_for(recipe_for(model, train={"global_batch_size": 4}), TRAINED, ONE)
    name, first = next(iter(assembly.learner.parameters.items()))
    with torch.no_grad():
        first[0, 0] = bad
        first[:, 0] = bad
    before = {n: p.detach().clone() for n, p in assembly.learner.parameters.items()}
    with pytest.raises(DivergedError, match="step 6: loss .*rows"):
        optimizer_step(assembly.learner, 5, assembly.batches.step(0), 1.0, ())
    for other, parameter in assembly.learner.parameters.items():
        assert torch.equal(parameter.nan_to_num(), before[other].nan_to_num()), (name, other)


def test_weight_decay_leaves_norms_alone(model: Path) -> None:
    recipe = recipe_for(model, optimizer={"weight_decay": 0.5, "lr": 1e-3})
    assembly = assembly_for(recipe, TRAINED, ONE)
    learner = assembly.learner
    before = {name: parameter.detach().clone() for name, parameter in learner.parameters.items()}
    for parameter in learner.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    learner.optimizer.set_factor(0.5)
    learner.optimizer.step()
    for name, parameter in learner.parameters.items():
        kept = 1.0 if "norm" in name else 1 - 0.5 * 1e-3 * 0.5
        torch.testing.assert_close(parameter.detach(), before[name] * kept, rtol=1e-6, atol=0.0)


def test_first_step_is_adamw_by_the_book(model: Path) -> None:
    """After one step from zero moments every weight moves by lr against its gradient's sign (up to eps)."""
    assembly = assembly_for(recipe_for(model, train={"global_batch_size": 4, "max_grad_norm": "never"}), TRAINED, ONE)
    before = {n: p.detach().clone() for n, p in assembly.learner.parameters.items()}
    gradients: dict[str, torch.Tensor] = {}
    real = assembly.learner.optimizer.step

    def spy() -> None:
        gradients.update({n: p.grad.clone() for n, p in assembly.learner.parameters.items() if p.grad is not None})
        real()

    assembly.learner.optimizer.step = spy  # type: ignore[method-assign]
    optimizer_step(assembly.learner, 0, assembly.batches.step(0), 1.0, ())
    for name, parameter in assembly.learner.parameters.items():
        g = gradients[name]
        expected = before[name] - 1e-3 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-7)


def test_dropout_depends_on_the_position_alone(model: Path) -> None:
    def losses(indices: list[int]) -> list[float]:
        adapter = {"kind": "lora", "r": 4, "dropout": 0.5}
        assembly = assembly_for(recipe_for(model, adapter=adapter, train={"global_batch_size": 4}), TRAINED, ONE)
        with torch.no_grad():
            for name, p in assembly.learner.parameters.items():
                if "lora_B" in name:
                    p.fill_(0.1)
        torch.rand(len(indices))  # the generator's state must not matter
        return [optimizer_step(assembly.learner, i, assembly.batches.step(0), 0.0, ()).loss for i in indices]

    a, b = losses([3, 4])
    assert a != b
    assert losses([4]) == [b]
