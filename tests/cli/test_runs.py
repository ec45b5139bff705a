"""`tuner runs` by its real command lines: what is printed, where, and with which code."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.fixtures import commands
from tests.fixtures.commands import document
from tests.fixtures.tables import cases
from tests.rundir import made
from tuner.checkpoint.save import CheckpointDir, save
from tuner.cli.output import between_words, columns, fitted
from tuner.cli.runs import _local
from tuner.rundir.run_json import hold

START = ("2026-01-02T10:00:00Z", "2026-01-02T11:00:00Z")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with two runs of different recipes under runs/."""
    made.run(tmp_path / "runs" / "slow")
    command = ["/lib/tuner/__main__.py", "train", "r.yaml", "--train.duration", "4 steps"]
    launches = [made.launch("11:00:00", "11:00:20", 0, 4, total_steps=4, command=command)]
    lines = [made.step_line(4, 0.25), made.eval_line(4, 0.125, orders=0.1, chat=0.2)]
    made.run(tmp_path / "runs" / "fast", lines, "seed: 1\noptimizer: {lr: 0.003}\n", launches)
    return tmp_path


def runs(place: Path, *words: str, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return commands.tuner("runs", *words, cwd=place, stdin=stdin, code=code, COLUMNS="120", NO_COLOR="1")


def test_list(place: Path) -> None:
    heading, slow, fast = runs(place, "list").stdout.splitlines()
    assert heading.split()[:5] == ["run", "status", "step", "loss", "eval"]
    first, second = (_local(text).split() for text in START)
    assert slow.split() == ["slow", "finished", "4", "0.5000", "0.7500", "0.7500", "at", "4", "400", "1:30", *first]
    assert fast.split() == ["fast", "finished", "4/4", "0.2500", "0.1250", "0.1250", "at", "4", "400", "0:20", *second]
    (place / "runs" / "broken").mkdir()
    (place / "runs" / "broken" / "run.json").write_text("{")
    listed = document(runs(place, "list", "runs", "--json"))
    started = {run["name"]: run["started"] for run in listed["artifacts"]["runs"]}
    assert list(started.items()) == [("slow", START[0]), ("fast", START[1])]
    assert "broken" in listed["warnings"][0]
    (place / "empty").mkdir()
    assert "no runs in" in runs(place, "list", "empty").stdout
    assert "no such directory" in runs(place, "list", "nowhere", code=2).stderr


def test_times_are_shown_in_the_local_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "XYZ-3")  # three hours east of Greenwich
        time.tzset()
        assert (_local(START[0]), _local(None)) == ("2026-01-02 13:00", "...")
    time.tzset()


def test_what_is_said_breaks_between_words() -> None:
    path = "/a/path/that/is/longer/than/the/terminal.yaml"
    text = f"error: {path}:1: no messages; the row has 'question'\n  hint: write {{a: b}}"
    assert between_words(text, 1 << 20, 2) == text
    lines = between_words(text, 24, 2).split("\n")
    assert lines == [
        "error:", f"  {path}:1:", "  no messages; the row", "  has 'question'", "  hint: write {a: b}"
    ]  # fmt: skip
    assert all(len(line) <= 24 or path in line for line in lines)


def test_tables_are_split_where_the_terminal_is_narrow() -> None:
    lines = [["run", "loss", "tokens", "time"], ["a", "0.5", "400", "1:30"], ["longer", "0.25", "1,400", "0:20"]]
    whole = columns(lines, right=(1, 2, 3))
    assert fitted(lines, 200, right=(1, 2, 3)) == whole
    assert fitted(lines, 22, right=(1, 2, 3)).split("\n") == cases(__file__, "two_tables")
    assert fitted(lines, 1).count("run") == 3  # no cell is broken


def test_show(place: Path) -> None:
    save(CheckpointDir(place / "runs" / "fast" / "checkpoints", "r"), 4, {"model/w": torch.zeros(8)}, {"step": 4}, {})
    shown = runs(place, "show", "-", stdin="runs/fast\n").stdout
    for part in ("status    finished", "eval      0.1000  orders", "launch 1", "saved     checkpoints/step-4"):
        assert part in shown
    assert "command   tuner train r.yaml --train.duration '4 steps'\n" in shown
    facts = document(runs(place, "show", "runs/fast", "--json"))["artifacts"]
    assert "text" not in {*facts, *document(runs(place, "list", "runs", "--json"))["artifacts"]}, "values alone"
    assert facts["eval_sources"] == {"orders": 0.1, "chat": 0.2}
    assert facts["recipe"]["optimizer.lr"] == 0.003
    assert "is not a run" in runs(place, "show", ".", code=2).stderr


