"""Packed rows give the logits and gradients of each document alone, on every attention flavour, and read nothing
back from the device.
"""

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from tests.fixtures.packed import LENGTHS, drawn_root, figures, packed_inputs, random_ids, relative, smollm2, tiny_root
from tests.model.tiny import SHAPE, TINY, tiny_config
from tuner.model.build import ModelSpec, build_model
from tuner.model.documents import Padding
from tuner.model.output_layer import LogitTransform
from tuner.model.probe import require_isolation
from tuner.model.root import CausalLM, ModelParts


def check_packed(root: CausalLM, ids: torch.Tensor, lengths: tuple[int, ...], allowed: float = 1e-6) -> None:
    found = figures(root, ids, lengths)
    assert found.pop("control") > 1e-2, "without isolation the logits must differ"
    assert max(found.values()) <= allowed, found


@pytest.mark.parametrize("kind", TINY)
def test_packed_equals_alone(kind: str, tmp_path: Path) -> None:
    root = tiny_root(kind, tmp_path)
    check_packed(root, random_ids(97), LENGTHS)
    require_isolation(root, 97)


@pytest.mark.slow
def test_packed_equals_alone_on_smollm2() -> None:
    directory = os.environ.get("TUNER_TEST_SMOLLM2")
    if not directory:
        pytest.skip("TUNER_TEST_SMOLLM2 names no directory")
    check_packed(*smollm2(directory, layers=10), allowed=1e-5)  # two attention algorithms in float32


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3", "gpt2"])
def test_a_bfloat16_model_is_judged_in_float32(kind: str, tmp_path: Path) -> None:
    root = drawn_root(tiny_config(kind), tmp_path, dtype=torch.bfloat16)
    before = {name: parameter.clone() for name, parameter in root.named_parameters()}
    report = require_isolation(root, 97)
    assert max(report.leak, report.against_alone) < 1e-5
    after = dict(root.named_parameters())
    assert {parameter.dtype for parameter in after.values()} == {torch.bfloat16}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_stock_path_is_unchanged_by_registration(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    model = build_model(ModelSpec(str(tmp_path), random_init=True), torch.float32, seed=1)
    model.save_pretrained(tmp_path / "saved")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.arange(12)[None]
    assert relative(model(input_ids=ids).logits, stock(input_ids=ids).logits) < 1e-6


def test_logits_that_are_not_the_models_own_are_refused_even_without_packing(tmp_path: Path) -> None:
    from transformers import GraniteConfig

    from tuner.errors import RecipeError

    root = drawn_root(GraniteConfig(**SHAPE, logits_scaling=8.0), tmp_path)
    require_isolation(root, 97)
    root.logit_transform = LogitTransform()  # as for a model whose way with logits is not known
    for packed in (True, False):
        with pytest.raises(RecipeError, match="differ from the model's own"):
            require_isolation(root, 97, packed)


@pytest.mark.parametrize(
    "changes", [{"num_attention_heads": 3}, {"hidden_size": "abc"}, {"num_attention_heads": 0}, {"no_such_key": 1}]
)
def test_a_config_that_cannot_be_is_the_recipes_problem(changes: dict[str, object], tmp_path: Path) -> None:
    from tuner.errors import RecipeError
    from tuner.model.build import meta_model, model_config

    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"model"):
        meta_model(model_config(ModelSpec(str(tmp_path), config_overrides=changes)), torch.float32)


def test_missing_and_extra_weights_are_fatal(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from tuner.errors import DataError

    tiny_config("llama").save_pretrained(tmp_path)
    build_model(ModelSpec(str(tmp_path), random_init=True), torch.float32, seed=1).save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    lacking = {k: v for k, v in whole.items() if "layers.1.mlp" not in k}
    extra = whole | {"model.other": torch.zeros(2)}
    for weights, kind in ((lacking, "missing"), (extra, "unexpected")):
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(DataError, match=f"{kind} weights"):
            build_model(ModelSpec(str(tmp_path)), torch.float32, seed=1)


def test_what_is_made_of_a_model_is_made_once(tmp_path: Path) -> None:
    root = tiny_root("llama", tmp_path)
    assert root.parts == ModelParts()
    root.parts.set_once(padding=Padding(64, 64))
    root.parts.set_once(sum_partial_gradients=lambda: None)
    assert root.parts.padding == Padding(64, 64)
    with pytest.raises(AssertionError, match="padding: this model has it already"):
        root.parts.set_once(padding=Padding(32, 32))


READS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("llama", "gpt2", "gemma3") else pytest.mark.slow) for kind in TINY]
)
def test_a_microbatch_reads_nothing_back(kind: str, tmp_path: Path) -> None:
    root, inputs = tiny_root(kind, tmp_path), packed_inputs(random_ids(97), LENGTHS)
    root.train()
    for watched in (nullcontext(), profile(activities=[ProfilerActivity.CPU])):
        with watched as seen, torch.autocast("cpu", dtype=torch.bfloat16):
            root(document_lengths=LENGTHS, **inputs).backward()  # the first time makes the masks of this layout
    assert seen is not None
    names = {event.key for event in seen.key_averages()}
    assert "aten::mm" in names or "aten::addmm" in names
    assert not names & READS
