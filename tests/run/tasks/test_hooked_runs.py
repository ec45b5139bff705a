"""Hooks and trackers in whole runs of the real command: what they are told, and what becomes of the run."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tuner.checkpoint.open import newest
from tuner.config.load import load_recipe
from tuner.errors import MachineError, PluginError, RecipeError
from tuner.run.main import train
from tuner.run.options import LaunchOptions, Resume, RunResult
from tuner.run.status import resume_source
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo

TOTAL = 6
HOOK = """\
import json
from pathlib import Path

class Notify:
    def __init__(self, out, fail_at=None, fail_stage="step"):
        self.out, self.fail_at, self.fail_stage = Path(out), fail_at, fail_stage

    def __call__(self, report):
        line = {
            "stage": report.stage, "step": report.step, "tokens": report.tokens, "total": report.total_steps,
            "loss": report.metrics.get("loss"), "path": report.path and report.path.name, "run_id": report.run_id,
            "from_step": report.from_step, "status": report.status, "lr": report.recipe["optimizer"]["lr"],
        }
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\\n")
        if report.stage == self.fail_stage and report.step == self.fail_at:
            raise ConnectionError("nobody listens")
"""


@pytest.fixture
def workplace(workplace: Path) -> Path:
    (workplace / "my_hooks.py").write_text(HOOK)
    return trainings.edit(workplace, ("3 epochs", f"{TOTAL} steps"))


def launch(directory: Path, hooks: str, resume: Resume = "never", **flags: str) -> RunResult:
    loaded = trainings.loaded(directory, hooks=hooks, **flags)
    return train(loaded, LaunchOptions(resume), RankInfo(), Console(main=False))


def told(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "out").read_text().splitlines()]


def hook(directory: Path, **options: Any) -> str:
    return json.dumps({"use": "my_hooks.py:Notify", "options": {"out": str(directory / "out"), **options}})


def test_a_hook_is_told_of_everything_in_order(workplace: Path) -> None:
    flags = {"data__eval": "9 documents", "eval__every": "4 steps", "eval__samples": "0"}
    flags |= {"checkpoint__every": "3 steps", "train__duration": "5 steps"}
    result = launch(workplace, f"[{hook(workplace)}]", **flags)
    reports = told(workplace)
    assert [(r["stage"], r["step"]) for r in reports] == [
        ("start", 0), ("evaluation", 0), ("step", 1), ("step", 2), ("step", 3), ("save", 3), ("step", 4),
        ("evaluation", 4), ("step", 5), ("epoch", 5), ("evaluation", 5), ("save", 5), ("end", 5),
    ]  # fmt: skip
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [r["loss"] for r in reports if r["loss"] is not None] == [line["loss"] for line in lines]
    tokens = [line["tokens"] for line in lines if line["kind"] == "train"]
    assert [r["tokens"] for r in reports if r["stage"] == "step"] == tokens
    assert [r["path"] for r in reports if r["path"]] == ["step-3", "step-5"]
    assert {r["run_id"] for r in reports} == {trainings.record(result.run_dir)["run_id"]}
    assert (reports[-1]["status"], {r["status"] for r in reports[:-1]}) == ("finished", {"running"})
    assert {(r["total"], r["lr"], r["from_step"]) for r in reports} == {(5, 0.001, 0)}


def test_a_resumed_launch_says_where_it_began_and_keeps_the_cadence(workplace: Path) -> None:
    spec = json.loads(hook(workplace)) | {"every": "3 steps", "stages": ["start", "step", "end"]}
    launch(workplace, json.dumps([spec]), train__stop_after="3 steps")
    again = json.dumps([spec | {"every": "2 steps"}])
    launch(workplace, again, "auto")
    reports = told(workplace)
    assert [(r["stage"], r["step"], r["from_step"], r["status"]) for r in reports] == [
        ("start", 0, 0, "running"), ("step", 3, 0, "running"), ("end", 3, 0, "stopped"),
        ("start", 3, 3, "running"), ("step", 4, 3, "running"), ("step", 6, 3, "running"), ("end", 6, 3, "finished"),
    ]  # fmt: skip
    assert len({r["run_id"] for r in reports}) == 1


def test_a_hook_that_fails_stops_the_run_with_its_state_saved(workplace: Path) -> None:
    other = {"use": "my_hooks.py:Notify", "options": {"out": str(workplace / "other")}, "stages": ["end"]}
    hooks = f"[{hook(workplace, fail_at=3)}, {json.dumps(other)}]"
    short = {"train__duration": "4 steps"}
    with pytest.raises(PluginError) as caught:
        launch(workplace, hooks, checkpoint__every="never", **short)
    place = f"{workplace}/my_hooks.py:17"
    assert caught.value.message == (
        f"hook my_hooks.py:Notify failed at step, step 3: ConnectionError: nobody listens ({place})"
    )
    run = workplace / "runs" / "r"
    assert trainings.saved(run).step == 3
    record = trainings.record(run)
    assert (record["status"], record["launches"][0]["why"]) == ("failed", f"PluginError: {caught.value.message}")
    (end,) = [json.loads(line) for line in (workplace / "other").read_text().splitlines()]
    assert (end["stage"], end["step"], end["status"]) == ("end", 3, "failed")
    (workplace / "my_hooks.py").write_text(HOOK.replace("raise ", "pass; "))
    whole = launch(workplace, "null", name="whole", **short)
    resumed = launch(workplace, "null", "auto", **short)
    assert trainings.outcome(resumed.run_dir) == trainings.outcome(whole.run_dir)


@pytest.mark.parametrize(("stage", "step"), [("start", 0), ("save", 4), ("end", TOTAL)])
def test_a_failure_at_another_stage(stage: str, step: int, workplace: Path) -> None:
    with pytest.raises(PluginError, match=f"failed at {stage}, step {step}: ConnectionError"):
        launch(workplace, f"[{hook(workplace, fail_at=step, fail_stage=stage)}]")
    run = workplace / "runs" / "r"
    found = newest(run / "checkpoints")
    assert (found.step if found else 0) == {"start": 0, "save": 5, "end": TOTAL}[stage]
    status = trainings.record(run)["status"]
    assert status == ("finished" if stage == "end" else "failed")


def test_a_failed_run_is_told_to_hooks(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.data.batches import GlobalBatches

    def failing(self: GlobalBatches, i: int) -> Any:
        raise OSError("the disk is gone")

    monkeypatch.setattr(GlobalBatches, "step", failing)
    with pytest.raises(OSError, match="disk is gone"):
        launch(workplace, f"[{hook(workplace)}]")
    assert [(r["stage"], r["status"]) for r in told(workplace)] == [("start", "running"), ("end", "failed")]


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        ("[my_hook.py:Notify]", "there is no file"),
        ("[my_hooks.py:Notify]", "missing a required argument: 'out'"),
        ("[nobody]", "no entry point of that name"),
    ],
)
def test_a_hook_that_does_not_fit_is_refused_before_anything_is_done(hooks: str, says: str, workplace: Path) -> None:
    with pytest.raises(PluginError, match=says):
        launch(workplace, hooks)
    assert not (workplace / "runs").exists()


def test_a_tracker_without_its_library_is_refused_before_anything_is_done(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.run.tasks.trackers import choose

    monkeypatch.setitem(choose.TRACKERS, "mlflow", replace(choose.TRACKERS["mlflow"], modules=("no_such_library",)))
    with pytest.raises(MachineError, match="mlflow needs the library no_such_library") as caught:
        launch(workplace, "null", logging__trackers="[mlflow]")
    assert caught.value.hint == "install it: pip install mlflow-skinny sqlalchemy alembic"
    assert not (workplace / "runs").exists()


def test_a_tracker_that_cannot_be_opened_stops_the_run_before_its_first_step(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.run.tasks.trackers import choose

    def unreachable(*arguments: Any) -> Any:
        raise ConnectionError("no route\nto the host")

    monkeypatch.setitem(choose.TRACKERS, "mlflow", choose.Known(unreachable))
    with pytest.raises(MachineError, match="tracker mlflow cannot be opened: ConnectionError: no route$"):
        launch(workplace, f"[{hook(workplace)}]", logging__trackers="[mlflow]")
    assert [(r["stage"], r["status"]) for r in told(workplace)] == [("start", "running"), ("end", "failed")]
    assert newest(workplace / "runs" / "r" / "checkpoints") is None


def test_the_documented_hook_runs_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[3] / "docs" / "hooks.md").read_text()
    found = re.findall(r"^```(python|yaml)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    blocks = dict(reversed(found))  # the first of each
    trainings.prepare(tmp_path, 1, layers=1)  # not where a file of that name was loaded before
    recipe = (tmp_path / "r.yaml").read_text().replace("3 epochs", "10 steps")
    recipe += blocks["yaml"].replace("below: 2.5", "below: 9")
    (tmp_path / "my_hooks.py").write_text(blocks["python"])
    (tmp_path / "r.yaml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    train(load_recipe(tmp_path / "r.yaml"), LaunchOptions(), RankInfo(), Console(main=False))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["step"]) for line in lines] == [
        ("save", 4), ("save", 8), ("step", 10), ("save", 10), ("end", 10)
    ]  # fmt: skip
    assert (lines[-1]["run"], lines[-1]["status"]) == ("r", "finished")


def test_hooks_may_change_when_a_run_goes_on(workplace: Path) -> None:
    stopped = launch(workplace, "null", train__stop_after="2 steps")
    launch(workplace, f"[{hook(workplace)}]", "auto")
    assert told(workplace)[0]["from_step"] == 2
    with pytest.raises(RecipeError, match="optimizer.lr"):
        launch(workplace, "null", optimizer__lr="2e-3")
    assert train(resume_source(stopped.run_dir), LaunchOptions(), RankInfo(), Console(main=False)).status == "finished"
