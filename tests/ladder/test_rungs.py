"""Rungs: ordinary recipes that follow from the rules, models of the wanted size, and what is refused."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tables import cases
from tests.ladder.made import ladder_tree, write_ladder_files
from tuner.config.load import Override, RecipeText, load_recipe, recipe_dict, recipe_yaml
from tuner.errors import RecipeError
from tuner.ladder.rungs import Proportions, rungs_of, shape_of


def test_a_rung_is_an_ordinary_recipe(tmp_path: Path) -> None:
    path = write_ladder_files(tmp_path)
    small, large = rungs_of(load_recipe(path, cwd=tmp_path))
    assert (small.name, large.name) == ("small", "large")
    assert large.parameters > small.parameters
    assert large.total_parameters - large.parameters == small.total_parameters - small.parameters == 259 * 32
    recipe = large.loaded.recipe
    assert recipe.ladder.sizes == () and "ladder:" not in large.loaded.text
    again = load_recipe(RecipeText(large.loaded.text), cwd=tmp_path).recipe
    assert recipe_dict(again) == recipe_dict(recipe), "as it is kept in the run directory it is the same recipe"
    assert Path(recipe.output_dir) == tmp_path / "runs" / "ladder" / "large"
    assert (recipe.name, recipe.model.config) == ("ladder-large", {"num_hidden_layers": 2, "hidden_size": 32})
    assert (str(recipe.train.duration), recipe.train.global_batch_size) == ("12 steps", 4)
    assert [str(mark) for mark in recipe.checkpoint.marks] == ["4 steps", "6 steps", "10 steps", "12 steps"]
    assert recipe.eval.marks == recipe.checkpoint.marks
    assert recipe.logging.group == "ladder", "trackers show the rungs as one group"
    assert recipe.schedule.model_dump(mode="json") == {
        "kind": "wsd_s", "warmup": "2 steps", "periods": ["6 steps", "6 steps"], "peaks": [], "decay": "30%",
        "decay_shape": "linear", "min_lr_ratio": 0.0,
    }  # fmt: skip
    assert recipe.optimizer.lr == pytest.approx(0.00235 * (large.parameters / 108e6) ** (-1 / 3))
    assert recipe.optimizer.model_dump()["betas"] == [0.9, 0.99]
    assert large.step_flops > 6 * large.parameters * 256


def test_later_periods_may_step_down(tmp_path: Path) -> None:
    write_ladder_files(tmp_path)
    small, _ = rungs_of(load_recipe(ladder_tree(stepped=True, multiples=[0.5, 1, 4]), cwd=tmp_path))
    assert small.loaded.recipe.schedule.model_dump()["peaks"] == [1.0, 1.0, 0.5]


def test_the_mark_before_the_first_step(tmp_path: Path) -> None:
    write_ladder_files(tmp_path)
    tree = ladder_tree(initial=True)
    with pytest.raises(RecipeError, match="ladder.initial evaluates each size before its first step"):
        load_recipe(tree, cwd=tmp_path)
    del tree["eval"]["at_start"]
    small, _ = rungs_of(load_recipe(tree, cwd=tmp_path))
    marks = [(mark.phase, mark.step, mark.tokens) for mark in small.marks]
    assert marks[:2] == [("initial", 0, 0), ("pre-decay", 4, 1024)]
    recipe = small.loaded.recipe
    assert recipe.checkpoint.at_start and recipe.eval.at_start and len(recipe.checkpoint.marks) == 4


def test_the_recipes_own_values_stay_where_a_rule_says_recipe(tmp_path: Path) -> None:
    write_ladder_files(tmp_path)
    tree = ladder_tree(lr="recipe", batch_tokens="recipe", beta2="recipe")
    tree |= {"optimizer": {"lr": 1e-3, "betas": [0.8, 0.9]}, "train": {**tree["train"], "global_batch_size": 8}}
    small, _ = rungs_of(load_recipe(tree, cwd=tmp_path))
    recipe = small.loaded.recipe
    assert (recipe.optimizer.lr, recipe.optimizer.model_dump()["betas"]) == (1e-3, [0.8, 0.9])
    assert recipe.train.global_batch_size == 8 and small.plan.total_steps == 6


def test_processes_grow_with_the_batch(tmp_path: Path) -> None:
    write_ladder_files(tmp_path)
    tree = ladder_tree(batch_tokens=2048, tokens="16K", min_processes=2, max_processes=16)
    tree["ladder"]["sizes"][1] |= {"micro_batch_size": 2, "min_processes": 16}
    small, large = rungs_of(load_recipe(tree, cwd=tmp_path))
    assert (small.batch.processes, small.batch.accumulation, small.batch.micro_tokens) == (8, 1, 256)
    assert (large.batch.processes, large.batch.accumulation, large.batch.micro_tokens) == (16, 1, 128)
    assert large.loaded.recipe.parallel.processes == 16
    assert large.loaded.recipe.train.micro_batch_size == 2


@pytest.mark.parametrize(
    "wanted", [320_000, pytest.param(100_000, marks=pytest.mark.slow), pytest.param(3_000_000, marks=pytest.mark.slow)]
)
def test_a_count_of_parameters_becomes_a_shape(wanted: int, tmp_path: Path) -> None:
    write_ladder_files(tmp_path)
    (rung,) = rungs_of(load_recipe(ladder_tree(sizes=[wanted], tokens="N"), cwd=tmp_path))
    config = rung.loaded.recipe.model.config
    assert rung.parameters == pytest.approx(wanted, rel=0.07 if wanted > 10**6 else 0.12)
    assert config["num_attention_heads"] == 2 * config["num_key_value_heads"], "heads share keys as they did"
    assert config["hidden_size"] == 16 * config["num_attention_heads"]
    assert config["intermediate_size"] == 2 * config["hidden_size"]
    assert 16 <= config["hidden_size"] / config["num_hidden_layers"] <= 64, "as deep as wide, about as the base is"


def counted(channels: int) -> Callable[[dict[str, int]], int]:
    """Counts a Llama's parameters by a formula, for heads of so many channels: no model is built."""

    def count(shape: dict[str, int]) -> int:
        h, keys = shape["hidden_size"], shape["num_key_value_heads"] * channels
        return shape["num_hidden_layers"] * (2 * h * h + 2 * h * keys + 3 * h * shape["intermediate_size"] + 2 * h) + h

    return count