def test_compare(place: Path) -> None:
    lines = [line.split() for line in runs(place, "compare", "runs/slow", "runs/fast").stdout.splitlines()]
    assert lines[:3] == [
        ["run", "slow", "fast"],
        ["optimizer.lr", "0.001", "0.003"],
        ["status", "finished", "finished"],
    ]
    assert ["eval", "0.7500", "0.1250"] in lines
    other = str(made.run(place / "runs" / "other", recipe="seed: 1\noptimizer: {lr: 0.001}\nschedule: {decay: 10%}\n"))
    across = [line.split() for line in runs(place, "compare", "runs/slow", other).stdout.splitlines()]
    assert across[1] == ["schedule.decay", "-", "10%"]
    many = [str(made.run(place / "runs" / f"r{i}", recipe=f"seed: {i}\n")) for i in range(10)]
    down = runs(place, "compare", *many).stdout.splitlines()
    assert len(down) == 11
    assert [line.split()[:2] for line in down[:2]] == [["run", "seed"], ["r0", "0"]]
    compared = document(runs(place, "compare", "runs/slow", "runs/fast", "--json"))["artifacts"]
    assert compared["differing"] == ["optimizer.lr"]
    assert [run["recipe"] for run in compared["runs"]] == [{"optimizer.lr": 0.001}, {"optimizer.lr": 0.003}]


def test_a_crashed_start_among_the_runs_is_left_out(place: Path) -> None:
    (place / "runs" / "crashed" / "logs").mkdir(parents=True)
    compared = document(runs(place, "compare", "runs/crashed", "runs/fast", "runs/slow", "--json"))
    assert [run["name"] for run in compared["artifacts"]["runs"]] == ["fast", "slow"]
    assert compared["warnings"] == [f"{place / 'runs' / 'crashed'} is left out: its launch never started"]


def test_plot(place: Path) -> None:
    one = runs(place, "plot", "runs/slow")
    assert one.stdout == f"{place / 'runs' / 'slow' / 'curves.html'}\n"
    assert "training loss" in one.stderr
    assert "⠁" <= max(one.stderr) <= "⣿"
    both = document(runs(place, "plot", "runs/slow", "runs/fast", "--smoothing", "0.3", "--json"))
    assert both["artifacts"]["path"] == str(place / "curves.html")
    assert '"smoothing":0.3' in (place / "curves.html").read_text()
    runs(place, "plot", "runs/slow", "--output", "runs/slow/run.json", code=2)
    empty = made.run(place / "runs" / "empty", [])
    assert "nothing to draw" in runs(place, "plot", str(empty), code=3).stderr


def test_verify(place: Path) -> None:
    checkpoints = CheckpointDir(place / "runs" / "fast" / "checkpoints", "r")
    for step in (2, 4):
        save(checkpoints, step, {"model/w": torch.zeros(8)}, {"step": step}, {})
    whole = document(runs(place, "verify", "runs/slow", "runs/fast", "--json"))
    assert [Path(path).name for path in whole["artifacts"]["verified"]] == ["step-2", "step-4"]
    shard = next((checkpoints.path / "step-2").glob("rank-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    found = runs(place, "verify", "runs/fast", code=6)
    assert "1 of 2 checkpoints are damaged" in found.stderr
    assert "step-2/rank-0000-of-0001.safetensors" in found.stderr
    assert "step-4" not in found.stderr


def test_rm(place: Path) -> None:
    with hold(place / "runs" / "slow"):
        assert f"process {os.getpid()}" in runs(place, "rm", "runs/fast", "runs/slow", code=4).stderr
    assert "is not a run" in runs(place, "rm", "runs", code=2).stderr
    assert sorted(os.listdir(place / "runs")) == ["fast", "slow"]
    assert runs(place, "rm", "runs/fast").stdout == f"{place / 'runs' / 'fast'}\n"
    assert document(runs(place, "rm", "runs/slow", "--json"))["artifacts"]["removed"] == [str(place / "runs" / "slow")]
    assert os.listdir(place / "runs") == []
