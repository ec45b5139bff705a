"""Products in fp8: what is rounded and how, against float64; which layers; and what stays as it was."""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.fixtures.tensors import Operations
from tests.model.tiny import family_model
from tests.train.synthetic import assembly_for, recipe_for, write_model
from tuner.errors import RecipeError
from tuner.model.float8 import LARGEST, Float8Layers, Rounded, apply_float8, product, rounded
from tuner.runtime.dist import RankInfo
from tuner.train.step import StepResult, optimizer_step

TRAINED = [1, 20, 3, 15]
BF16 = torch.bfloat16


def exact(found: Rounded) -> torch.Tensor:
    """What it stands for, float32 ``[M, K]``."""
    return found.codes.float() * found.scale


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(-60, 60), st.integers(0, 2**31))
def test_rows_are_scaled_by_powers_of_two_to_just_below_the_largest(m: int, k: int, power: int, seed: int) -> None:
    matrix = (torch.randn(m, k, generator=torch.Generator().manual_seed(seed)) * 2.0**power).to(BF16)
    found = rounded(matrix)
    assert torch.equal(found.scale.log2(), found.scale.log2().round())
    largest = found.codes.float().abs().amax(1)
    assert ((largest > LARGEST / 2 - 16) & (largest <= LARGEST))[matrix.any(1)].all()
    # Three bits after the point: half of the last one, or of the least step that e4m3 has, 2**-9.
    allowed = torch.maximum(matrix.float().abs() * 2**-4, found.scale * 2**-10)
    assert ((exact(found) - matrix.float()).abs() <= allowed).all()


def test_zeros_stay_zeros_and_what_is_not_finite_does_not_vanish() -> None:
    matrix = torch.ones(4, 16, dtype=BF16)
    matrix[0] = 0.0
    matrix[1, 3], matrix[2, 5] = float("nan"), float("inf")
    found = exact(rounded(matrix))
    assert (found[0] == 0).all() and (found[3] == 1).all()
    assert not found[1].isfinite().any() or found[1].isnan().any()
    assert not found[2].isfinite().all()


@pytest.mark.parametrize("shape", [(7, 32, 48), (16, 16, 16), (1, 48, 32)])
def test_a_product_is_that_of_what_the_codes_stand_for(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    m, k, n = shape
    left, right = torch.randn(m, k).to(BF16), (torch.randn(n, k) * torch.logspace(-3, 3, n)[:, None]).to(BF16)
    wanted = exact(rounded(left)).double() @ exact(rounded(right)).double().T
    found = product(left, right)
    assert found.dtype == BF16
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-5 * wanted.abs().max().item())


def test_each_of_the_three_products_is_rounded_along_what_it_sums_over() -> None:
    torch.manual_seed(0)
    model: Any = family_model("llama", tied=False)
    apply_float8(model)
    layer = model.model.layers[0].mlp.up_proj
    rows, upstream = torch.randn(2, 7, 32, requires_grad=True), torch.randn(2, 7, 48)
    with torch.autocast("cpu", BF16, cache_enabled=False):
        found = layer(rows)
    found.backward(upstream.to(BF16))
    x, w, g = (t.detach().reshape(-1, t.shape[-1]).to(BF16) for t in (rows, layer.weight, upstream))

    def product_of(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (exact(rounded(left)).double() @ exact(rounded(right)).double().T).float()

    def close(one: torch.Tensor | None, other: torch.Tensor) -> None:
        assert one is not None
        scale = other.abs().max().item()
        torch.testing.assert_close(one.detach().reshape(other.shape).float(), other, rtol=2**-8, atol=1e-5 * scale)

    close(found, product_of(x, w))
    close(rows.grad, product_of(g, w.T))
    close(layer.weight.grad, product_of(g.T, x.T))
    assert layer.weight.grad.dtype == torch.float32


def test_the_layers_are_those_of_the_decoder_that_the_kernels_take() -> None:
    model = family_model("llama", tied=False)
    found = Float8Layers.of(model)
    assert len(found.rounded) == 14 and not found.left
    assert found.described() == "products of 14 of the decoder's 14 linear layers"
    fewer = Float8Layers.of(model, ["o_proj", "layers.0.mlp"])
    assert len(fewer.rounded) == 9 and {name.rpartition(".")[2] for name in fewer.left} == {
        "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    assert fewer.described().endswith("9 of the decoder's 14 linear layers; the others in bf16: 5 of train.fp8_except")
    with pytest.raises(RecipeError, match=r"train.fp8_except: 'q_prj' matches nothing"):
        Float8Layers.of(model, ["q_prj"])
    layer: Any = model.model.layers[1].mlp
    layer.gate_proj = nn.Linear(32, 50, bias=False)
    layer.router = nn.Linear(32, 16, bias=False)
    odd = Float8Layers.of(model)
    assert set(odd.left) == {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.router"}
    assert odd.described() == (
        "products of 13 of the decoder's 15 linear layers; the others in bf16: 1 of sides that are no multiples of 16, "
        "1 of routers"
    )


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(RecipeError, match="no layer of GPT2LMHeadModel can be computed in it"):
        Float8Layers.of(family_model("gpt2", tied=True))


def test_without_autocast_nothing_is_rounded() -> None:
    model = family_model("llama", tied=False)
    ids = torch.arange(3, 19)[None]
    before = model(ids).logits
    apply_float8(model)
    assert torch.equal(model(ids).logits, before)
    with torch.autocast("cpu", BF16):
        assert not torch.equal(model(ids).logits, before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    write_model(found)
    return found


def step(
    directory: Path, precision: str, **sections: dict[str, Any]
) -> tuple[StepResult, dict[str, torch.Tensor], dict[str, int]]:
    """A step's figures, gradients and operations, the same objects to all tests that take it."""
    return _step(directory, precision, json.dumps(sections))


@cache
def _step(directory: Path, precision: str, written: str) -> tuple[StepResult, dict[str, torch.Tensor], dict[str, int]]:
    sections = json.loads(written)
    train = {"global_batch_size": 4, "precision": precision, **sections.pop("train", {})}
    assembly = assembly_for(recipe_for(directory, train=train, **sections), TRAINED, RankInfo())
    state, seen = assembly.train_state, dict[str, torch.Tensor]()
    real = state.optimizer.step

    def spy(*args: Any) -> None:
        seen.update({n: p.grad.clone() for n, p in state.parameters.items() if p.grad is not None})
        real(*args)

    state.optimizer.step = spy  # type: ignore[method-assign]
    with Operations(lambda func, *_: [func.name()]) as computed:
        result = optimizer_step(state, 0, assembly.batches.step(0), 1.0).read()
    return result, seen, Counter(computed.found)


@pytest.mark.parametrize(
    ("sections", "products"),
    [
        ({}, 3 * 14 * 4),
        ({"train": {"micro_batch_size": 4, "gradient_checkpointing": "selective"}}, 3 * 14),
        ({"train": {"micro_batch_size": 4, "gradient_checkpointing": "full"}}, 4 * 14),
        # Below the first adapted layers nothing wants a gradient: no product goes on to the embedding.
        ({"adapter": {"kind": "lora", "r": 4}, "train": {"micro_batch_size": 4}}, 2 * 14 - 3),
    ],
)
def test_a_step_is_near_that_of_bf16(directory: Path, sections: dict[str, Any], products: int) -> None:
    found, gradients, counts = step(directory, "fp8", **sections)
    train = {key: value for key, value in sections.get("train", {}).items() if key == "micro_batch_size"}
    wanted, exact, _ = step(directory, "bf16", **{**sections, "train": train})  # what is recomputed is the same
    assert counts["aten::_scaled_mm"] == products
    assert found.loss == pytest.approx(wanted.loss, rel=2e-3)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=5e-2)
    assert gradients.keys() == exact.keys() and found.loss != wanted.loss
    for name, gradient in exact.items():
        assert (gradients[name] - gradient).norm() <= 0.25 * gradient.norm(), name


@pytest.mark.parametrize("level", ["selective", "full"])
def test_what_is_recomputed_has_the_same_bits(directory: Path, level: str) -> None:
    together = {"micro_batch_size": 4}
    plain, again = (step(directory, "fp8", train=together | more) for more in ({}, {"gradient_checkpointing": level}))
    assert plain[0] == again[0]
    assert all(torch.equal(again[1][name], gradient) for name, gradient in plain[1].items())


@pytest.mark.slow
def test_the_compiler_traces_the_products() -> None:
    model: Any = family_model("llama", tied=False)
    apply_float8(model)
    layer, found = model.model.layers[0].mlp.up_proj, list[torch.Tensor]()
    rows = torch.randn(16, 32)
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        with torch.autocast("cpu", BF16, cache_enabled=False):
            run(rows).float().square().sum().backward()
        found.append(layer.weight.grad.clone())
    assert torch.equal(found[0], found[1])