def test_neighbours_are_as_deep_for_their_width_although_their_counts_would_be_met_better_otherwise() -> None:
    """230K could be one layer of 160 channels within 0.4 %: a loss that no fit of the others can expect."""
    base = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "model_type": "llama",
    }  # fmt: skip
    count = counted(16)
    wanted = (110_000, 230_000, 590_000, 1_300_000, 3_000_000, 60_000_000)
    shapes = [shape_of(parameters, base, count) for parameters in wanted]
    aspects = [shape["hidden_size"] / shape["num_hidden_layers"] for shape in shapes]
    assert min(aspects) > 32 / 1.6 and max(aspects) < 32 * 1.6, aspects
    assert [count(shape) for shape in shapes] == pytest.approx(wanted, rel=0.09)


def test_a_shape_keeps_proportions_and_count() -> None:
    """Of a Llama of 3 B parameters."""
    base = {
        "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
        "intermediate_size": 8192, "model_type": "llama",
    }  # fmt: skip
    count = counted(128)
    for wanted in (190_000_000, 1_000_000_000, 13_000_000_000):
        shape = shape_of(wanted, base, count)
        assert count(shape) == pytest.approx(wanted, rel=0.04)
        assert shape["num_attention_heads"] == 3 * shape["num_key_value_heads"]
        assert shape["hidden_size"] == 128 * shape["num_attention_heads"]
        assert shape["intermediate_size"] == pytest.approx(shape["hidden_size"] * 8192 / 3072, abs=8)
        assert 55 < shape["hidden_size"] / shape["num_hidden_layers"] < 220
    with pytest.raises(RecipeError, match="names no hidden_size to scale"):
        Proportions.of({"model_type": "gpt2", "n_embd": 768})


@pytest.mark.parametrize(("changed", "said"), cases(__file__, "what_does_not_go_with_a_ladder_is_refused"))
def test_what_does_not_go_with_a_ladder_is_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    tree = ladder_tree()
    for section, values in changed.items():
        tree[section] = {**tree.get(section, {}), **values}
    with pytest.raises(RecipeError) as found:
        load_recipe(tree, cwd=tmp_path)
    assert said in found.value.message


def test_a_whole_ladder_that_is_written_out_loads_again(tmp_path: Path) -> None:
    write_ladder_files(tmp_path)
    loaded = load_recipe(tmp_path / "ladder.yaml", cwd=tmp_path)
    again = load_recipe(RecipeText(recipe_yaml(loaded.recipe)), cwd=tmp_path)
    assert again.recipe == loaded.recipe


def test_keys_of_a_ladder_are_flags(tmp_path: Path) -> None:
    path = write_ladder_files(tmp_path)
    flags = [Override("ladder.tokens", "20 * N"), Override("ladder.multiples", "[0.5, 1]")]
    ladder = load_recipe(path, flags, cwd=tmp_path).recipe.ladder
    assert str(ladder.tokens) == "20 * N" and ladder.multiples == (0.5, 1.0)


def test_two_rungs_of_one_name_are_refused(tmp_path: Path) -> None:
    write_ladder_files(tmp_path)
    same = [{"config": {"num_hidden_layers": 1}}, {"config": {"num_hidden_layers": 1}}]
    with pytest.raises(RecipeError, match="two sizes are named"):
        rungs_of(load_recipe(ladder_tree(sizes=same), cwd=tmp_path))
    with pytest.raises(RecipeError, match="got the name 'a' twice"):
        load_recipe(ladder_tree(sizes=[{"name": "a", **same[0]}, {"name": "a", **same[1]}]), cwd=tmp_path)


def test_what_reads_a_ladder_needs_no_torch() -> None:
    code = "import sys, tuner.cli.ladder, tuner.cli.work.ladder_marks; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr
