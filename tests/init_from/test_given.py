"""What a model is built with when `model.init_from` names weights: to the last bit what the sources hold, and the
report of it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.export.runs import write_base, write_run
from tests.init_from import built as places
from tests.init_from.built import LORA, TENSORS, built, given, held, planned_for, recipe_of, same, values, write_family
from tests.train.synthetic import MAX_LENGTH
from tuner.api.exports import export_hf
from tuner.checkpoint.load import read_tensors
from tuner.checkpoint.open import newest
from tuner.init_from.give import report, summary
from tuner.model.adapter import LoraSpec
from tuner.runtime.dist import RankInfo
from tuner.setup.resolve import resolve


@pytest.fixture(scope="module")
def lora(base: Path) -> tuple[Path, TENSORS]:
    """An adapter as peft saves it, and what it makes of the base."""
    return places.write_peft(base, base.parent / "lora")


def test_a_model_directory_replaces_every_weight(base: Path, other: Path) -> None:
    model = built(recipe_of(base, str(other)))
    assert not same(values(model), held(other))
    (entry,) = given(model)["entries"]
    assert (entry["kind"], entry["tensors"], given(model)["frozen"]) == ("model directory", len(held(other)), 0)


def test_random_weights_are_replaced_too(base: Path, other: Path) -> None:
    assert not same(values(built(recipe_of(base, str(other), init="random"))), held(other))


def test_load_and_exclude_choose(base: Path, other: Path) -> None:
    entry = {"path": str(other), "load": ["layers.1", "lm_head"], "exclude": ["model.layers.*.mlp.**"]}
    found = values(built(recipe_of(base, entry)))
    moved = same(found, held(base))
    assert moved == {name for name in found if ("layers.1." in name and ".mlp." not in name) or "lm_head" in name}
    assert not same({name: found[name] for name in moved}, {name: held(other)[name] for name in moved})


def test_later_entries_win(base: Path, other: Path, tmp_path: Path) -> None:
    third = write_family(tmp_path / "third", seed=3)
    model = built(recipe_of(base, str(other), {"path": str(third), "load": ["mlp"]}))
    wanted = {name: held(third if ".mlp." in name else other)[name] for name in held(base)}
    assert not same(values(model), wanted)
    first, second = given(model)["entries"]  # what is replaced is not even read
    assert first["tensors"] + second["tensors"] == len(wanted) and second["tensors"] == 6


FOREIGN = {
    "transformer.wte.weight": "model.embed_tokens.weight", "transformer.h.*.attn.**": "model.layers.{1}.self_attn.{2}",
    "transformer.h.*.**": "model.layers.{1}.{2}", "transformer.norm.*": "model.norm.{1}",
}


def foreign(name: str) -> str:
    for here, there in ((".self_attn.", ".attn."), ("embed_tokens", "wte"), ("model.layers", "transformer.h")):
        name = name.replace(here, there)
    return name.replace("model.", "transformer.")


def test_names_of_others_become_ours(base: Path, other: Path, tmp_path: Path) -> None:
    theirs = places.rewrite(other, tmp_path / "theirs", foreign)
    assert "transformer.h.0.attn.q_proj.weight" in load_file(theirs / "model.safetensors")
    model = built(recipe_of(base, {"path": str(theirs), "rename": FOREIGN}))
    assert not same(values(model), held(other))


def test_our_names_become_those_of_others(tmp_path: Path) -> None:
    model, source = write_family(tmp_path / "gpt2", "gpt2"), write_family(tmp_path / "source", "gpt2", seed=2)

    def as_llama(name: str) -> str:
        name = name.removeprefix("transformer.")
        moved = name.replace("h.", "model.layers.", 1).replace(".attn.", ".self_attn.")
        return moved if name.startswith("h.") else name

    theirs = places.rewrite(source, tmp_path / "theirs", as_llama)
    rename = {"model.layers.*.self_attn.**": "transformer.h.{1}.attn.{2}", "model.layers.**": "transformer.h.{1}"}
    model = built(recipe_of(model, {"path": str(theirs), "rename": rename}))
    assert not same(values(model), held(source))


def test_experts_are_put_together_from_published_files(tmp_path: Path) -> None:
    model, source = write_family(tmp_path / "moe", "qwen3-moe"), write_family(tmp_path / "source", "qwen3-moe", seed=2)
    assert any(".experts.3." in name for name in load_file(source / "model.safetensors"))
    assert not same(values(built(recipe_of(model, str(source)))), held(source))


def test_a_second_copy_of_a_tied_weight_is_the_same(tmp_path: Path) -> None:
    base, other = write_family(tmp_path / "base", tied=True), write_family(tmp_path / "other", seed=2, tied=True)
    tensors = load_file(other / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, other / "model.safetensors")
    model = built(recipe_of(base, str(other)))
    assert not same(values(model), held(other))
    assert model.facts.given is not None
    assert "under its other name: 1\n    lm_head.weight" in model.facts.given["report"]


def checkpoint_values(run: Path) -> TENSORS:
    found = newest(run / "checkpoints")
    assert found is not None
    return {name.removeprefix("model/"): tensor for name, tensor in read_tensors(found) if name.startswith("model/")}


def test_a_run_of_the_whole_model(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "llama")
    run = write_run(tmp_path / "run", base)
    model = built(recipe_of(base, str(run)))
    assert not same(values(model), checkpoint_values(run)) and same(values(model), held(base))
    (entry,) = given(model)["entries"]
    assert (entry["kind"], entry["step"]) == ("checkpoint", 7)
    at_step = built(recipe_of(base, str(run / "checkpoints" / "step-7")))
    assert given(at_step)["entries"][0]["sha256"] == entry["sha256"]


def test_a_run_of_an_adapter_merges_as_its_export_does(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "llama")
    run = write_run(tmp_path / "run", base, LoraSpec(4, 8.0, 0.0, "all-linear", use_dora=True))
    exported = export_hf(run, dtype="fp32").path
    model = built(recipe_of(base, str(run)))
    assert not same(values(model), held(exported)) and same(values(model), held(base))
    model = built(recipe_of(base, str(exported)))
    assert not same(values(model), held(exported)) and given(model)["entries"][0]["kind"] == "export"


@pytest.mark.parametrize(
    "config",
    [{}, {"use_rslora": True}, {"use_dora": True}, {"modules_to_save": ["lm_head"], "rank_pattern": {"down_proj": 2}}],
    ids=["lora", "rslora", "dora", "modules_to_save"],
)
def test_an_adapter_of_peft_merges_as_peft_does(base: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    adapter, merged = places.write_peft(base, tmp_path / "adapter", **config)
    found = values(built(recipe_of(base, str(adapter))))
    for name, tensor in merged.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    assert {name.split(".")[-2] for name in same(found, held(base))} == {"q_proj", "down_proj"}


def test_an_adapter_goes_on_in_the_adapter_of_the_run(base: Path, lora: tuple[Path, TENSORS]) -> None:
    adapter, _ = lora
    section = {**LORA, "target_modules": ["q_proj", "down_proj"]}
    model = built(recipe_of(base, str(adapter), adapter=section))
    stored = load_file(adapter / "adapter_model.safetensors")
    found = {
        "base_model.model." + name.replace(".default.", "."): tensor
        for name, tensor in values(model).items()
        if "lora_" in name
    }
    assert not same(found, stored) and given(model)["frozen"] == 0


def test_an_adapter_is_merged_below_a_new_one(base: Path, lora: tuple[Path, TENSORS]) -> None:
    adapter, merged = lora
    model = built(recipe_of(base, {"path": str(adapter), "adapter": "merge"}, adapter=LORA))
    found = values(model)
    for name, tensor in merged.items():
        torch.testing.assert_close(found[name].float(), tensor, rtol=2**-8, atol=1e-6)
    assert all(not tensor.any() for name, tensor in found.items() if ".lora_B." in name)
    assert given(model)["frozen"] == 4


def test_two_adapters_add_up(base: Path, lora: tuple[Path, TENSORS]) -> None:
    adapter, merged = lora
    found, before = values(built(recipe_of(base, str(adapter), str(adapter)))), held(base)
    for name, once in merged.items():
        torch.testing.assert_close(found[name] - before[name], 2 * (once - before[name]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("adapter", [{"kind": "none"}, LORA], ids=["full", "lora"])
def test_a_smaller_vocabulary_fills_the_first_rows(tmp_path: Path, adapter: dict[str, Any]) -> None:
    base, small = write_family(tmp_path / "base", vocabulary=101), write_family(tmp_path / "small", seed=2)
    model = built(recipe_of(base, {"path": str(small), "grow": True}, adapter=adapter))
    found, before, after = values(model), held(base), held(small)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        kind = found[name].dtype
        assert torch.equal(found[name][:97], after[name].to(kind))
        assert torch.equal(found[name][97:], before[name][97:].to(kind))


@pytest.mark.parametrize("adapter", [{"kind": "none"}, LORA], ids=["full", "lora"])
def test_rows_of_new_tokens_come_from_a_source_that_has_them(tmp_path: Path, adapter: dict[str, Any]) -> None:
    base, grown = write_family(tmp_path / "base"), write_family(tmp_path / "grown", seed=2, vocabulary=99)
    # Of three new tokens the source knows two; the third begins as the mean of the rows before all of them.
    model = built(recipe_of(base, {"path": str(grown), "grow": True}, adapter=adapter), range(97, 100))
    found, after = values(model), held(grown)["model.embed_tokens.weight"]
    rows = found.get("model.embed_tokens.new_rows", found["model.embed_tokens.weight"][-3:])
    assert torch.equal(rows[:2], after[97:])
    mean = found["model.embed_tokens.weight"][:97].double().mean(0).float()
    torch.testing.assert_close(rows[2], mean)


def test_an_adapter_goes_on_with_a_quantised_base(base: Path, lora: tuple[Path, TENSORS]) -> None:
    adapter, _ = lora
    section = {**LORA, "target_modules": ["q_proj", "down_proj"]}
    model = built(recipe_of(base, str(adapter), adapter=section, model={"quantize": "int8"}))
    stored = load_file(adapter / "adapter_model.safetensors")
    name = "model.layers.1.mlp.down_proj.lora_B{}.weight"
    assert torch.equal(values(model)[name.format(".default")], stored["base_model.model." + name.format("")])


def test_types_are_those_of_the_model(base: Path, other: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.mkdir()
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(tensors, half / "model.safetensors")
    (half / "config.json").write_text((other / "config.json").read_text())
    found = values(built(recipe_of(base, str(half))))
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    assert not same(found, {name: tensor.float() for name, tensor in tensors.items()})


def test_a_reference_is_the_model_as_it_begins(base: Path, lora: tuple[Path, TENSORS]) -> None:
    adapter, _ = lora
    for entries, reference in (((), "adapter_off"), ((str(adapter),), "columns")):
        recipe = recipe_of(base, *entries, adapter=LORA, method={"kind": "dpo"})
        assert getattr(resolve(recipe, MAX_LENGTH, RankInfo()).recipe.method, "reference") == reference  # noqa: B009


REPORT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
SUMMARY = """\
model directory /models/theirs: 18 of 21 weights, 20 renamed, 1 grown, 2 replaced by a later entry, \
1 without a place, 1 missing there
model directory /models/base: 2 of 21 weights
adapter /models/adapter: 2 of 21 weights, 2 merged
1 weight stays as it was"""


def test_the_report_says_where_every_weight_comes_from(tmp_path: Path) -> None:
    base = write_family(tmp_path / "base", vocabulary=101)
    small = write_family(tmp_path / "small", seed=2)
    theirs = places.rewrite(small, tmp_path / "theirs", lambda name: foreign(name).replace("lm_head", "extra_head"))
    adapter, _ = places.write_peft(base, tmp_path / "adapter")
    recipe = recipe_of(
        base,
        {"path": str(theirs), "rename": FOREIGN, "grow": True, "strict": False},
        {"path": str(base), "load": ["layers.1.mlp"], "exclude": ["up_proj"]},
        {"path": str(adapter), "load": ["layers.0"]},
    )
    plan = planned_for(recipe)
    assert report(plan).replace(str(tmp_path), "/models") == REPORT
    assert summary(plan).replace(str(tmp_path), "/models") == SUMMARY
