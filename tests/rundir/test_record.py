"""Run directories as they are read, found, compared and removed."""

import json
import os
from pathlib import Path

import pytest

from tests.rundir import made
from tuner.errors import DataError, MachineError, RecipeError
from tuner.rundir.record import differing, find_runs, read_run, read_runs, remove_runs, source_losses, summary
from tuner.rundir.run_json import hold


def test_the_summary_of_a_run(tmp_path: Path) -> None:
    lines = [
        made.eval_line(0, 3.0),
        made.step_line(1),
        made.eval_line(1, 0.5, a=0.4, b=0.6),
        made.eval_line(2, 0.9, a=1),
    ]
    launches = [
        made.launch("10:00:00", "10:01:30", 0, 1, total_steps=9),
        made.launch("11:00:00", "11:00:10", 1, 1, total_steps=9),
    ]
    run = read_run(made.run(tmp_path / "r", lines, launches=launches, status="stopped"))
    assert summary(run) == {
        "name": "r", "path": str(tmp_path / "r"), "run_id": "r", "status": "stopped", "damage": None,
        "step": 1, "total_steps": 9, "tokens": 100, "loss": 2.0, "eval_loss": 0.9, "best_eval_loss": 0.5,
        "best_eval_step": 1, "eval_figures": {}, "task_figures": {}, "seconds": 100.0, "tok_per_s": 200.0,
        "started": "2026-01-02T10:00:00Z", "launches": 2,
    }  # fmt: skip
    assert source_losses(run) == {"a": 1}


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    path = made.run(tmp_path / "r")
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(made.step_line(5))[:-9])
    run = read_run(path)
    assert run.step == 4
    assert [line["step"] for line in run.lines()] == [0, 1, 2, 3, 4, 4]


def test_a_run_without_a_step_has_no_figures(tmp_path: Path) -> None:
    path = made.run(tmp_path / "r", [], launches=[made.launch("10:00:00", None, 0, 0)], status="running")
    (path / "metrics.jsonl").unlink()
    (path / "recipe.resolved.yaml").unlink()
    figures = summary(read_run(path))
    assert (figures["status"], figures["step"], figures["loss"], figures["eval_loss"]) == ("killed", 0, None, None)
    assert read_run(path).recipe == {}


def test_a_launch_that_was_killed_counts_to_its_last_line(tmp_path: Path) -> None:
    path = made.run(tmp_path / "r", launches=[made.launch("10:00:00", None, 0, 0)], status="running")
    os.utime(path / "metrics.jsonl", (0, 1767348000 + 42))  # 2026-01-02T10:00:42Z
    assert read_run(path).seconds == 42


def test_a_killed_launch_ends_before_the_next_one_starts(tmp_path: Path) -> None:
    launches = [
        made.launch("10:00:00", None, 0, 2),
        made.launch("10:10:00", None, 2, 4),
        made.launch("11:00:00", "11:00:20", 4, 6),
    ]
    path = made.run(tmp_path / "r", launches=launches, status="stopped")
    os.utime(path / "metrics.jsonl", (0, 1767351600 + 20))  # 2026-01-02T11:00:20Z
    assert read_run(path).seconds == 600 + 3000 + 20
    other = made.run(tmp_path / "other", launches=launches[:2], status="running")
    os.utime(other / "metrics.jsonl", (0, 1767348600 + 42))  # 2026-01-02T10:10:42Z
    assert read_run(other).seconds == 600 + 42
    with hold(other):
        assert read_run(other).seconds > 600 + 42
        (other / "metrics.jsonl").unlink()
        assert read_run(other)._launch_seconds(launches[0], launches[1]) == 0


def test_a_launch_that_never_started_is_left_out_of_several_runs(tmp_path: Path) -> None:
    run, crashed = made.run(tmp_path / "r"), tmp_path / "crashed"
    (crashed / "logs").mkdir(parents=True)
    (crashed / "checkpoints").mkdir()
    (crashed / "lock").touch()
    runs, left_out = read_runs([crashed, run])
    assert [found.path for found in runs] == [run]
    assert left_out == [f"{crashed} is left out: its launch never started"]
    with pytest.raises(RecipeError, match="crashed is not a run") as alone:
        read_runs([crashed])
    assert alone.value.hint == f"see which there are: tuner runs list {tmp_path}"
    with pytest.raises(RecipeError, match="is not a run") as above:
        read_runs([tmp_path])
    assert above.value.hint == f"see which there are: tuner runs list {tmp_path}"
    (crashed / "checkpoints" / "step-2").mkdir()
    with pytest.raises(RecipeError, match="crashed is not a run"):
        read_runs([crashed, run])


def test_a_run_in_use_is_running_and_is_not_removed(tmp_path: Path) -> None:
    path, other = made.run(tmp_path / "r", status="running"), made.run(tmp_path / "other")
    with hold(path):
        assert read_run(path).status == "running"
        with pytest.raises(MachineError, match=f"in use by process {os.getpid()}"):
            remove_runs([other, path])
    assert other.is_dir()
    assert read_run(path).status == "killed"
    remove_runs([other, path, other])
    assert os.listdir(tmp_path) == []


def test_what_is_no_run_is_not_removed(tmp_path: Path) -> None:
    run = made.run(tmp_path / "r")
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "mine").mkdir()
    damaged = made.run(tmp_path / "damaged")
    (damaged / "run.json").write_text("{}")
    for name, error in (("link", RecipeError), ("mine", RecipeError), ("none", RecipeError), ("damaged", DataError)):
        with pytest.raises(error):
            remove_runs([run, tmp_path / name])
    assert sorted(os.listdir(tmp_path)) == ["damaged", "link", "mine", "r"]
    assert (run / "metrics.jsonl").is_file()


def test_runs_are_found_below_a_directory_oldest_first(tmp_path: Path) -> None:
    later = made.run(tmp_path / "a", launches=[made.launch("12:00:00", "12:00:01", 0, 4)])
    first = made.run(tmp_path / "deep" / "er" / "b")
    made.run(later / "exports" / "inside-a-run")
    made.run(tmp_path / ".trash-c")
    (made.run(tmp_path / "broken") / "run.json").write_text("{")
    (tmp_path / "link").symlink_to(later)
    runs, damaged = find_runs(tmp_path)
    assert [run.path for run in runs] == [first, later]
    assert len(damaged) == 1
    assert "broken" in damaged[0]
    assert [run.path for run in find_runs(first)[0]] == [first]
    with pytest.raises(RecipeError, match="no such directory"):
        find_runs(tmp_path / "none")


def test_the_keys_in_which_recipes_differ() -> None:
    assert differing([{"name": "a", "seed": 1, "lr": 1}, {"name": "b", "seed": 1, "lr": 2, "new": None}]) == ["lr"]
    assert differing([{"lr": 1}]) == []
    assert differing([{"a": 1}, {"b": 2}]) == ["a", "b"]
