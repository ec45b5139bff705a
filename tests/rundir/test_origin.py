"""A recipe file that changed after its run was started is noticed, and a comment in it is not."""

from pathlib import Path

import pytest

from tests.rundir import made
from tuner.config.load import load_recipe
from tuner.rundir.directory import another, changed_keys, noted, origin, warn_of_changed_file
from tuner.rundir.layout import RECIPE
from tuner.rundir.run_json import read_record

TEXT = "model: {name_or_path: a/b}\ndata: {train: x.jsonl}\noptimizer:\n  lr: 1e-4\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of recipe.yaml, which lies beside it."""
    (tmp_path / "recipe.yaml").write_text(TEXT)
    facts = noted(load_recipe(tmp_path / "recipe.yaml"), tmp_path / "run")
    path = made.run(tmp_path / "run", launches=[made.launch("11:00:00", "11:00:20", 0, 4, **facts)])
    (path / RECIPE).write_text(TEXT)
    return path


def warnings(run: Path) -> list[str]:
    found: list[str] = []
    warn_of_changed_file(run, found.append)
    return found


def test_the_file_is_noted_and_the_runs_own_copy_is_not(run: Path) -> None:
    assert origin(read_record(run)) == run.parent / "recipe.yaml"
    assert noted(load_recipe(run / RECIPE), run) == {}
    assert noted(load_recipe({"model": {"name_or_path": "a/b"}, "data": {"train": "x"}}), run) == {}


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (TEXT, None),
        (TEXT + "# a comment\n", None),
        (TEXT.replace("1e-4", "2e-4"), ("optimizer.lr",)),
        (TEXT.replace("1e-4", "2e-4") + "seed: 7\n", ("optimizer.lr", "seed")),
        ("model: [\n", ()),
    ],
)
def test_changes_are_named_by_key(run: Path, text: str, keys: tuple[str, ...] | None) -> None:
    (run.parent / "recipe.yaml").write_text(text)
    assert changed_keys(run, read_record(run)) == keys
    assert len(warnings(run)) == (keys is not None)
    if keys:
        assert f"changed since the run was started ({', '.join(keys)})" in warnings(run)[0]


@pytest.mark.parametrize(
    ("more", "flag"), [("", "--name NEW-NAME"), ("output_dir: runs/mine\n", "--output_dir NEW-DIRECTORY")]
)
def test_another_run_has_another_name_or_directory(run: Path, more: str, flag: str) -> None:
    (run.parent / "recipe.yaml").write_text(more + TEXT)
    assert another(run.parent / "recipe.yaml") == flag


def test_a_file_that_is_gone_is_no_news(run: Path) -> None:
    (run.parent / "recipe.yaml").unlink()
    assert warnings(run) == []
    assert warnings(run.parent / "nothing") == []
