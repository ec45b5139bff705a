"""What a run directory writes down about its launches, and whether the recipe file that it came from has changed."""

import json
from pathlib import Path

import pytest

from tests.fixtures.commands import git
from tests.rundir import made
from tuner.config.load import load_recipe
from tuner.run.changes import changes
from tuner.rundir.directory import RunDir, another, changed_keys, noted, origin, warn_of_changed_file
from tuner.rundir.layout import RECIPE
from tuner.rundir.record import read_run
from tuner.rundir.run_json import read_record


def test_each_launch_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    git(work, "init")
    (work / "mine.py").write_text("one\n")
    git(work, "add", "mine.py")
    git(work, "commit", "-m", "one")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-1")
    monkeypatch.setattr("sys.argv", ["tuner", "train", "r.yaml", "--hooks.0.options.token", "very-secret-2"])
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    record = run.begin(None, {"from_step": 0}, [tmp_path, work])
    run.end(record, "stopped", 5, 5, "SIGTERM")
    (work / "mine.py").write_text("two\n")
    (work / "new.py").write_text("three\n")
    record = run.begin(run.read_record(), {"from_step": 5}, [work])
    run.end(record, "failed", 7, 5, "DivergedError: step 8")
    first, second = read_run(run.path).launches
    assert (first["status"], first["from_step"], first["step"], first["why"]) == ("stopped", 0, 5, "SIGTERM")
    assert (second["status"], second["from_step"], second["why"]) == ("failed", 5, "DivergedError: step 8")
    assert (first["git"]["dirty"], first["git"]["diff"]) == (False, None)
    assert (second["git"]["dirty"], second["git"]["untracked"]) == (True, ["new.py"])
    assert second["git"]["commit"] == first["git"]["commit"]
    assert b"-one\n+two\n" in (run.path / second["git"]["diff"]).read_bytes()
    assert second["git"]["diff"] == "launches/2/git.diff"
    assert (run.path / second["git"]["diff"]).stat().st_mode & 0o777 == 0o600
    assert first["environment"]["variables"]["NCCL_DEBUG"] == "WARN"
    assert first["command"][-1] == "***"
    assert {"torch", "transformers"} <= set(first["versions"])
    assert "very-secret" not in run.record.read_text()


def test_how_and_where_data_is_prepared_may_change() -> None:
    before = {"data": {"workers": 1, "cache_dir": None, "max_length": 64}}
    after = {"data": {"workers": "auto", "cache_dir": "/elsewhere", "max_length": 64}}
    assert changes(before, after).refuse == ()
    longer = changes(before, {"data": {**after["data"], "max_length": 32}})
    assert [line.split()[0] for line in longer.refuse] == ["data.max_length"]


def test_a_launch_outside_of_any_repository(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    record = run.begin(None, {}, [tmp_path])
    assert record["launches"][0]["git"] is None
    assert json.loads(run.record.read_text()) == record
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json"]


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
