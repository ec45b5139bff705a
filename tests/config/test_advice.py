"""What errors say about keys and values that are not ours."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tuner.config.advice import of_unknown
from tuner.config.conversion import convert, known_names, rules
from tuner.config.duration import Span
from tuner.config.fields import Field, fields, find
from tuner.config.load import load_recipe
from tuner.config.not_supported import Absent, absent_features
from tuner.config.other_tools import other_values, theirs
from tuner.errors import RecipeError

MINIMAL: dict[str, Any] = {"model": {"name_or_path": "owner/name"}, "data": {"train": "rows.jsonl"}}
EXPECTED = {"eval.patience"}
"""Keys that an answer may name before they are there."""


def problem(more: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(MINIMAL | more)
    (found,) = caught.value.problems
    return found.message


@pytest.mark.parametrize("feature", absent_features(), ids=lambda feature: feature.names.split()[0])
def test_what_is_not_supported_is_called_that(feature: Absent) -> None:
    for name in feature.names.split():
        assert of_unknown(name, True) == feature.sentence
    name = feature.names.split()[0]
    assert problem({name: True}) == feature.sentence
    keys = [key for key in re.findall(r"\b([a-z]+\.[a-z_]+)\b", feature.instead) if key.split(".")[0] in SECTIONS]
    assert all(find(key) is not None for key in keys), keys


SECTIONS = {key.split(".")[0] for key in fields() if "." in key}


def test_no_key_is_in_two_tables() -> None:
    names = [name for feature in absent_features() for name in feature.names.split()]
    assert len(names) == len(set(names))
    assert not set(names) & (set(theirs()) | set(rules()))
    assert not set(names) & {key for key in fields() if "." not in key}


def test_every_value_of_another_tool_is_of_a_key_that_is_there() -> None:
    for key, values in other_values().items():
        assert find(key.replace("data.train.", "data.train.0.")) is not None, key
        for value, text in values.items():
            assert text.startswith(("write ", "not supported: ")), (key, value)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"pref_beta": 0.2}, "unknown; write method.kind: dpo and method.beta: 0.2"),
        ({"rl": "simpo"}, "unknown; write method.kind: simpo"),
        ({"ld_alpha": 0.5}, "not supported: preference losses other than those of method.kind: dpo, orpo, simpo"),
        ({"hub_model_id": "a/b"}, "not supported: pushing to the hub from a recipe; instead tuner push"),
        (
            {"resume_from_checkpoint": "x"},
            "not supported: resuming from a key of the recipe; instead tuner train RECIPE --resume auto",
        ),
        ({"bogus": 1}, "unknown; a recipe has version, name"),
        ({"train": {"bogus": 1}}, "unknown; train has duration, "),
        ({"data": {"train": "x", "format": "text"}}, "write data.train: [{path: ..., format: text}]"),
        ({"gradient_accumulation_steps": 4}, "unknown; accumulation follows from train.global_batch_size"),
        ({"tensor_parallel_size": 2}, "unknown; write parallel.tensor: 2"),
        ({"ulysses_size": 4}, "unknown; write parallel.sequence: 4"),
        ({"expert_parallel_size": 0}, "unknown; write parallel.expert: 1"),
        (
            {"ring_attn_func": "varlen_llama3"},
            "attention in a ring of processes; instead parallel.sequence",
        ),
        ({"pp_size": 2}, "not supported: pipelines of layers; instead parallel.shard: full"),
        ({"learing_rate": 1e-4}, "unknown; write optimizer.lr: 0.0001"),
        ({"method": {"kind": "grpo"}}, "got 'grpo'; not supported: reinforcement learning"),
        ({"adapter": {"kind": "qlora"}}, "got 'qlora'; write lora, with model.quantize: nf4"),
        ({"optimizer": {"kind": "lion"}}, "got 'lion'; not supported: lion; instead write adamw"),
        ({"train": {"precision": 16}}, "got 16; write fp16"),
        ({"load_in_4bit": True}, "unknown; write adapter.kind: lora and model.quantize: nf4"),
        ({"adapter": {"kind": "lora"}, "load_in_4bit": True}, "unknown; write model.quantize: nf4"),
        ({"adapter": None, "lora_r": 32}, "unknown; all weights are trained, so it changes nothing; leave it out"),
        ({"adapter": {"kind": "none"}, "lora_r": 32}, "unknown; all weights are trained, so it changes nothing"),
        (
            {"dataset": {"_component_": "torchtune.datasets.text_completion_dataset", "source": "o/n", "packed": True}},
            'unknown; write data.train: [{path: "o/n:train", format: text}] and data.packing: auto and '
            "method.kind: pretrain",
        ),
        (
            {"teacher_checkpointer": {"checkpoint_dir": "o/t"}},
            "unknown; write method.kind: distill and method.teacher: o/t and method.ce_weight: 0.5",
        ),
        ({"kd_ratio": 0.3}, "here it is method.kind: distill and method.ce_weight: 0.7, but: teacher is missing"),
        (
            {"checkpoint": [{"type": "deepspeed", "save_every_n_steps": 3}]},
            "got a list; write checkpoint.every: 3 steps",
        ),
        ({"adapter": "llama-adapter"}, "got 'llama-adapter'; not supported: adapter types and initialisations other"),
        ({"nccl_default_timeout_minutes": 30}, "unknown; write parallel.timeout: 30 min"),
        ({"datasets": [{"path": "a.jsonl", "type": "completion"}]}, "format: text}] and method.kind: pretrain"),
        ({"quantization_config": {"load_in_8bit": True}}, "unknown; write adapter.kind: lora and model.quantize: int8"),
        ({"quantization_bit": 3}, "not supported: bases quantised otherwise"),
        ({"model": {"name_or_path": "a/b", "quantize": "4bit"}}, "got '4bit'; write nf4"),
        ({"model": {"name_or_path": "a/b", "quantize": "awq"}}, "not supported: bases quantised otherwise (GPTQ, AWQ"),
        ({"optimizer": {"kind": "paged_adamw_8bit"}}, "write adamw, with optimizer.state: 8bit"),
        ({"optimizer": {"kind": "paged_lion_8bit"}}, "not supported: GaLore, APOLLO, BAdam, LOMO, and states of few"),
        ({"optimizer": {"offload": "cpu"}}, "got 'cpu'; write host"),
        ({"offload_optimizer": {"device": "nvme"}}, "not supported: weights in the host's memory, and anything on a"),
        ({"train": {"gradient_checkpointing": "offload"}}, "write full, with train.offload_activations: true"),
        ({"schedule": {"warmup": 0.03}}, "0.03 what? did you mean 3%?"),
        ({"schedule": {"kind": "wsd", "decay": 0.1}}, "0.1 what? did you mean 10%?"),
        ({"schedule": {"min_lr_ratio": 10}}, "did you mean 10%?"),
        ({"adapter": {"kind": "lora", "dropout": 5}}, "did you mean 5%?"),
        ({"checkpoint": {"every": 0.1}}, "0.1 what? did you mean 10%?"),
        ({"checkpoint": {"marks": [0.5]}}, "0.5 what? did you mean 50%?"),
        ({"export": {"every": 0.25}}, "0.25 what? did you mean 25%?"),
        ({"train": {"duration": 0.5}}, "0.5 what? did you mean 0.5 epochs?"),
        ({"train": {"stop_after": 0.5}}, "0.5 what? did you mean 50%?"),
        ({"data": {"train": "x", "eval": 0.05}}, "0.05 what? did you mean 5%?"),
        ({"data": {"train": "x", "eval": 200}}, "200 what? did you mean 200 documents?"),
        ({"adapter": {"kind": "lora", "target_modules": "all"}}, "got 'all'; write all-linear"),
        ({"adapter": {"kind": "lora", "target_modules": "q_proj,v_proj"}}, "write a list: [q_proj, v_proj]"),
    ],
)
def test_the_answer_is_what_to_write(more: dict[str, Any], expected: str) -> None:
    assert expected in problem(more)


ODD: tuple[Any, ...] = (
    None, True, 0, -1, 0.5, "word", "0.5,0.5", [1], [], {"a": 1}, [{"a": [1]}], {"_component_": "a.B"},
)  # fmt: skip


def test_no_value_of_any_type_is_too_odd_for_a_key_of_another_tool() -> None:
    for name in known_names():
        for value in ODD:
            found = convert(name, value, {name: value})
            assert found is None or isinstance(found, (dict, str)), (name, value)
        for value in ODD[-3:]:
            assert of_unknown(name, value, {name: value}), (name, value)


SHARES = [field for field in fields().values() if isinstance(field.value_type, Span) and "%" in field.value_type.units]


@pytest.mark.parametrize("field", SHARES, ids=lambda field: field.key)
def test_a_share_without_its_sign_is_asked_for_as_percent(field: Field) -> None:
    assert field.value_type is not None
    for value in (0.03, "0.03"):
        with pytest.raises(ValueError, match=r"^0\.03 what\? did you mean 3%\?$"):
            field.value_type.check(value)


def test_one_may_stand_for_a_list_of_one() -> None:
    recipe = load_recipe(
        MINIMAL
        | {
            "logging": {"trackers": "wandb", "tags": "first"},
            "adapter": {"kind": "lora", "target_modules": "q_proj", "modules_to_save": "lm_head"},
            "checkpoint": {"marks": "5 steps"},
            "profile": {"steps": 3},
        }
    ).recipe
    assert (recipe.logging.trackers, recipe.logging.tags) == (("wandb",), ("first",))
    assert recipe.adapter.model_dump()["target_modules"] == ["q_proj"]
    assert (str(recipe.checkpoint.marks[0]), recipe.profile.steps) == ("5 steps", (3,))


def test_problems_say_where_they_are(tmp_path: Any) -> None:
    (tmp_path / "r.yaml").write_text("model: {name_or_path: a/b}\ndata: {train: x}\ntrain: {duration: 3}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml", cwd=tmp_path)
    (found,) = caught.value.problems
    assert (found.file, found.line, found.column, found.key) == ("r.yaml", 3, 19, "train.duration")
    assert str(found) == f"r.yaml:3:19  train.duration  {found.message}"
