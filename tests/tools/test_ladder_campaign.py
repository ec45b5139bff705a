"""`tuner ladder`: planned, trained, killed and continued, looked at and measured, by the real commands; and what the
campaign that kills and continues it is made of.
"""

import csv
import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import commands, forked, trainings
from tests.ladder.made import ladder_tree, write_ladder_files
from tools import ladder_campaign
from tools.ladder_campaign import campaign, documents_of, fell_with_size, kill_points, misjudged, missing
from tools.tables import beside
from tuner.checkpoint.load import content_sha256
from tuner.checkpoint.open import newest
from tuner.ladder.points import points_of
from tuner.ladder.record import LADDER, LadderRecord, Mark, RungRecord, read_ladder, read_marks
from tuner.ladder.rules import PlannedMark

MARKS = [(1.0, "pre-decay", 4), (1.0, "post-decay", 6), (2.0, "pre-decay", 10), (2.0, "post-decay", 12)]


def ladder(directory: Path, *words: str, code: int = 0) -> Any:
    """The document of one `tuner ladder` command."""
    return commands.document(commands.tuner("ladder", *words, "--json", cwd=directory, OMP_NUM_THREADS="1"), code)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a ladder that was killed with SIGKILL once, continued, and run once more when it was done."""
    directory = tmp_path_factory.mktemp("ladder")
    write_ladder_files(directory)
    assert campaign(directory, kills=1, seed=3, start=forked.Popen) == []
    return directory


def test_the_initial_mark_is_listed_and_is_no_point_of_a_law(tmp_path: Path) -> None:
    write_ladder_files(tmp_path)
    words = ("ladder.yaml", "--ladder.initial", "true", "--eval.at_start", "true", "--eval.every", "never")
    ladder(tmp_path, "run", *words, "--rung", "small")
    marks = ladder(tmp_path, "status", *words)["artifacts"]["marks"]
    small = tmp_path / "runs" / "ladder" / "small"
    listed = [(one["name"], one["step"], one["exists"]) for one in marks]
    assert listed[:2] == [("initial", 0, True), ("1 pre-decay", 4, True)]
    assert [one["exists"] for one in marks[5:]] == [False] * 5, "the other rung was not started"
    assert marks[0]["path"] == str(small / "checkpoints" / "step-0")
    done = commands.tuner("ladder", "status", "runs/ladder", "--marks", cwd=tmp_path)
    listed = [line.split()[-2:] for line in done.stdout.splitlines()[1:]]
    assert listed == [[one["path"], one["metrics_path"] or "-"] for one in marks]
    assert json.loads(Path(marks[0]["metrics_path"]).read_text())["eval/loss"] > 0
    first, *others = ladder(tmp_path, "metrics", "runs/ladder")["artifacts"]["marks"]
    assert (first["phase"], first["tokens"], first["step"]) == ("initial", 0, 0) and first["loss"] > others[-1]["loss"]
    points = [point.tokens for point in points_of(read_marks(read_ladder(small.parent)))]
    assert points == [one["tokens"] for one in others]


@pytest.mark.slow
def test_a_rung_that_is_stopped_stops_the_ladder(tmp_path: Path) -> None:
    write_ladder_files(tmp_path)
    stopped = ladder(tmp_path, "run", "ladder.yaml", "--train.stop_after", "5 steps", code=75)
    assert stopped["status"] == "stopped" and list(stopped["artifacts"]["rungs"]) == ["small"]
    assert stopped["next"] == "tuner ladder run ladder.yaml"
    rungs = ladder(tmp_path, "status", "ladder.yaml")["artifacts"]["rungs"]
    assert [(rung["status"], rung["step"], rung["marks_reached"]) for rung in rungs] == [
        ("stopped", 5, 1), ("not started", 0, 0),
    ]  # fmt: skip
    document = ladder(tmp_path, "run", "ladder.yaml")
    assert document["status"] == "ok" and document["artifacts"]["path"] == str(tmp_path / "runs" / "ladder")


def test_a_plan_says_what_each_rung_takes(trained: Path) -> None:
    document = ladder(trained, "plan", "ladder.yaml")
    small, large = document["artifacts"]["rungs"]
    assert (small["name"], small["total_steps"], small["batch_tokens"], small["tokens"]) == ("small", 12, 256, 3072)
    assert [(mark["multiple"], mark["phase"], mark["step"]) for mark in large["marks"]] == MARKS
    assert large["flops"] > small["flops"] > 0 and large["memory_bytes"] > 0 and large["seconds"] > 0
    lines = document["artifacts"]["text"].splitlines()
    assert lines[0].split()[:3] == ["rung", "N", "all"] and lines[1].startswith("small")
    assert any("fall begins" in line and line.split()[0] == "10" for line in lines), "the rate is drawn with its turns"
    alone = ladder(trained, "plan", "ladder.yaml", "--rung", "2", "--quick")
    assert [rung["name"] for rung in alone["artifacts"]["rungs"]] == ["large"]
    assert alone["artifacts"]["rungs"][0]["memory_bytes"] is None


def test_each_rung_is_saved_and_evaluated_at_its_marks(trained: Path) -> None:
    for name in ("small", "large"):
        run = trained / "runs" / "ladder" / name
        lines = trainings.lines(run)
        assert [line["step"] for line in lines if line["kind"] == "eval"] == [4, 6, 10, 12]
        assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 13))
        assert {4, 6, 10, 12} <= {int(path.name.split("-")[1]) for path in (run / "checkpoints").glob("step-*")}
        rates = {line["step"]: line["lr"] for line in lines if line["kind"] == "train"}
        assert rates[4] == max(rates.values()) and rates[6] == rates[12] == 0


def test_metrics_are_csv_and_json(trained: Path) -> None:
    done = commands.tuner("ladder", "metrics", "runs/ladder", cwd=trained, code=0)
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [(row["rung"], float(row["multiple"]), row["phase"], int(row["step"])) for row in rows] == [
        (name, *mark) for name in ("small", "large") for mark in MARKS
    ]
    document = ladder(trained, "metrics", "ladder.yaml")
    assert document["metrics"] == {"marks": 8}
    for row, mark in zip(rows, document["artifacts"]["marks"], strict=True):
        assert float(row["loss"]) == mark["loss"] and int(row["parameters"]) == mark["parameters"]
        assert 0 < mark["tokens"] <= mark["step"] * 256
    assert float(rows[-1]["loss"]) == trainings.lines(trained / "runs" / "ladder" / "large")[-1]["loss"]


def test_runs_in_several_directories_are_one_ladder(trained: Path, tmp_path: Path) -> None:
    place, other = tmp_path / "place", tmp_path / "other"
    for copy in (place, other):
        shutil.copytree(trained / "runs" / "ladder", copy)
    here, there = (copy / "small" / "checkpoints" for copy in (place, other))
    marks = {f"step-{step}" for _, _, step in MARKS}
    resumed_from = [path for each in (here, there) for path in each.glob("step-*") if path.name not in marks]
    for gone in (place / "large", here / "step-6", there / "step-4", *resumed_from):
        shutil.rmtree(gone)
    (there / "step-12").rename(there / "step-11")
    words = (str(place), "--also", str(other))
    document = ladder(tmp_path, "status", *words)["artifacts"]
    assert [rung["status"] for rung in document["rungs"]] == ["finished", "finished"]
    assert [(Path(one["path"]).relative_to(tmp_path).parts[0], one["exists"]) for one in document["marks"]] == [
        (name, True) for name in ("place", "other", "place", "place", *["other"] * 4)
    ]
    assert document["marks"][3]["metrics_path"] == str(place / "small" / "marks" / "metrics_step12.json")
    everything = ladder(tmp_path, "status", *words, "--all")["artifacts"]["marks"]
    assert [one["step"] for one in everything if one["name"].startswith("step-")] == [11]
    found, own = ladder(tmp_path, "metrics", *words), ladder(trained, "metrics", "runs/ladder")
    assert found["artifacts"] == own["artifacts"]
    shutil.rmtree(place)
    assert len(ladder(tmp_path, "metrics", str(tmp_path), "--also", str(other))["artifacts"]["marks"]) == 8
    text = (other / LADDER).read_text().replace('"total_steps": 12', '"total_steps": 13')
    (other / LADDER).write_text(text)
    done = commands.tuner("ladder", "status", "runs/ladder", "--also", str(other), cwd=trained)
    assert done.returncode == 2 and "its small has another plan (total_steps 12 -> 13)" in done.stderr


def test_what_is_done_is_skipped_and_the_plan_is_held(trained: Path) -> None:
    run = trained / "runs" / "ladder" / "large"
    before = (run / "run.json").read_bytes()
    done = commands.tuner("ladder", "run", "ladder.yaml", "--logging.level", "info", cwd=trained, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "small: done, 12 steps" in done.stderr and "large: done" in done.stderr
    assert (run / "run.json").read_bytes() == before
    other = commands.tuner("ladder", "run", "ladder.yaml", "--ladder.multiples", "[1, 3]", cwd=trained)
    assert other.returncode == 2 and "was started with another plan (total_steps 12 -> 18)" in other.stderr
    assert "--name NEW-NAME" in other.stderr
    held = json.loads((trained / "runs" / "ladder" / LADDER).read_text())
    assert [rung["total_steps"] for rung in held["rungs"]] == [12, 12]


def test_a_rung_is_what_its_own_recipe_trains(trained: Path, tmp_path: Path) -> None:
    """`tuner train` with the recipe that the run directory keeps: the same tensors, also where the rung was killed."""
    kept = trained / "runs" / "ladder" / "small" / "recipe.yaml"
    shutil.copy(kept, tmp_path / "alone.yaml")
    commands.tuner("train", "alone.yaml", "--output_dir", str(tmp_path / "alone"), cwd=tmp_path, code=0)
    of_ladder, alone = (newest(run / "checkpoints") for run in (kept.parent, tmp_path / "alone"))
    assert of_ladder is not None and alone is not None
    assert content_sha256(of_ladder) == content_sha256(alone)


def test_status_shows_marks_and_losses(trained: Path) -> None:
    done = commands.tuner("ladder", "status", "ladder.yaml", cwd=trained, code=0)
    head, small, large = done.stdout.splitlines()
    assert head.split()[:3] == ["rung", "status", "step"]
    assert "12/12" in small and "4/4" in small and "2 post-decay" in large


def test_a_rung_is_benchmarked_and_nothing_stays_of_it(trained: Path) -> None:
    place = trained / "runs" / "ladder"
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    document = ladder(trained, "benchmark", "large", "ladder.yaml", "--steps", "3")
    written = json.loads((place / "benchmark-large.json").read_text())
    assert document["artifacts"] == {"path": str(place / "benchmark-large.json"), "rung": "large"}
    assert written == {"schema": "tuner.ladder-benchmark/1", **document["metrics"]}
    assert (written["steps"], written["total_steps"], written["batch_tokens"]) == (3, 12, 256)
    assert written["tok_per_s"] == pytest.approx(written["tokens_per_step"] / written["step_s"])
    assert written["mfu"] == pytest.approx(written["flops"] / written["step_s"] / written["peak_flops"])
    assert written["memory"]["peak_bytes"] > 3 * 4 * written["parameters"], "weights and AdamW's states at least"
    (place / "benchmark-large.json").unlink()
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("line", "said"), beside(__file__))
def test_what_cannot_be_is_said(line: str, said: str, trained: Path) -> None:
    done = commands.tuner(*line.split(), cwd=trained)
    assert done.returncode == 2 and said in done.stderr


@pytest.mark.slow
def test_a_launcher_starts_one_rung(trained: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = commands.tuner("ladder", "run", "ladder.yaml", cwd=trained, **env)
    assert done.returncode == 2 and "start the processes of one rung" in done.stderr


def test_kills_are_spread_over_all_rungs(tmp_path: Path) -> None:
    write_ladder_files(tmp_path)
    points = kill_points(tmp_path, 5, seed=0)
    assert points == sorted(set(points)) and len(points) == 5 and points[0] > 0 and points[-1] < 24


def test_what_a_rung_lacks_is_found(tmp_path: Path) -> None:
    marks = (PlannedMark(1.0, "pre-decay", 2, 512), PlannedMark(1.0, "post-decay", 3, 768))
    rungs = tuple(RungRecord(name, 100, 120, 256, 1e-3, 3, marks) for name in ("small", "large"))
    ladder, run = LadderRecord(tmp_path, "ladder", rungs), tmp_path / "small"
    (run / "checkpoints" / "step-3").mkdir(parents=True)
    (run / "run.json").write_text('{"schema": "tuner.run/1", "launches": []}')
    trained = [{"kind": "train", "step": step, "tokens": 256 * step} for step in (1, 2, 2, 3)]
    lines = [*trained, {"kind": "eval", "step": 3, "loss": 2.5, "eval_s": 0.1, "arithmetic/acc": 0.5}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert missing(ladder, "small") == [
        "small: steps are not 1 to 3", "small: no evaluation at step 2", "small: no checkpoint of step 2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "is_covered", "problems"),
    [
        (-0.019, True, []),
        (0.021, True, ["3M: predicted +2.10% off"]),
        (0.001, False, ["3M: the interval does not cover what was measured"]),
    ],
)
def test_a_prediction_is_near_and_its_interval_covers(
    error: float, is_covered: bool, problems: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"artifacts": {"fit": {"target": {"checked": {"error": error, "is_covered": is_covered}}}}}
    done = subprocess.CompletedProcess([], 0, json.dumps(said), "")
    monkeypatch.setattr(ladder_campaign.subprocess, "run", lambda *given, **named: done)
    assert misjudged(tmp_path, "3M") == problems


def test_losses_are_to_fall_with_size(tmp_path: Path) -> None:
    rungs = tuple(RungRecord(name, 1, 1, 1, None, 1, ()) for name in ("small", "large"))
    marks = [Mark(name, 1, 1, 1.0, "post-decay", 1, 1, loss) for name, loss in (("small", 2.0), ("large", 2.0))]
    assert fell_with_size(LadderRecord(tmp_path, "ladder", rungs), marks) == ["large is no better than small"]


def test_docstrings_become_documents(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    told = ("Decode documents. " * 8).strip()
    (tmp_path / "json" / "decoder.py").write_text(f"class A:\n    def b(self):\n        '{told}'\n")
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "case.py").write_text(f"'{told}'\n")
    assert list(documents_of(tmp_path)) == [f"json.decoder.A.b\n{told}"]
    assert ladder_tree()["ladder"].keys() <= ladder_campaign.RECIPE["ladder"].keys()
