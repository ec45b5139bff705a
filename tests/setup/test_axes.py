"""Sizes of axes that a model cannot have are refused by its config, with those that it can."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MambaConfig, PretrainedConfig, Qwen3MoeConfig

from tests.fixtures.predict_cases import EXPERTS, GPT2, SHAPE
from tests.fixtures.tables import cases
from tuner.config.load import load_recipe
from tuner.config.recipe import ParallelSection
from tuner.errors import MachineError, RecipeError
from tuner.model.build import meta_model
from tuner.runtime.dist import RankInfo
from tuner.setup.axes import check_axes, possible_sizes, problem
from tuner.setup.check import _check_processes
from tuner.setup.findings import Findings
from tuner.setup.resolve import check_division, resolve
from tuner.setup.settled import Settled, data_processes, ways_to_shard, whole_batches
from tuner.setup.specs import require_groups


def llama(**values: Any) -> PretrainedConfig:
    return LlamaConfig(**{**SHAPE, **values})


@pytest.mark.parametrize(
    ("axis", "config", "within", "sizes"),
    [
        ("tensor", llama(), 1, (1, 2, 4)),
        ("tensor", llama(intermediate_size=50), 1, (1, 2)),
        ("tensor", llama(num_attention_heads=12, num_key_value_heads=3, hidden_size=96), 1, (1, 3, 6, 12)),
        ("sequence", llama(intermediate_size=51), 1, (1, 2, 4)),
        ("sequence", llama(num_attention_heads=12, num_key_value_heads=3, hidden_size=96), 1, (1, 2, 3, 4, 6, 12)),
        ("sequence", llama(), 2, (1, 2)),
        ("sequence", MambaConfig(), 1, (1,)),
        ("expert", Qwen3MoeConfig(**{**SHAPE, **EXPERTS}), 1, (1, 2, 4)),
        ("expert", llama(), 1, (1,)),
    ],
)
def test_possible_sizes(axis: str, config: PretrainedConfig, within: int, sizes: tuple[int, ...]) -> None:
    assert possible_sizes(axis, config, within) == sizes


@pytest.mark.parametrize(
    ("axis", "config", "within", "words"),
    [
        ("tensor", llama(), 1, "does not divide the 4 heads"),
        ("sequence", llama(), 2, "times parallel.tensor: 2 does not divide the 4 heads"),
        ("expert", Qwen3MoeConfig(**{**SHAPE, **EXPERTS}), 1, "does not divide the 4 experts of a layer"),
        ("expert", llama(), 1, "divides experts, and llama has none"),
        ("sequence", MambaConfig(), 1, "divides heads, and the config of mamba does not say how many it has"),
    ],
)
def test_words(axis: str, config: PretrainedConfig, within: int, words: str) -> None:
    assert problem(axis, config, 3, within) == words


def test_key_heads_and_widths_are_named() -> None:
    shared = llama(num_attention_heads=12, num_key_value_heads=3, hidden_size=96)
    assert problem("tensor", shared, 2) == "neither divides the 3 key heads, nor is a multiple of them"
    assert problem("tensor", llama(intermediate_size=50), 4) == "does not divide the width of the MLP, 50"


def refused(config: PretrainedConfig, **sizes: int) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        check_axes(meta_model(config, torch.float32), ParallelSection(**sizes))
    return caught.value


def test_a_model_is_refused_with_the_sizes_that_it_can_have() -> None:
    error = refused(llama(), tensor=3)
    assert error.message == "parallel.tensor: 3 does not divide the 4 heads"
    assert error.hint == "sizes that are possible for this model: 1, 2, 4"
    assert refused(GPT2Config(**GPT2), tensor=2).message.startswith("parallel.tensor: transformers has no plan")
    check_axes(meta_model(llama(), torch.float32), ParallelSection(tensor=2, sequence=2))


def recipe(directory: str = "model", **parallel: Any) -> Any:
    tree = {"model": {"name_or_path": directory}, "data": {"train": "rows.jsonl"}, "parallel": parallel}
    return load_recipe(tree)


def test_a_batch_divides_into_groups_that_share_rows() -> None:
    loaded = recipe(tensor=2, sequence=2)
    assert data_processes(loaded.recipe.parallel, 8) == 2
    check_division(loaded.recipe, 64)  # 16 rows
    with pytest.raises(
        RecipeError, match="16 rows do not divide into 3 groups of 4 processes, each of 1 rows"
    ) as error:
        check_division(loaded.recipe, 12)
    assert error.value.hint == "numbers of processes (parallel.processes) that divide it: 4, 8, 16, 32, 64"
    assert whole_batches(loaded, 8) == Settled()
    assert list(whole_batches(loaded, 12).reasons.values()) == [
        "the default of 16 rows does not divide into 3 groups of 4 processes"
    ]


def test_groups_stay_inside_a_machine() -> None:
    two_machines = RankInfo(0, 16, 0, 8)
    assert ways_to_shard(recipe(tensor=4).recipe, two_machines) == ("hybrid", "full")
    assert ways_to_shard(recipe(tensor=16).recipe, two_machines) == ("full",)
    assert ways_to_shard(recipe(sequence=2).recipe, RankInfo(0, 8, 0, 8)) == ("full",)
    with pytest.raises(MachineError, match="parallel.tensor: 4 does not divide the number of processes, 6"):
        require_groups(recipe(tensor=4).recipe, RankInfo(0, 6, 0, 6))


@pytest.mark.parametrize(
    ("parallel", "text"), cases(__file__, "a_written_number_of_processes_is_checked_without_a_model")
)
def test_a_written_number_of_processes_is_checked_without_a_model(parallel: dict[str, Any], text: str | None) -> None:
    found = Findings(recipe(**parallel))
    _check_processes(found.loaded.recipe, found)
    assert [problem.message for problem in found.problems] == ([] if text is None else [text])


def test_a_launch_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)  # no weights are there
    with pytest.raises(RecipeError, match="parallel.sequence: 3 does not divide the 4 heads"):
        resolve(recipe(str(tmp_path), sequence=3).recipe, 64, RankInfo(0, 3, 0, 3))
