"""Hooks at every stage of a run, what they may ask for, and on which ranks they are called."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines
from tests.multi.launcher import start
from tuner.checkpoint.manifest import step_dirs
from tuner.errors import ExitCode, PluginError
from tuner.rundir.run_json import read_record

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


def told(place: Path, rank: int = 0) -> list[list[Any]]:
    return [json.loads(line) for line in (place / f"told-{rank}").read_text().splitlines()]


def test_every_stage_comes_in_its_order(workplace: Path) -> None:
    note = {"use": "note", "options": {"out": f"{workplace}/told"}}
    every = ["start", "batch", "step", "epoch", "evaluation", "save", "export", "end"]
    flags = {**SIX, "data__eval": "7 documents", "eval__every": "4 steps", "eval__at_start": "false"}
    run = launch(workplace, **flags, **hooks(workplace, {**note, "stages": every}), export__at_end="true")
    found = told(workplace)
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
    first, second = (told(tmp_path, rank) for rank in (0, 1))
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
