"""The recipes that ship: each names a card and a model whose shape is known, and brings its data."""

from pathlib import Path

import pytest

from tools.recipes_campaign import SHAPES, target
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
