"""Layers that several processes compute together: losses, gradients and norms are those of one process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from tests.fixtures import tables
from tests.fixtures.processes import run_ranks
from tests.fixtures.split import Alone, Split, all_batches, differences, split_model, step, whole_model
from tests.fixtures.tensors import Operations
from tests.model.tiny import FAMILIES, family_config
from tuner.errors import RecipeError
from tuner.model.adapter import LoraSpec, add_lora
from tuner.model.build import ModelSpec, meta_model, model_config
from tuner.parallel.mesh import Mesh, MeshSpec
from tuner.parallel.tensor.plan import SplitWay, check_split, parts_of

BIASED = {"attention_bias": True, "mlp_bias": True}
ALONE = {
    "families": [
        Split("llama", config={**BIASED, "vocab_size": 98}, accumulated=4),
        Split("qwen3", tied=True, accumulated=4, level="full"),
        Split("gemma3", tied=True),
        Split("mistral", config={"num_key_value_heads": 1}, accumulated=2),
    ],
    "other families": [Split("olmo2", level="selective"), Split("phi"), Split("phi3"), Split("qwen3-moe")],
    "adapters": [
        Split("qwen3", tied=True, adapter="lora", config={"num_key_value_heads": 1, "attention_bias": True}),
        Split("llama", adapter="lora", dropout=0.1, accumulated=4, new_ids=range(97, 99), config={"vocab_size": 99}),
        Split("phi", adapter="dora", saved=("lm_head", "embed_tokens")),
        Split("phi3", adapter="dora", dropout=0.1),
    ],
}
"""Groups of cases for two processes, of which each holds a part of every layer."""
FOUR = MeshSpec("full", tensor=4)
SHARDED = {
    "one group": [Split("llama", mesh=FOUR, config=BIASED), Split("qwen3", tied=True, mesh=FOUR, accumulated=2)],
    "two groups that shard what they have": [
        Split("qwen3", tied=True, accumulated=4, config={"vocab_size": 100}),
        Split("llama", adapter="dora", accumulated=2, config={"vocab_size": 100, "num_key_value_heads": 1}),
        Split("phi", config={"vocab_size": 104}, accumulated=2, whole=True, level="full"),
    ],
    "two groups that have a copy each": [
        Split("mistral", mesh=MeshSpec("hybrid", tensor=2), machines=2, config=BIASED),
    ],
}
"""Groups of cases for four processes."""


def compared(processes: int, cases: Sequence[Split], directory: Path) -> None:
    alone = [Alone.of(case, processes, directory / str(number)) for number, case in enumerate(cases)]

    def work(rank: int) -> None:
        assert [said for case, one in zip(cases, alone, strict=True) for said in differences(case, one, rank)] == []

    assert run_ranks(processes, directory, work) == [0] * processes


@pytest.mark.slow("other families")
@pytest.mark.multi
@pytest.mark.parametrize("group", ALONE)
def test_a_step_of_two_processes_is_that_of_one(group: str, tmp_path: Path) -> None:
    compared(2, ALONE[group], tmp_path)


@pytest.mark.slow("one group")
@pytest.mark.multi
@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=pytest.mark.slow) if group.endswith("have") else group for group in SHARDED]
)
def test_so_is_one_of_four_processes_with_shards_and_copies(group: str, tmp_path: Path) -> None:
    compared(4, SHARDED[group], tmp_path)


def model_of(family: str, directory: Path, **changes: object) -> PreTrainedModel:
    config = family_config(family, False)
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(directory)
    return meta_model(model_config(ModelSpec(str(directory), random_init=True)), torch.float32)


@pytest.mark.parametrize(
    ("family", "changes", "size", "expected", "hint"),
    tables.cases(__file__, "what_cannot_be_split_is_refused_with_the_numbers_that_can"),
)
def test_what_cannot_be_split_is_refused_with_the_numbers_that_can(
    family: str, changes: dict[str, object], size: int, expected: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=expected) as refused:
        check_split(model_of(family, tmp_path, **changes), size)
    assert str(refused.value).startswith("parallel.tensor: ") and hint in str(refused.value.hint)


def test_an_mlp_that_looks_at_all_columns_is_refused(tmp_path: Path) -> None:
    """Gemma 3n's plan splits it as any other."""
    model = model_of("llama", tmp_path)
    check_split(model, 2)
    mlp = model.get_decoder().layers[1].mlp
    mlp.act_fn = torch.nn.Softmax(-1)
    with pytest.raises(RecipeError, match="layers.1.mlp of a llama model is not shown to compute columns one by one"):
        check_split(model, 2)


