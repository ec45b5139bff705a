"""Hooks and trackers in whole runs of the real command: what they are told at every stage, what they may ask for, on
which ranks they are called, and what becomes of the run.
"""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines
from tests.multi.launcher import start
from tuner.checkpoint.manifest import step_dirs
from tuner.checkpoint.open import newest
from tuner.config.load import load_recipe
from tuner.errors import ExitCode, MachineError, PluginError, RecipeError
from tuner.run.options import Resume, RunResult
from tuner.run.status import resume_source
from tuner.rundir.run_json import read_record

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


def hooked(directory: Path, hooks: str, resume: Resume = "never", **flags: str) -> RunResult:
    loaded = trainings.loaded(directory, hooks=hooks, **flags)
    return trainings.trained(loaded, resume)


def told(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "out").read_text().splitlines()]


def hook(directory: Path, **options: Any) -> str:
    return json.dumps({"use": "my_hooks.py:Notify", "options": {"out": str(directory / "out"), **options}})


def test_a_hook_is_told_of_everything_in_order(workplace: Path) -> None:
    flags = {"data__eval": "9 documents", "eval__every": "4 steps", "eval__samples": "0"}
    flags |= {"checkpoint__every": "3 steps", "train__duration": "5 steps"}
    result = hooked(workplace, f"[{hook(workplace)}]", **flags)
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
    hooked(workplace, json.dumps([spec]), train__stop_after="3 steps")
    again = json.dumps([spec | {"every": "2 steps"}])
    hooked(workplace, again, "auto")
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
        hooked(workplace, hooks, checkpoint__every="never", **short)
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
    whole = hooked(workplace, "null", name="whole", **short)
    resumed = hooked(workplace, "null", "auto", **short)
    assert trainings.outcome(resumed.run_dir) == trainings.outcome(whole.run_dir)


@pytest.mark.parametrize(("stage", "step"), [("start", 0), ("save", 4), ("end", TOTAL)])
def test_a_failure_at_another_stage(stage: str, step: int, workplace: Path) -> None:
    with pytest.raises(PluginError, match=f"failed at {stage}, step {step}: ConnectionError"):
        hooked(workplace, f"[{hook(workplace, fail_at=step, fail_stage=stage)}]")
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
        hooked(workplace, f"[{hook(workplace)}]")
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
        hooked(workplace, hooks)
    assert not (workplace / "runs").exists()


def test_a_tracker_without_its_library_is_refused_before_anything_is_done(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.run.tasks.trackers import choose

    monkeypatch.setitem(choose.TRACKERS, "mlflow", replace(choose.TRACKERS["mlflow"], modules=("no_such_library",)))
    with pytest.raises(MachineError, match="mlflow needs the library no_such_library") as caught:
        hooked(workplace, "null", logging__trackers="[mlflow]")
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
        hooked(workplace, f"[{hook(workplace)}]", logging__trackers="[mlflow]")
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
    trainings.trained(load_recipe(tmp_path / "r.yaml"))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["step"]) for line in lines] == [
        ("save", 4), ("save", 8), ("step", 10), ("save", 10), ("end", 10)
    ]  # fmt: skip
    assert (lines[-1]["run"], lines[-1]["status"]) == ("r", "finished")


def test_hooks_may_change_when_a_run_goes_on(workplace: Path) -> None:
    stopped = hooked(workplace, "null", train__stop_after="2 steps")
    hooked(workplace, f"[{hook(workplace)}]", "auto")
    assert told(workplace)[0]["from_step"] == 2
    with pytest.raises(RecipeError, match="optimizer.lr"):
        hooked(workplace, "null", optimizer__lr="2e-3")
    assert trainings.trained(resume_source(stopped.run_dir)).status == "finished"


CODE = """\
import json

def note(report, out):
    batch = [
        [int((one.targets != -100).sum()), list(one.lengths), one.documents.tolist()] for one in report.batch
    ]
    for one in report.batch:
        assert not one.input_ids.flags.writeable and len(one.targets) == len(one.input_ids) == sum(one.lengths)
    line = [report.stage, report.step, report.rank, report.metrics, str(report.path), batch]
    with open(f"{out}-{report.rank}", "a") as file:
        file.write(json.dumps(line) + "\\n")

def ask(report, at, what):
    if report.stage == "step" and report.step == at:
        return what

def of_rank_1(report):
    if report.rank == 1 and report.stage == "step" and report.step == 4:
        return "stop"

def writes(report):
    report.batch[0].input_ids[0] = 1
"""
SIX = {"train__duration": "6 steps", "eval__samples": "0", "checkpoint__every": "never"}


def hooks(place: Path, *more: dict[str, Any]) -> dict[str, str]:
    """Flags of a run with these hooks of the file."""
    (place / "told.py").write_text(CODE)
    return {"hooks": json.dumps([{**one, "use": f"{place}/told.py:{one['use']}"} for one in more])}


def heard(place: Path, rank: int = 0) -> list[list[Any]]:
    return [json.loads(line) for line in (place / f"told-{rank}").read_text().splitlines()]


