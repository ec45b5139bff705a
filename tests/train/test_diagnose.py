"""The replay of a bad step names the first module that is not finite, forward or backward."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.synthetic import assembly_for, recipe_for, write_model
from tuner.errors import DivergedError
from tuner.runtime.dist import RankInfo
from tuner.setup.build import Assembly
from tuner.train.diagnose import Finding, Stage, diverged, first_bad
from tuner.train.step import optimizer_step
from tuner.train.tasks import TakenStep

TRAINED = [1, 20, 3, 15]


@pytest.fixture
def assembly(tmp_path: Path) -> Assembly:
    write_model(tmp_path)
    return assembly_for(recipe_for(tmp_path, train={"global_batch_size": 4}), TRAINED, RankInfo())


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * float("inf")


def bad(assembly: Assembly) -> Finding | None:
    return first_bad(assembly.train_state, 4, assembly.batches.step(0))


def test_a_finite_step_has_no_bad_module(assembly: Assembly) -> None:
    assert bad(assembly) is None
    assert all(p.grad is None for p in assembly.train_state.parameters.values())
    assert not any(module._forward_hooks for module in assembly.train_state.root.model.modules())


def test_the_forward_pass_names_the_innermost_first_module(assembly: Assembly) -> None:
    layer = assembly.train_state.root.model.get_decoder().layers[1]
    layer.mlp.up_proj.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    found = bad(assembly)
    assert found == Finding(Stage.OUTPUT, "the output of model.layers.1.mlp.up_proj")


def test_weights_that_are_not_finite_are_said_to_be(assembly: Assembly) -> None:
    with torch.no_grad():
        assembly.train_state.root.model.get_decoder().layers[0].self_attn.k_proj.weight[0, 0] = float("inf")
    found = bad(assembly)
    assert found == Finding(Stage.OUTPUT, "the output of model.layers.0.self_attn.k_proj (its weight not finite)")


def test_the_backward_pass_names_the_first_gradient(assembly: Assembly) -> None:
    layer = assembly.train_state.root.model.get_decoder().layers[1]
    layer.mlp.register_forward_hook(lambda module, inputs, output: BadGradient.apply(output))
    found = bad(assembly)
    assert found is not None
    assert found.stage == Stage.GRADIENT
    assert found.what.startswith("the gradient at the output of model.layers.1.mlp")


def test_the_error_names_step_rows_and_checkpoint(assembly: Assembly) -> None:
    layer = assembly.train_state.root.model.get_decoder().layers[1]
    layer.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    batches = assembly.batches.step(0)
    scalars = optimizer_step(assembly.train_state, 4, batches, 1.0)
    step, result = TakenStep(4, batches, 1.0, 1, 1e-3, 0.0, scalars), scalars.read()
    assert result.halted
    error = diverged(assembly.train_state, step, result, "runs/x/checkpoints/step-4")
    assert isinstance(error, DivergedError)
    assert error.message.startswith("step 5: loss nan, gradient norm nan; first not finite: the output of model.layers")
    assert "rows " in error.message
    assert "runs/x/checkpoints/step-4" in (error.hint or "")
