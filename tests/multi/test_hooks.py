"""Hooks on two processes: told on rank 0 alone, and one that fails stops both in order."""

import json
from pathlib import Path

import pytest

from tests.fixtures import trainings
from tests.multi.launcher import start
from tuner.checkpoint.open import newest

CODE = """\
def count(report, out, fail_at):
    with open(out, "a") as file:
        file.write(f"{report.stage} {report.step}\\n")
    if report.stage == "step" and report.step == fail_at:
        raise ValueError("too far")
"""


@pytest.mark.multi
def test_a_hook_that_fails_on_rank_0_stops_every_rank_with_the_state_saved(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 2)
    (tmp_path / "my_hooks.py").write_text(CODE)
    out = tmp_path / "out"
    hooks = json.dumps([{"use": "my_hooks.py:count", "options": {"out": str(out), "fail_at": 5}}])
    words = ["-m", "tuner", "train", "r.yaml", "--hooks", hooks, "--checkpoint.every", "never"]
    ranks = start(words, 2, cwd=tmp_path)
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], errors
    assert all("hook my_hooks.py:count failed at step, step 5: ValueError: too far" in error for error in errors)
    assert out.read_text().splitlines() == ["start 0", *(f"step {n}" for n in range(1, 6))]
    found = newest(tmp_path / "runs" / "r" / "checkpoints")
    assert found is not None
    assert found.step == 5