def test_every_stage_comes_in_its_order(workplace: Path) -> None:
    note = {"use": "note", "options": {"out": f"{workplace}/told"}}
    every = ["start", "batch", "step", "epoch", "evaluation", "save", "export", "end"]
    flags = {**SIX, "data__eval": "7 documents", "eval__every": "4 steps", "eval__at_start": "false"}
    run = launch(workplace, **flags, **hooks(workplace, {**note, "stages": every}), export__at_end="true")
    found = heard(workplace)
    stages = [(stage, step) for stage, step, *_ in found]
    steps = [line for line in lines(run.run_dir) if line["kind"] == "train"]
    assert stages[0] == ("start", 0) and stages[-1] == ("end", 6)
    for step in range(1, 7):
        assert stages.index(("batch", step)) < stages.index(("step", step))
    counts = Counter(stage for stage, _ in stages)
    assert counts["batch"] == counts["step"] == 6 and counts["evaluation"] == 2 and counts["save"] == 1
    epochs = [metrics["epoch"] for stage, _, _, metrics, *_ in found if stage == "epoch"]
    assert epochs == list(range(1, int(steps[-1]["epoch"]) + 1))
    tokens = [sum(sum(lengths) for _, lengths, _ in batch) for stage, *_, batch in found if stage == "batch"]
    assert sum(tokens) == steps[-1]["tokens"] and all(not batch for stage, *_, batch in found if stage != "batch")


@pytest.mark.slow("evaluate")
@pytest.mark.parametrize("what", ["save", "evaluate", "stop", ["save", "evaluate"], [], None])
def test_what_a_hook_asks_for_is_done_after_the_step(what: Any, workplace: Path) -> None:
    ask = {"use": "ask", "options": {"at": 3, "what": what}}
    held = {"data__eval": "7 documents", "eval__every": "never", "eval__at_start": "false", "eval__at_end": "false"}
    flags = {**SIX, **held} if what and "evaluate" in what else SIX
    found = launch(workplace, **flags, **hooks(workplace, ask))
    saved = sorted(step for step, _ in step_dirs(found.run_dir / "checkpoints"))
    evaluated = [line["step"] for line in lines(found.run_dir) if line["kind"] == "eval"]
    wanted = what or []
    assert evaluated == ([3] if "evaluate" in wanted else [])
    assert saved == ([3] if "stop" in wanted else [3, 6] if "save" in wanted else [6])
    assert found.status == ("stopped" if "stop" in wanted else "finished")
    why = "asked by a hook, a tracker or another process" if "stop" in wanted else None
    assert read_record(found.run_dir)["launches"][-1]["why"] == why
    if found.status == "finished" and flags is SIX:
        plain = launch(workplace, name="plain", **SIX)
        assert trainings.outcome(found.run_dir)["sha256"] == trainings.outcome(plain.run_dir)["sha256"]


def test_what_nobody_can_ask_for_stops_the_run_in_order(workplace: Path) -> None:
    cases = {"halt": "it returned 'halt'", "export": "it asked for an export, and the recipe has none"}
    for what, words in cases.items():
        ask = {"use": "ask", "options": {"at": 2, "what": what}}
        with pytest.raises(PluginError, match=words):
            launch(workplace, name=what, **SIX, **hooks(workplace, ask))
        assert [step for step, _ in step_dirs(workplace / "runs" / what / "checkpoints")] == [2]


def test_a_batch_cannot_be_written_to(workplace: Path) -> None:
    with pytest.raises(PluginError, match="read-only"):
        launch(workplace, **SIX, **hooks(workplace, {"use": "writes", "stages": ["batch"]}))


@pytest.mark.multi
def test_each_process_may_call_it_and_ask(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, world_size=2)
    note = {"use": "note", "options": {"out": f"{tmp_path}/told"}, "stages": ["batch", "step"], "ranks": "all"}
    main = {"use": "note", "options": {"out": f"{tmp_path}/main"}, "stages": ["step"]}
    only = {"use": "of_rank_1", "ranks": "all"}
    flags = {**SIX, **hooks(tmp_path, note, main, only), "logging__metrics_of": "all"}
    words = [word for key, value in flags.items() for word in (f"--{key.replace('__', '.')}", value)]
    processes = start(["-m", "tuner", "train", "r.yaml", *words], 2, cwd=tmp_path)
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [ExitCode.STOPPED] * 2, said  # what rank 1 alone asked for
    logs = [(tmp_path / "runs" / "r" / name).read_text() for name in ("metrics.jsonl", "logs/rank1.metrics.jsonl")]
    steps = [[line for line in map(json.loads, log.splitlines()) if line["kind"] == "train"] for log in logs]
    assert [line["step"] for line in steps[1]] == [1, 2, 3, 4]
    first, second = (heard(tmp_path, rank) for rank in (0, 1))
    batches = [[batch for stage, *_, batch in own if stage == "batch"] for own in (first, second)]
    for line, other, *forwards in zip(*steps, *batches, strict=True):
        assert line["loss"] == other["loss"] and line["local_loss"] != other["local_loss"]
        counts = [sum(trained for trained, *_ in each) for each in forwards]
        mean = np.average([line["local_loss"], other["local_loss"]], weights=counts)
        assert mean == pytest.approx(line["loss"], rel=1e-6)
    assert [line[:3] for line in second] == [[stage, step, 1] for stage, step, *_ in first]
    assert first[-1][:2] == ["step", 4]
    documents = [
        {number for *_, batch in found for _, _, numbers in batch for number in numbers} for found in (first, second)
    ]
    assert documents[0] and documents[1] and not documents[0] & documents[1]
    assert not (tmp_path / "main-1").exists() and len((tmp_path / "main-0").read_text().splitlines()) == 4
