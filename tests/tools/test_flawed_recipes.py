"""What `config check` and a dry run find of recipes with one flaw each, and that they pass a sound one."""

import shutil
from pathlib import Path

import pytest

from tests.fixtures import commands
from tools.flawed_recipes import FLAWS, Flaw, found, prepare, recipe_text
from tuner.config.load import read_recipe
from tuner.errors import RecipeError
from tuner.setup.check import check_recipe

FAST = [flaw for flaw in FLAWS if flaw.finder == "check"]
PREPARED = ("more ids than embeddings",)
"""Of those that need prepared data: what only the check after it finds."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and rows."""
    directory = tmp_path_factory.mktemp("sound")
    prepare(directory)
    return directory


@pytest.mark.parametrize("flaw", FAST, ids=lambda flaw: flaw.name)
def test_config_check_finds(flaw: Flaw, sound: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sound, tmp_path / "copy")
    lines = found(flaw, copy, "check")
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"{copy / 'r.yaml'}:") or lines[0].startswith("r.yaml:")
    assert f"  {flaw.key}  " in lines[0]


@pytest.mark.parametrize("flaw", [flaw for flaw in FLAWS if flaw.name in PREPARED], ids=lambda flaw: flaw.name)
def test_a_dry_run_finds(flaw: Flaw, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "cache"))
    copy = shutil.copytree(sound, tmp_path / "copy")
    assert flaw.key in found(flaw, copy, "dry-run")[0]


def test_all_problems_are_said_at_once_and_a_sound_recipe_has_none(sound: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sound, tmp_path / "copy")
    values = {"adapter.kind": "lora", "adapter.target_modules": ["qq", "k_proj", "vv"], "hooks": ["own.py:N"]}
    (copy / "r.yaml").write_text(recipe_text(values | {"data.train": "nowhere.jsonl", "parallel.processes": 3}))
    with pytest.raises(RecipeError) as caught:
        check_recipe(read_recipe(copy / "r.yaml", cwd=copy))
    keys = [problem.key for problem in caught.value.problems]
    assert sorted(keys) == sorted(
        ["data.train.0.path", *["adapter.target_modules"] * 2, "parallel.processes", "hooks.0.use"]
    )
    (copy / "r.yaml").write_text(recipe_text({"adapter.kind": "dora", "adapter.target_modules": "q_proj"}))
    assert "layer names in model" in check_recipe(read_recipe(copy / "r.yaml", cwd=copy))


def test_without_the_model_files_alone_are_checked(sound: Path, tmp_path: Path) -> None:
    rows = str(sound / "rows.jsonl")
    done = commands.tuner("config", "check", "--model.name_or_path", "a/b", "--data.train", rows, cwd=tmp_path, code=0)
    assert "a/b is not on this machine" in done.stderr
