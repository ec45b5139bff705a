"""The rules of `data.windows`: what cannot be is refused with the line to write, and without windows nothing is new."""

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tables import cases
from tuner.config.load import Override, load_recipe, recipe_dict, recipe_yaml
from tuner.errors import RecipeError

BASE: Any = cases(__file__, "base")
NAMED = BASE.replace("{files: 1}", "{names: [a, b]}").replace("train: logs", "train: 'logs/{window}.jsonl'")
OPEN = BASE.replace("duration: 20 steps", "duration: 1 epoch")
CONSTANT = OPEN + "schedule: {kind: constant, warmup: 2 steps}\n"


def loaded(tmp_path: Path, text: str, **flags: str) -> Any:
    (tmp_path / "r.yaml").write_text(text)
    return load_recipe(tmp_path / "r.yaml", [Override(key.replace("__", "."), text) for key, text in flags.items()])


def refused(tmp_path: Path, text: str, **flags: str) -> str:
    with pytest.raises(RecipeError) as caught:
        loaded(tmp_path, text, **flags)
    assert len(caught.value.problems) == 1, caught.value.problems
    return str(caught.value.problems[0])


def test_windows_load_and_are_written_back(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, BASE, data__windows__wait="2 min").recipe
    assert recipe.data.windows.is_on and str(recipe.data.windows.wait) == "2 min"
    (tmp_path / "again.yaml").write_text(recipe_yaml(recipe))
    assert load_recipe(tmp_path / "again.yaml").recipe == recipe


def test_a_recipe_of_unknown_length_is_written_back(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, CONSTANT, data__eval="held.jsonl").recipe
    assert load_recipe(recipe_dict(recipe)).recipe == recipe


def test_a_recipe_without_windows_says_nothing_of_them(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, BASE.replace("  windows: {files: 1}\n", "")).recipe
    assert not recipe.data.windows.is_on
    assert "windows" not in recipe_dict(recipe)["data"]


@pytest.mark.parametrize("text", [BASE, NAMED, CONSTANT, CONSTANT.replace("2 steps", "never")])
def test_these_are_whole(tmp_path: Path, text: str) -> None:
    loaded(tmp_path, text)


@pytest.mark.parametrize(("text", "flags", "said"), cases(__file__, "what_cannot_be_is_refused_with_the_line_to_write"))
def test_what_cannot_be_is_refused_with_a_line(tmp_path: Path, text: str, flags: dict[str, str], said: str) -> None:
    assert said in refused(tmp_path, text, **flags)


def test_a_reference_for_all_data_is_refused(tmp_path: Path) -> None:
    dpo = "method: {kind: dpo, reference: columns}\n"
    assert "write method.reference: adapter_off" in refused(tmp_path, BASE + dpo)
