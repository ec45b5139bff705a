"""Preference and reward trainings of other tools, converted: the method with its losses, weights and traps."""

from typing import Any

import pytest

from tests.fixtures.tables import cases
from tuner.config.imported import import_text
from tuner.config.methods import DistillMethod
from tuner.config.other_methods import kind_of
from tuner.errors import RecipeError

AXOLOTL = "base_model: a/b\nmicro_batch_size: 1\nsequence_len: 512\ndatasets: [{path: r.jsonl, type: chatml.intel}]\n"
FACTORY = "model_name_or_path: a/b\nfinetuning_type: lora\ncutoff_len: 512\ndataset: own.json\n"
TRL = "model_name_or_path: a/b\ndataset_name: o/s\nmax_length: 512\n"
TORCHTUNE: Any = cases(__file__, "torchtune")
SWIFT = "model: a/b\nrlhf_type: %s\ndataset: [own.jsonl]\nmax_length: 512\ntuner_type: lora\n"


def method_of(text: str) -> dict[str, Any]:
    """The keys of the method in the recipe that comes of a configuration, with what is not the method's default."""
    method = import_text(text, "c.yaml").recipe.method
    default = type(method)()
    names = type(method).model_fields
    found = {name: getattr(method, name) for name in names if getattr(method, name) != getattr(default, name)}
    return found | {"kind": method.kind}


@pytest.mark.parametrize(("text", "expected"), cases(__file__, "a_method_comes_with_its_losses_and_weights"))
def test_a_method_comes_with_its_losses_and_weights(text: str, expected: dict[str, Any]) -> None:
    assert method_of(text) == expected


TAUGHT = "checkpointer: {checkpoint_dir: a/b}\nteacher_checkpointer: {checkpoint_dir: o/t}\n"


@pytest.mark.parametrize(("text", "expected"), cases(__file__, "a_teacher_of_torchtune"))
def test_a_teacher_of_torchtune_comes_with_the_share_of_its_loss(text: str, expected: list[object]) -> None:
    found = import_text(TAUGHT + text, "c.yaml", "torchtune")
    method = found.recipe.method
    assert isinstance(method, DistillMethod) and method.teacher == "o/t"
    left = [item.partition(":")[0] for item in found.left if not item.startswith("data.train")]
    assert [method.ce_weight, method.beta, method.rows, left] == expected


@pytest.mark.parametrize(("command", "kind"), cases(__file__, "a_command_says_what_it_trains"))
def test_a_command_says_what_it_trains(command: str, kind: str) -> None:
    assert import_text(command, "run.sh").recipe.method.kind == kind


def test_a_row_holds_both_answers_where_others_count_one() -> None:
    pairs, labelled = import_text(AXOLOTL + "rl: dpo", "c.yaml"), import_text(AXOLOTL + "rl: kto", "c.yaml")
    assert (pairs.recipe.data.max_length, labelled.recipe.data.max_length) == (1024, 512)
    assert "# 2 x sequence_len: a row holds both answers of a pair" in pairs.text


def test_a_type_that_writes_its_own_template_names_it_and_its_columns() -> None:
    (source,) = import_text(AXOLOTL + "rl: dpo", "c.yaml").recipe.data.train
    assert (source.format, source.columns) == ("auto", {"prompt": "question"})
    assert import_text(AXOLOTL + "rl: dpo", "c.yaml").recipe.tokenizer.chat_template == "chatml"


def test_a_builder_of_pairs_names_its_columns() -> None:
    (source,) = import_text(TORCHTUNE, "c.yaml").recipe.data.train
    assert source.path == "lvwerra/stack-exchange-paired:train"
    assert source.columns == {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}


def test_rates_are_those_of_the_other_trainer() -> None:
    rates = {text: import_text(TRL + text, "c.yaml").recipe.optimizer.lr for text in ("beta: 0.1", "rl: rm", "")}
    assert rates == {"beta: 0.1": 2e-5, "rl: rm": 1e-4, "": 2e-5}
    assert import_text(TRL + "loss_type: sigmoid", "c.yaml").recipe.optimizer.lr == 1e-6


@pytest.mark.parametrize(("text", "left"), cases(__file__, "what_is_not_here"))
def test_what_is_not_here_is_listed_with_what_to_write(text: str, left: str) -> None:
    found = import_text(TRL + text, "c.yaml")
    assert found.recipe.method.kind == "dpo"
    assert any(item.startswith(left) for item in found.left), found.left


@pytest.mark.parametrize("kind", ["grpo", "ppo", "rloo", "online_dpo", "gdpo", "gkd"])
def test_a_kind_that_is_not_here_is_refused_by_its_name(kind: str) -> None:
    with pytest.raises(RecipeError, match=f"rl: {kind}: not supported: "):
        import_text(AXOLOTL + f"rl: {kind}", "c.yaml")


@pytest.mark.parametrize(
    "given", [{}, {"stage": "sft", "loss_type": "sigmoid"}, {"loss_type": "nll"}, {"reward_model": "path"}]
)
def test_other_trainings_are_taken_for_none(given: dict[str, Any]) -> None:
    assert kind_of(given) is None
