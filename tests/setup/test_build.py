"""How a resolved recipe computes.

Probes answer as the model with its own weights in float32 does, however the weights are held.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import tuner.parallel.values
from tests.fixtures.processes import run_ranks
from tests.model.tiny import TINY, VOCAB, family_model, tiny_config
from tests.parallel.test_fsdp import whole
from tests.train.synthetic import recipe_for
from tuner.export.verify import compare, last_logits
from tuner.model.attention import NATIVE
from tuner.model.build import ModelSpec, build_model, meta_model
from tuner.model.root import CausalLM
from tuner.model.trainable import TrainableSpec
from tuner.model.transformers_private import attention_of
from tuner.model.unread import in_files
from tuner.parallel.assemble import AssemblySpec
from tuner.parallel.mesh import Mesh
from tuner.runtime.dist import RankInfo
from tuner.setup.model import _load_for_devices, _transfer_dtype, load_model
from tuner.setup.probes import record_probes
from tuner.setup.resolve import resolve
from tuner.setup.specs import assembly_spec, mesh_of, meta_model_of, step_config_of

values: Any = tuner.parallel.values  # whose names are replaced in forked processes


def test_autocast_keeps_no_copies_of_weights(tmp_path: Path) -> None:
    resolved: Any = SimpleNamespace(recipe=recipe_for(tmp_path, train={"precision": "bf16"}))
    with step_config_of(resolved, torch.device("cpu"), RankInfo()).autocast():
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()


FULL, HALF = AssemblySpec(TrainableSpec(), seed=0), {"a": torch.bfloat16, "b": torch.bfloat16}
SECTIONS: dict[str, Any] = {"model": {"dtype": "fp32"}}


@pytest.mark.parametrize(
    ("stored", "sections", "spec", "new_ids", "expected"),
    [
        (HALF, SECTIONS, FULL, range(0), torch.bfloat16),
        ({"a": torch.float16}, SECTIONS, FULL, range(0), torch.float16),
        ({"a": torch.float32}, SECTIONS, FULL, range(0), None),
        ({**HALF, "b": torch.float32}, SECTIONS, FULL, range(0), None),
        (HALF, {"model": {"dtype": "bf16"}, "train": {"precision": "bf16"}}, FULL, range(0), None),
        (HALF, {"model": {"dtype": "fp32", "init": "random"}}, FULL, range(0), None),
        (HALF, {**SECTIONS, "method": {"kind": "dpo", "reference": "columns"}}, FULL, range(0), None),
        (HALF, SECTIONS, replace(FULL, trainable=TrainableSpec(frozen=("a",))), range(0), None),
        (HALF, SECTIONS, FULL, range(5, 7), None),
    ],
)  # fmt: skip
def test_weights_that_are_all_trained_stay_in_half_files_until_they_are_read(
    stored: dict[str, torch.dtype], sections: dict[str, Any], spec: AssemblySpec, new_ids: range, expected: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    tiny_config("llama").save_pretrained(tmp_path)
    save_file({name: torch.zeros(2, dtype=dtype) for name, dtype in stored.items()}, tmp_path / "model.safetensors")
    recipe = recipe_for(tmp_path, **{**sections, "model": {"name_or_path": str(tmp_path), **sections["model"]}})
    resolved: Any = SimpleNamespace(recipe=recipe, new_ids=new_ids)
    assert _transfer_dtype(resolved, spec) == expected


MADE: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {},  # whose embeddings have a scale that is a buffer
    "qwen3-moe": {},
    "llama, LoRA": {"adapter": {"kind": "lora"}},
    "llama, QLoRA": {"adapter": {"kind": "lora"}, "model": {"quantize": "nf4"}},
    "llama, frozen": {"model": {"freeze": ["*embed*"]}},
    "llama, tiles": {"train": {"tiled_mlp": True}},
}


@pytest.mark.slow(
    "gemma3-untied", "qwen3-moe-tied", *(f"llama, {what}-untied" for what in ("LoRA", "QLoRA", "frozen", "tiles"))
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("what", MADE)
def test_a_model_read_in_blocks_is_the_one_that_is_loaded(what: str, tied: bool, tmp_path: Path) -> None:
    family_model(what.partition(",")[0], tied).to(torch.bfloat16).save_pretrained(tmp_path)
    resolved = resolve(recipe_for(tmp_path, **MADE[what]), 32, RankInfo())
    spec, cpu = assembly_spec(resolved), torch.device("cpu")
    loaded, read = load_model(resolved, spec, Mesh(), cpu).root, _load_for_devices(resolved, spec, Mesh(), cpu).root
    for kind in ("named_parameters", "named_buffers"):
        wanted, found = dict(getattr(loaded, kind)()), dict(getattr(read, kind)())
        assert wanted.keys() == found.keys()
        for name, one in wanted.items():
            assert (found[name].dtype, found[name].requires_grad) == (one.dtype, one.requires_grad), name
            assert torch.equal(found[name], one), name
    places = in_files({name: one.detach() for name, one in read.named_parameters()})
    assert not places, "they are in memory of their own"


def test_a_model_without_storage_leaves_the_attention_of_the_one_that_trains(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    resolved = resolve(recipe_for(tmp_path, model={"name_or_path": str(tmp_path), "init": "random"}), 32, RankInfo())
    resolved.config._attn_implementation = NATIVE  # which a model that begins at random reads from here
    meta_model_of(resolved)
    assert attention_of(resolved.config) == NATIVE


LOST = "files that the other process lacks"
LAYOUTS: dict[str, dict[str, Any]] = {
    "in shards": {"parallel": {"shard": "full"}},
    "whole": {"parallel": {"shard": "none"}},
    "experts apart": {"parallel": {"expert": 2}},
    "columns": {"parallel": {"tensor": 2}},
    "with adapters on experts": {"parallel": {"shard": "full"}, "adapter": {"kind": "lora", "experts": True}},
    LOST: {"parallel": {"shard": "full"}},
}


@pytest.mark.slow("in shards", "whole", "columns")
@pytest.mark.multi
@pytest.mark.parametrize("what", LAYOUTS)
def test_experts_are_read_by_each_process(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family_model("qwen3-moe", tied=False).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    real, sent = values.fill, list[bool]()
    is_trained = "adapter" not in LAYOUTS[what]  # an adapter's own are drawn, and sent

    def fill(target: torch.Tensor, *given: Any) -> None:
        sent.append(target.ndim > 2 and target.requires_grad is is_trained)
        real(target, *given)

    monkeypatch.setattr(values, "fill", fill)

    def work(rank: int) -> None:
        info, cpu = RankInfo(rank, 2, rank, 2), torch.device("cpu")
        resolved = resolve(recipe_for(tmp_path / "model", **LAYOUTS[what]), 32, info)
        spec = assembly_spec(resolved)
        wanted = dict(load_model(resolved, spec, Mesh(), cpu).root.named_parameters())
        if what == LOST and rank:
            values._sample = lambda path, places: None  # in this process
        found = load_model(resolved, spec, mesh_of(resolved.recipe.parallel, info), cpu).root
        for name, one in found.named_parameters():
            assert torch.equal(whole(one), wanted.pop(name)), name
        assert not wanted
        assert any(sent) is (what == LOST)

    assert run_ranks(2, tmp_path, work) == [0, 0]


@pytest.mark.parametrize("kind", TINY)
def test_a_frozen_bfloat16_base_adds_no_rounding(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(tmp_path)
    held = build_model(ModelSpec(str(tmp_path)), torch.bfloat16, seed=0)
    assert {parameter.dtype for parameter in held.parameters()} == {torch.bfloat16}
    on_meta = meta_model(held.config, torch.bfloat16)  # what other processes fill with these values
    assert {n: b.dtype for n, b in on_meta.named_buffers()} == {n: b.dtype for n, b in held.named_buffers()}
    for name, parameter in held.named_parameters():
        assert torch.equal(parameter.float(), model.get_parameter(name)), name
    probes = [torch.randint(0, VOCAB, (length,)) for length in (5, 12)]
    answers = record_probes(CausalLM(held), probes, torch.device("cpu"))["logits"]
    expected = last_logits(model.eval(), [probe.tolist() for probe in probes])
    assert compare(expected, answers).relative <= 1e-5
