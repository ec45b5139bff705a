"""When hooks are told, what they are told, and what becomes of one that fails."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tables import cases
from tuner.config.numbers import Duration
from tuner.config.recipe import HookSection
from tuner.errors import ExitCode, MachineError, PluginError
from tuner.run.tasks.hooks import Hooks, Registration, Report, RunFacts, check_hooks, user_hook
from tuner.train.plan import Cadence, Plan
from tuner.train.progress import Progress
from tuner.train.tasks import Event

PROGRESS = Progress(Plan(20, 1, 20, 20))
EVERY_STEP = Cadence((1,))
ALL = ("start", "step", "evaluation", "save", "end")
CODE = """\
import json

class Notify:
    def __init__(self, out, limit=None):
        self.out, self.limit = out, limit

    def __call__(self, report):
        with open(self.out, "a") as file:
            file.write(json.dumps([report.stage, report.step, report.metrics]) + "\\n")
        if self.limit is not None and report.step >= self.limit:
            raise ValueError("too far")

def plain(report, out):
    with open(out, "a") as file:
        file.write(f"plain {report.stage} {report.step}\\n")

class NoCall:
    pass

class TwoArguments:
    def __call__(self, report, trainer): ...

class Broken:
    def __init__(self):
        raise OSError("no socket")

    def __call__(self, report): ...

def leaves(report):
    raise SystemExit(0)

def reads_everything(report):
    report.metrics["loss"] = "mine"
    report.recipe["name"] = "mine"
"""


class Told:
    def __init__(self) -> None:
        self.reports: list[Report] = []

    def __call__(self, report: Report) -> None:
        self.reports.append(report)


def facts(tmp_path: Path) -> RunFacts:
    return RunFacts(tmp_path / "run", "abc", 20, {"name": "r"}, 0)


def section(tmp_path: Path, name: str, **more: Any) -> HookSection:
    (tmp_path / "my_hooks.py").write_text(CODE)
    return HookSection.model_validate({"use": f"{tmp_path}/my_hooks.py:{name}", **more})


def step(hooks: Hooks, number: int) -> None:
    hooks.notify(Event("step", number, number * 10, {"kind": "train", "step": number, "loss": 1.0}))


def test_stages_and_steps_are_chosen_by_the_registration(tmp_path: Path) -> None:
    every, third, ends = Told(), Told(), Told()
    hooks = Hooks(
        [
            Registration(every, frozenset(ALL), EVERY_STEP), Registration(third, frozenset(ALL), Cadence((3,))),
            Registration(ends, frozenset(("end",)), EVERY_STEP),
        ],
        facts(tmp_path),
        PROGRESS,
    )
    hooks.notify(Event("start", 0, 0))
    for number in range(1, 8):
        step(hooks, number)
    hooks.notify(Event("evaluation", 7, 70, metrics={"kind": "eval", "step": 7, "loss": 2.0}))
    hooks.notify(Event("save", 7, 70, path=tmp_path / "step-7"))
    hooks.notify(Event("end", 7, 70, status="stopped"))
    assert [(r.stage, r.step) for r in third.reports] == [
        ("start", 0), ("step", 3), ("step", 6), ("evaluation", 7), ("save", 7), ("end", 7)
    ]  # fmt: skip
    assert [r.step for r in every.reports if r.stage == "step"] == list(range(1, 8))
    (end,) = ends.reports
    assert (end.status, end.tokens, end.total_steps, end.run_id, end.from_step) == ("stopped", 70, 20, "abc", 0)
    saved = next(r for r in every.reports if r.stage == "save")
    assert (saved.path, saved.status, saved.metrics) == (tmp_path / "step-7", "running", {})


@pytest.mark.parametrize(("cadence_s", "step_s", "first", "last"), [(10, 4, 3, 27), (600, 60, 10, 30)])
def test_a_cadence_of_time_counts_from_the_last_report_of_a_step(
    cadence_s: float, step_s: float, first: int, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other stages do not put it off."""
    now, told = [100.0], Told()
    registration = Registration(told, frozenset(ALL), Cadence((), cadence_s), called_at=100.0)
    monkeypatch.setattr("tuner.run.tasks.hooks.time.monotonic", lambda: now[0])
    hooks = Hooks([registration], facts(tmp_path), PROGRESS)
    for number in range(1, last + 1):
        now[0] += step_s
        step(hooks, number)
        if number % 5 == 0:
            hooks.notify(Event("evaluation", number, number))
    assert [r.step for r in told.reports if r.stage == "step"] == list(range(first, last + 1, first))


