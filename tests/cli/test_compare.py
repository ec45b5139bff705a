"""`tuner eval --tasks` and `tuner compare`: the scores of two models, and whether they differ."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures import forked, quiz, trainings
from tests.fixtures.commands import document, tuner
from tests.fixtures.tables import cases
from tests.fixtures.trainings import launch
from tuner.api.exports import export_hf
from tuner.api.scores import score_tasks


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with tasks."""
    directory = tmp_path_factory.mktemp("compared")
    trainings.prepare(directory, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNER_CACHE", str(directory / "cache"))
        patch.chdir(directory)
        launch(directory, train__duration="2 steps", eval__tasks=quiz.flag(directory / "tasks"), eval__every="1 step")
    return directory


@pytest.fixture(scope="module")
def export(place: Path) -> Path:
    return export_hf(place / "runs" / "r", output=place / "export", dtype="fp32").path


@pytest.mark.slow
def test_a_run_gives_the_scores_of_its_last_evaluation(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_CACHE", str(place / "cache"))
    done = tuner("eval", "runs/r", "--tasks", "recipe", "--output", "own", "--json", cwd=place)
    metrics = document(done)["metrics"]
    line = [json.loads(one) for one in (place / "runs" / "r" / "metrics.jsonl").read_text().splitlines()][-1]
    assert line["kind"] == "eval" and line["step"] == metrics["step"] == 2
    for name in ("choice/acc", "text/perplexity", "question/exact_match"):
        assert metrics[name] == line[name]
    for name in quiz.TASKS:
        kept = place / "runs" / "r" / "evaluations" / "step-2" / f"{name}.jsonl"
        assert kept.read_bytes() == (place / "own" / f"{name}.jsonl").read_bytes()


@pytest.mark.slow
def test_a_hugging_face_directory_needs_no_recipe(place: Path, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_CACHE", str(place / "cache"))
    found = score_tasks(
        export, quiz.write(place / "tasks")[:2], output=place / "exported",
        overrides={"train.precision": "fp32", "data.max_length": "64"}, quiet=True,
    )  # fmt: skip
    assert found.step is None
    own = (place / "runs" / "r" / "evaluations" / "step-2" / "choice.jsonl").read_text().splitlines()
    again = (place / "exported" / "choice.jsonl").read_text().splitlines()
    for one, two in zip(map(json.loads, own), map(json.loads, again), strict=True):
        assert two["log_likelihoods"] == pytest.approx(one["log_likelihoods"], abs=1e-4)


@pytest.mark.slow
def test_a_model_of_the_hub_is_scored_by_its_name(place: Path, export: Path, tmp_path: Path) -> None:
    cached, commit = tmp_path / "hub" / "models--owner--model", "0" * 40
    shutil.copytree(export, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    own = {"PYTHONPATH": str(forked.ROOT), "HF_HUB_CACHE": str(tmp_path / "hub"), "TUNER_CACHE": str(place / "cache")}
    found = []
    for name in ("export", "owner/model"):
        words = [sys.executable, "-m", "tuner", "eval", name, "--tasks", quiz.write(place / "tasks")[0], "--json"]
        done = subprocess.run(words, cwd=place, env=os.environ | own, capture_output=True, text=True, check=False)
        scored = document(done)
        assert scored["artifacts"]["path"] == (str(place / name) if name == "export" else name)
        found.append(scored["metrics"] | {"seconds": 0})
    assert found[0] == found[1] and "choice/acc" in found[0]
    absent = tuner("eval", "owner/other", "--tasks", "recipe", cwd=place, code=2)
    assert "owner/other: no such directory, and no run of that name in ./runs, no model in the hub's" in absent.stderr


def test_two_steps_are_compared(place: Path) -> None:
    done = tuner("compare", "runs/r/evaluations/step-0", "runs/r", "--json", cwd=place)
    compared = document(done)
    assert compared["artifacts"]["second"] == str(place / "runs" / "r" / "evaluations" / "step-2")
    found = compared["metrics"]["text/bits_per_byte"]
    assert found["low"] <= found["difference"] <= found["high"] and found["items"] == 5
    shown = tuner("compare", "runs/r", "runs/r", cwd=place)
    assert "no difference shown" in shown.stdout and "95% interval" in shown.stdout


@pytest.mark.parametrize(("words", "code", "said"), cases(__file__, "what_cannot_be_done_is_said"))
def test_what_cannot_be_done_is_said(place: Path, words: list[str], code: int, said: str) -> None:
    assert said in tuner(*words, cwd=place, code=code).stderr
