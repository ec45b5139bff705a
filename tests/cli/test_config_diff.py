"""Recipes that differ, and variables of the environment in the place of flags."""

import json
from pathlib import Path

import pytest

from tests.fixtures.commands import tuner
from tests.fixtures.tables import cases

RECIPE = "model: {name_or_path: m}\ndata: {train: rows.jsonl}\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "a.yaml").write_text(RECIPE)
    (tmp_path / "b.yaml").write_text(RECIPE + "optimizer: {lr: 3e-4}\ntrain: {duration: 2 epochs}\n")
    return tmp_path


def test_two_recipes_differ_in_these_keys(place: Path) -> None:
    done = tuner("config", "diff", "a.yaml", "b.yaml", cwd=place)
    assert done.returncode == 0 and done.stderr == ""
    assert 'train.duration  "1 epoch" -> "2 epochs"' in done.stdout.splitlines()
    assert 'optimizer.lr  "auto" -> 0.0003' in done.stdout.splitlines()
    assert all(
        line.split()[0] in {"name", "output_dir", "train.duration", "optimizer.lr"} for line in done.stdout.splitlines()
    )
    found = json.loads(tuner("config", "diff", "a.yaml", "b.yaml", "--json", cwd=place).stdout)
    assert found["artifacts"]["differences"]["optimizer.lr"][1] == 0.0003
    assert tuner("config", "diff", "a.yaml", "a.yaml", cwd=place).stdout == "no key differs\n"
    assert tuner("config", "diff", "a.yaml", "c.yaml", cwd=place).returncode == 2


def test_variables_change_a_recipe_and_flags_win(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_OPTIMIZER__LR", "1e-3")
    monkeypatch.setenv("TUNER_TRAIN__GLOBAL_BATCH_SIZE", "8")
    monkeypatch.setenv("TUNER_CACHE", str(place / "cache"))
    shown = tuner("config", "show", "b.yaml", "--origin", "--train.global-batch-size", "4", cwd=place).stdout
    lines = {line.split(":")[0].strip(): line for line in shown.splitlines()}
    assert "0.001" in lines["lr"] and "variable TUNER_OPTIMIZER__LR=1e-3" in lines["lr"]
    assert "4" in lines["global_batch_size"] and "flag --train.global-batch-size 4" in lines["global_batch_size"]


@pytest.mark.parametrize(("name", "text", "said"), cases(__file__, "a_variable_that_is_wrong_is_named"))
def test_a_variable_that_is_wrong_is_named(
    name: str, text: str, said: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    done = tuner("config", "check", "a.yaml", cwd=place)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
