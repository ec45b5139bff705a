"""The ladder that is killed and continued: its parts; test_ladder_commands.py shows that it ends well."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.ladder.made import ladder_tree, write_ladder_files
from tools import ladder_campaign
from tools.ladder_campaign import documents_of, fell_with_size, kill_points, misjudged, missing
from tuner.ladder.record import LadderRecord, Mark, RungRecord
from tuner.ladder.rules import PlannedMark


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
