"""What a run directory writes down about its launches."""

import json
from pathlib import Path

import pytest

from tests.fixtures.repositories import git
from tuner.run.changes import changes
from tuner.rundir.directory import RunDir
from tuner.rundir.record import read_run


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