def test_a_report_is_frozen_and_its_mappings_are_the_hooks_own(tmp_path: Path) -> None:
    told = Told()
    rude = user_hook(section(tmp_path, "reads_everything"), EVERY_STEP)
    hooks = Hooks([rude, Registration(told, frozenset(ALL), EVERY_STEP)], facts(tmp_path), PROGRESS)
    line = {"kind": "train", "step": 1, "loss": 1.0}
    hooks.notify(Event("step", 1, 10, metrics=line))
    assert hooks.error is None
    assert line["loss"] == 1.0
    (report,) = told.reports
    assert (report.metrics["loss"], report.recipe["name"]) == (1.0, "r")
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.step = 5  # type: ignore[misc]


def test_classes_are_built_once_and_functions_called_with_their_options(tmp_path: Path) -> None:
    out = tmp_path / "out"
    sections = [
        section(tmp_path, "Notify", options={"out": str(out)}),
        section(tmp_path, "plain", options={"out": str(out)}, stages=["start"]),
    ]
    check_hooks(sections)
    hooks = Hooks([user_hook(item, EVERY_STEP) for item in sections], facts(tmp_path), PROGRESS)
    hooks.notify(Event("start", 0, 0))
    step(hooks, 1)
    lines = out.read_text().splitlines()
    assert json.loads(lines[0]) == ["start", 0, {}]
    assert lines[1] == "plain start 0"
    assert json.loads(lines[2]) == ["step", 1, {"kind": "train", "step": 1, "loss": 1.0}]


def test_a_hook_that_fails_is_named_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    out, told = tmp_path / "out", Told()
    failing = user_hook(section(tmp_path, "Notify", options={"out": str(out), "limit": 2}), EVERY_STEP)
    hooks = Hooks([failing, Registration(told, frozenset(ALL), EVERY_STEP)], facts(tmp_path), PROGRESS)
    for number in (1, 2, 3):
        step(hooks, number)
    assert len(out.read_text().splitlines()) == 2
    assert [r.step for r in told.reports] == [1, 2, 3]
    with pytest.raises(PluginError) as caught:
        hooks.raise_error()
    assert caught.value.message == (
        f"hook my_hooks.py:Notify failed at step, step 2: ValueError: too far ({tmp_path}/my_hooks.py:11)"
    )
    assert caught.value.hint == f"fix it, then resume with: tuner resume {tmp_path}/run"
    assert caught.value.exit_code == ExitCode.USAGE


def test_leaving_the_process_is_a_failure_too(tmp_path: Path) -> None:
    hooks = Hooks([user_hook(section(tmp_path, "leaves"), EVERY_STEP)], facts(tmp_path), PROGRESS)
    hooks.notify(Event("start", 0, 0))
    assert hooks.error is not None
    assert "SystemExit: 0" in hooks.error.message


def test_an_error_of_our_own_keeps_its_kind(tmp_path: Path) -> None:
    def full(report: Report) -> None:
        raise MachineError("the disk is full")

    hooks = Hooks([Registration(full, frozenset(ALL), EVERY_STEP)], facts(tmp_path), PROGRESS)
    hooks.notify(Event("start", 0, 0))
    with pytest.raises(MachineError, match="disk is full"):
        hooks.raise_error()


@pytest.mark.parametrize(("name", "options", "says"), cases(__file__, "what_does_not_fit_is_refused_before_training"))
def test_what_does_not_fit_is_refused_before_training(
    name: str, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(PluginError, match=says):
        check_hooks([section(tmp_path, name, options=options)])


def test_a_class_that_cannot_be_built_is_named_with_its_line(tmp_path: Path) -> None:
    broken = section(tmp_path, "Broken")
    check_hooks([broken])
    with pytest.raises(PluginError, match=r"my_hooks.py:Broken could not be built: OSError: no socket .*hooks.py:25"):
        user_hook(broken, EVERY_STEP)


def test_a_cadence_of_a_hook_is_read_as_others_are(tmp_path: Path) -> None:
    read = section(tmp_path, "plain", every=["10 steps", "5 min"], options={"out": "x"})
    assert read.every == (Duration.parse("10 steps"), Duration.parse("5 min"))
    assert section(tmp_path, "plain", every="never").every is None
