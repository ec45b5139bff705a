"""The recipes that ship: each names a card and a model whose shape is known, brings its data, and trains in small."""

import json
from pathlib import Path

import pytest

from tests.fixtures import commands
from tests.reference import assets
from tools.recipes_campaign import SHAPES, small, target
from tuner.config.dump import recipe_yaml
from tuner.config.load import load_recipe
from tuner.config.paths import recipes_dir
from tuner.config.shipped import shipped_recipes, summary

RECIPES = shipped_recipes()


@pytest.mark.parametrize("name", RECIPES)
def test_its_name_says_where_it_trains_and_its_data_is_there(name: str) -> None:
    recipe = load_recipe(RECIPES[name]).recipe
    device, processes = target(name)
    assert (device == "cpu") == (recipe.train.device != "cuda")
    assert recipe.parallel.processes == (processes if processes > 1 else "auto")
    assert recipe.model.name_or_path in SHAPES or Path(recipe.model.name_or_path).is_dir()
    assert all(Path(source.path).is_relative_to(recipes_dir() / "data") for source in recipe.data.train)
    assert all(Path(source.path).is_file() for source in recipe.data.train)
    assert summary(RECIPES[name])
    assert name in RECIPES[name].read_text(encoding="utf-8").splitlines()[1] or name == "tiny_pretrain_cpu"


def test_there_are_recipes_for_what_people_ask_for() -> None:
    assert len(RECIPES) >= 15
    assert {target(name) for name in RECIPES} == {("cpu", 1), ("a10-24g", 1), ("h100-80g", 1), ("h100-80g", 8)}


@pytest.mark.slow
def test_chat_from_a_base_model_trains_in_small(tmp_path: Path) -> None:
    name = "smollm2-base_chat_cpu"
    recipe = small(RECIPES[name], tmp_path, assets.asset("smollm2"), assets.asset("qwen3").parent).recipe
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(recipe), encoding="utf-8")
    done = commands.tuner("train", "recipe.yaml", "--json", cwd=tmp_path, code=0)
    metrics = json.loads(done.stdout)["metrics"]
    assert metrics["step"] == 2 and 0.05 * metrics["tokens"] < metrics["trained_tokens"] < 0.7 * metrics["tokens"]
