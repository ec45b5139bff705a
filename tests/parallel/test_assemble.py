"""The order in which a model is put together, and what of it a model leaves out that only gives its values."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.tiny import tiny_config
from tuner.config.numbers import Duration
from tuner.errors import RecipeError
from tuner.model.adapter import LoraSpec
from tuner.model.build import ModelSpec, build_model
from tuner.model.documents import Padding
from tuner.model.trainable import TrainableSpec
from tuner.parallel import assemble as assembling
from tuner.parallel.assemble import AssemblySpec, assemble
from tuner.parallel.mesh import DeviceMeshes

PADDING = Padding(64, 32)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    tiny_config("llama").save_pretrained(tmp_path)
    return build_model(ModelSpec(str(tmp_path), random_init=True), torch.float32, 5)


def order_of(spec: AssemblySpec, model: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []

    def noted(name: str) -> Any:
        return lambda *given, **named: done.append(name)

    monkeypatch.setattr(TrainableSpec, "apply", noted("trained"))
    for name in ("apply_native", "apply_liger", "shard"):
        monkeypatch.setattr(assembling, name, noted(name))
    monkeypatch.setattr("tuner.model.blocks.apply_recompute", noted("apply_recompute"))
    monkeypatch.setattr("tuner.model.blocks.compile_blocks", noted("compile_blocks"))
    devices: Any = object()
    meshes = DeviceMeshes(weights=devices)
    assemble(spec, model, inspect=noted("inspect"), meshes=meshes, give_values=noted("values"))
    return done


@pytest.mark.parametrize(
    ("kernels", "padding", "order"),
    [
        ("native", PADDING, "trained apply_native inspect apply_recompute compile_blocks shard values"),
        ("liger", None, "trained inspect apply_liger apply_recompute shard values"),
        ("liger", PADDING, "trained inspect apply_recompute compile_blocks shard values"),
        ("torch", None, "trained inspect apply_recompute shard values"),
    ],
)
def test_there_is_one_order(
    kernels: Any, padding: Padding | None, order: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = AssemblySpec(TrainableSpec(), 0, kernels, "full", padding=padding)
    assert order_of(spec, model, monkeypatch) == order.split()


def test_a_model_that_gives_its_values_is_not_wrapped(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AssemblySpec(TrainableSpec(LoraSpec(4, 8, 0.0, "all-linear")), 7, "liger", "full", padding=PADDING)
    assert (spec.of_weight_source().trainable, spec.of_weight_source().seed) == (spec.trainable, 7)
    assert order_of(spec.of_weight_source(), model, monkeypatch) == ["trained", "inspect", "shard", "values"]
    assert AssemblySpec(TrainableSpec(), 0, "native").of_weight_source().kernels == "native"


def test_no_more_layers_are_recomputed_than_there_are(model: Any) -> None:
    spec = AssemblySpec(TrainableSpec(), 0, recompute="full", recomputed_layers=Duration.parse("9 layers"))
    with pytest.raises(RecipeError, match="gradient_checkpointing_layers: 9 layers, but the model has 2"):
        assemble(spec, model)