def test_a_type_that_was_tried_and_differed_is_refused(tmp_path: Path) -> None:
    model = model_of("llama", tmp_path)
    vars(model.config)["model_type"] = "qwen3_5_text"
    with pytest.raises(RecipeError, match="a qwen3_5_text model was not shown to compute what it does in one process"):
        check_split(model, 2)


def test_an_adapter_of_the_output_layer_is_refused(tmp_path: Path) -> None:
    model = model_of("llama", tmp_path)
    add_lora(model, LoraSpec(4, 8.0, 0.0, ["q_proj", "lm_head"]), 1)
    with pytest.raises(RecipeError, match="the output layer has an adapter") as refused:
        check_split(model, 2)
    assert refused.value.hint == "leave it out of adapter.target_modules, or move it to adapter.modules_to_save"


def test_layers_are_split_as_the_plan_and_the_heads_have_it(tmp_path: Path) -> None:
    ways: dict[str, dict[str, Mapping[str, SplitWay]]] = {}
    for family in FAMILIES:
        if family != "gpt2":
            ways[family] = {part.name: part.ways for part in parts_of(model_of(family, tmp_path), 2)}
    mlp = {"gate_proj": "columns", "up_proj": "columns", "down_proj": "rows"}
    attention = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "columns"), "o_proj": "rows"}
    assert ways["llama"]["layers.1.self_attn"] == attention and ways["llama"]["layers.1.mlp"] == mlp
    assert ways["qwen3"]["layers.0.self_attn"] == attention | dict.fromkeys(("q_norm", "k_norm"), "partial_norm")
    assert ways["olmo2"]["layers.0.self_attn"] == attention | dict.fromkeys(("q_norm", "k_norm"), "gathered_norm")
    assert ways["phi3"]["layers.0.mlp"] == {"gate_up_proj": "columns_gathered", "down_proj": "rows_of_own"}
    assert list(ways["mixtral"]) == ["layers.0.self_attn", "layers.1.self_attn"], "experts stay whole"
    few = parts_of(model_of("qwen3", tmp_path, num_key_value_heads=1), 2)[0].ways
    assert (few["q_proj"], few["k_proj"], few["v_proj"]) == ("columns", "repeated", "repeated")


@pytest.mark.multi
def test_two_processes_share_the_products_and_send_what_the_formula_says(tmp_path: Path) -> None:
    """Of a step without recomputing: half of the products, and of each layer two activations forward and two back."""

    def work(rank: int) -> None:
        (tmp_path / str(rank)).mkdir()
        case = Split("llama", config={"vocab_size": 512, "intermediate_size": 64})
        mesh = case.mesh_of(rank, 2)
        whole = whole_model(case, tmp_path / str(rank))
        split, batches = split_model(case, mesh, whole, tmp_path / str(rank)), all_batches(case, 1)
        with FlopCounterMode(display=False) as alone:
            step(whole, Mesh(), batches)
        with FlopCounterMode(display=False) as shared, Operations(summed) as sent:
            step(split, mesh, batches)
        assert shared.get_total_flops() == pytest.approx(alone.get_total_flops() / 2, rel=0.05)
        config, tokens = whole.model.config, batches.tokens
        activations = [numel for numel in sent.found if numel == tokens * config.hidden_size]
        layers, embedding, head = 4 * config.num_hidden_layers, 1, 1
        predicted = tokens - len(batches.micro[0].lengths)
        assert len(activations) == layers + embedding
        assert sent.found.count(predicted * config.hidden_size) == head

    assert run_ranks(2, tmp_path, work) == [0, 0]


def summed(func: Any, args: Any, result: Any) -> list[int]:
    """The elements of every sum over processes."""
    return [tensor.numel() for tensor in args[0]] if func is torch.ops.c10d.allreduce_.default else []
