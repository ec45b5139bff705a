"""A step's line: what the recipe determines, and what the clock says; the line of it that a person sees, and how long a
run still takes. The times of steps are the device's, on one that runs behind its host: a stand-in with a virtual clock.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.queued_device import QueuedDevice
from tests.fixtures.trainings import launch, lines
from tuner.config.methods import DpoMethod, LoggedFigure
from tuner.config.numbers import Duration
from tuner.data.batches import Batch, StepBatches
from tuner.model.flops import Flops
from tuner.run.tasks import evaluate, log
from tuner.run.tasks.console import ConsoleTask, Due, TimeLeft, columns_of, due_steps
from tuner.run.tasks.log import Chinchilla, HaltedError, LogTask, SpikeScore, StepColumn
from tuner.run.tasks.save import Saver
from tuner.rundir.records import Records
from tuner.runtime import phase
from tuner.runtime.console import Console
from tuner.train import step
from tuner.train.plan import Cadence, Plan
from tuner.train.progress import CLOCKED, Best, MfuMeter, Progress
from tuner.train.step import StepScalars
from tuner.train.tasks import Event, Request, TakenStep

FLOPS = Flops(products=100.0, output=1000.0, attention={None: 1.0})


def batch(*lengths: int, trained: int) -> Batch:
    ids = np.zeros(sum(lengths), dtype=np.int64)
    return Batch(ids, ids, ids, lengths, np.arange(trained), np.arange(len(lengths)))


def taken(index: int, batches: StepBatches, values: Sequence[float] = (1.5, 0.5, 0, 0)) -> TakenStep:
    scalars = StepScalars(torch.tensor(values, dtype=torch.float64), [], torch.device("cpu"))
    return TakenStep(index, batches, 0.25, 9, 1e-3, 1.0, scalars)


def log_task(
    flops: Flops = FLOPS, step: int = 1, path: Path | None = None, columns: Sequence[StepColumn] = ()
) -> LogTask:
    progress = Progress(Plan(4, 4, 1, 5), step=step)
    return LogTask(progress, Records(path), MfuMeter(flops, peak=1e4), torch.device("cpu"), columns)


def console_task(
    figures: Mapping[str, LoggedFigure] | None = None, every: str = "1000 s", chosen: Sequence[str] = ()
) -> tuple[ConsoleTask, Progress, list[str]]:
    """A console task of five steps that evaluates after each second one, and the lines that it prints."""
    shown: list[str] = []
    console = Console(main=False)
    console.line = shown.append  # type: ignore[method-assign, assignment]
    console.say = lambda label, text, level="info": shown.append(f"{label} {text}")  # type: ignore[method-assign]
    progress = Progress(Plan(4, 4, 1, 5))
    due = Due(5, Cadence((2,)), False, False, Cadence(), frozenset(), False)
    columns = columns_of(figures or {}, chosen)
    task = ConsoleTask(console, Records(None), Duration.parse(every), progress, TimeLeft(due), columns=columns)
    return task, progress, shown


def test_figures_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = QueuedDevice({}, 0.0, is_asynchronous=False)
    for module in (step, log):
        monkeypatch.setattr(module, "timeline_of", lambda _: device)
    task = log_task()
    device.host = 10.0
    with task.around_step(1):
        device.host = 14.0
    batches = StepBatches(np.arange(4), 6, 40, [batch(3, 2, trained=2), batch(4, trained=1)])
    (event,) = task.step_taken(taken(0, batches))
    line = event.metrics
    assert (event.stage, event.step, event.tokens) == ("step", 1, 9)
    assert list(line) == ["kind", "step", "epoch", "tokens", "loss", "lr", "grad_norm", *CLOCKED]
    assert (line["step_s"], line["data_s"], line["data_wait"]) == (4.0, 1.0, 0.25)
    assert (line["tok_per_s"], line["trained_per_s"]) == (10.0, 1.5)
    operations = 100 * 9 + 1000 * 3 + (3**2 + 2**2 + 4**2)
    assert line["mfu"] == round(operations / 4 / 1e4, 4) == 0.0982


def test_the_share_counts_the_forwards_of_a_reference() -> None:
    batches = [batch(3, 2, trained=2), batch(4, trained=1)]
    flops = replace(FLOPS, forward_products=40.0, forward_output=400.0)
    plain, twice = (MfuMeter(flops, 1e4, forwards).operations(batches) for forwards in (0, 2))
    assert plain is not None and MfuMeter(flops, 1e4, 0, 4).operations(batches) == pytest.approx(plain / 4)
    assert twice == plain + 2 * (40 * 9 + 400 * 3 + (3**2 + 2**2 + 4**2) / 3)


def test_a_share_that_is_not_known_is_left_out() -> None:
    task = log_task(replace(FLOPS, complete=False))
    (event,) = task.step_taken(taken(0, StepBatches(np.arange(4), 6, 40, [batch(4, trained=1)])))
    assert "mfu" not in event.metrics
    view, _, shown = console_task()
    view.notify(event)
    view.finish(True)
    view.finish(True)
    header, values = (text.split() for text in shown)
    assert values[header.index("mfu") - 1] == "-"  # there is no evaluation in the line of a step


@pytest.mark.parametrize("stopped", [None, 3, 11])
def test_spikes_are_counted_over_launches(stopped: int | None, tmp_path: Path) -> None:
    losses = [2.0, 2.1, 1.9, 2.0, 9.0, 2.0, 2.1, 1.9, 2.0, 2.1, 2.0, 2.05, float("nan"), 2.0]
    norms = [0.5, 0.6, 0.5, 0.6, 0.5, 0.6, 0.5, 0.6, 0.5, 7.0, 0.5, 0.6, 0.50, 0.6]
    spikes = {4, 9, 12}  # a loss, a norm, and what is no number; the first four have no window before them
    found = []
    for steps in ([range(14)] if stopped is None else [range(stopped), range(stopped, 14)]):
        task = log_task(path=tmp_path / "metrics.jsonl", columns=(SpikeScore(3.0, 4, 5), Chinchilla(2)))
        task.start()
        for index in steps:
            values = (losses[index], norms[index], 0, 0)
            (event,) = task.step_taken(taken(index, StepBatches(np.arange(4), 6, 40, [batch(4, trained=1)]), values))
            found.append(event.metrics)
        task.metrics.flush()
    for index, line in enumerate(found):
        so_far, last = range(index + 1), range(max(0, index - 4), index + 1)
        assert line["spike_score"] == pytest.approx(len(spikes & set(so_far)) / len(so_far), abs=1e-6), index
        assert line["spike_score_last"] == pytest.approx(len(spikes & set(last)) / len(last), abs=1e-6), index
        assert line["chinchilla"] == 9 / 40


def test_an_evaluation_is_shown_with_its_sources() -> None:
    view, _, shown = console_task()
    line: dict[str, Any] = {"kind": "eval", "step": 3, "loss": 1.25, "loss/a": 1.0, "loss/b": None, "eval_s": 0.1}
    view.notify(Event("evaluation", 3, 9, line))
    assert [text.split() for text in shown[1:]] == [
        ["3", "-", "1.2500", *["-"] * 6], ["1.0000", "a"], ["none", "b"]
    ]  # fmt: skip


def test_what_follows_a_step_is_told_after_its_line() -> None:
    view, progress, shown = console_task()
    task = log_task()
    for index in range(3):
        (event,) = task.step_taken(taken(index, StepBatches(np.arange(4), 6, 40, [batch(4, trained=1)])))
        view.notify(event)
        assert view.between_steps(Request.NONE) is None
        if event.step == 2:
            view.notify(Event("evaluation", 2, 9, {"kind": "eval", "step": 2, "loss": 1.25, "eval_s": 60.0}))
            progress.best = Best("eval/loss", 2, 1.25)
            view.notify(Event("save", 2, 9, path=Path("step-2")))
    view.notify(Event("save", 3, 9, path=Path("step-3")))
    view.finish(True)
    assert [text.split()[:2] for text in shown[1:]] == [
        ["2", "1.5000"], ["2", "-"], ["saved", "step-2"], ["3", "1.5000"], ["saved", "step-3"],
    ]  # fmt: skip
    assert shown[3].endswith("(best so far)") and not shown[5].endswith("(best so far)")
    assert [text.split()[-1] for text in (shown[1], shown[2], shown[4])] == ["1:00", "1:00", "1:00"]  # one is left


def test_the_first_figures_of_a_method_have_columns_within_80() -> None:
    task, progress, shown = console_task(DpoMethod().figures)
    row = {"step": 1, "loss": 0.5, "grad_norm": 0.1, "lr": 1e-3, "tok_per_s": 9.0, "data_wait": 0.0, "step_s": 1.0}
    task.notify(Event("step", 1, 9, row | {"accuracy": 0.75, "margin": -123.456, "reward_chosen": 9.0}))
    measured = {"loss": 0.25, "accuracy": 0.875, "loss/chats": 0.5, "accuracy/chats": 1.0, "margin/chats": 12345.6}
    task.notify(Event("evaluation", 1, 9, {"kind": "eval", "step": 1, **measured, "eval_s": 2.0}))
    header, trained, evaluated, source = shown
    assert header.split() == ["step", "loss", "eval", "acc", "margin", "grad", "lr", "tok/s", "left"]
    assert trained.split()[:4] == ["1", "0.5000", "0.750", "-123.5"]
    assert evaluated.split()[:5] == ["1", "-", "0.2500", "0.875", "-"]
    assert source.split() == ["0.5000", "1.000", "12346", "chats"]
    assert {len(header), len(trained), len(evaluated)} == {79} and progress.step == 0
    assert [evaluated.index("0.875") + 5, source.index("1.000") + 5] == [header.index(" acc") + 4] * 2


def test_the_columns_may_be_chosen() -> None:
    task, _, shown = console_task(DpoMethod().figures, chosen=["mem_gib", "margin", "lr", "loss_scale"])
    row = {"step": 1, "loss": 0.5, "lr": 1e-3, "tok_per_s": 9.0, "step_s": 1.0, "mem_gib": 1.25, "margin": None}
    task.notify(Event("step", 1, 9, row))
    measured = {"loss": 0.25, "margin": 2.0, "loss/chats": 0.5, "margin/chats": 1.5}
    task.notify(Event("evaluation", 1, 9, {"kind": "eval", "step": 1, **measured, "eval_s": 2.0}))
    header, trained, evaluated, source = shown
    assert header.split() == ["step", "loss", "eval", "mem_gib", "margin", "lr", "loss_scale", "left"]
    assert trained.split()[:6] == ["1", "0.5000", "1.250", "none", "1.00e-03", "-"]
    assert evaluated.split()[:7] == ["1", "-", "0.2500", "-", "2.000", "-", "-"]
    assert source.split() == ["0.5000", "-", "1.500", "chats"]
    assert len({len(line) for line in (header, trained, evaluated)}) == 1


def test_a_step_after_which_the_run_must_end_is_not_counted(tmp_path: Path) -> None:
    task = log_task(step=2)
    batches = StepBatches(np.arange(4), 6, 40, [batch(4, trained=1)])
    with pytest.raises(HaltedError, match="step 2") as raised:
        list(task.step_taken(taken(1, batches, (float("nan"), 1.0, 1, 1))))
    assert raised.value.taken.index == 1 and raised.value.result.skipped
    assert task._progress.step == 1 and task._progress.loss is None
    assert list(task.finish(False)) == []


def test_the_console_may_go_by_steps() -> None:
    view, _, shown = console_task(every="2 steps")
    task = log_task()
    for index in range(5):
        (event,) = task.step_taken(taken(index, StepBatches(np.arange(4), 6, 40, [batch(4, trained=1)])))
        view.notify(event)
        view.between_steps(Request.NONE)
    assert [line.split()[0] for line in shown] == ["step", "2", "4"]
    view.finish(True)
    assert shown[-1].split()[0] == "5"


EVALUATION_S, SAVE_S = 7.0, 2.0
FIRST_S = 30.0
RUN = {
    "train__duration": "7 steps",
    "data__eval": "25%",
    "eval__every": "3 steps",
    "eval__samples": "0",
    "checkpoint__every": "2 steps",
}


def queued(patch: pytest.MonkeyPatch, reads: bool = False) -> QueuedDevice:
    """Have steps, evaluations and saves take their time on a stand-in."""
    device = QueuedDevice({"forward": 0.2, "backward": 0.3, "optimizer": 0.5}, FIRST_S, reads)
    for module in (step, log):
        patch.setattr(module, "timeline_of", lambda _: device)

    def taking(work: Callable[..., Any], on_device: float, on_host: float) -> Callable[..., Any]:
        def slowly(*arguments: Any) -> Any:
            device.queue(on_device)
            device.mark().wait()
            device.host += on_host
            return work(*arguments)

        return slowly

    patch.setattr(evaluate, "evaluate", taking(evaluate.evaluate, EVALUATION_S, 0.0))
    patch.setattr(Saver, "save", taking(Saver.save, 0.0, SAVE_S))
    return device


@pytest.mark.parametrize("reads", [False, True], ids=["far-ahead", "read-in-each-step"])
def test_each_step_has_its_time_and_they_add_up_to_the_run(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """Steps before and after evaluations and saves, and the last one; work that is none of theirs lies between them."""
    device, shown, asked = queued(monkeypatch, reads), list[float](), list[float]()
    monkeypatch.setattr(MfuMeter, "mfu", lambda self, batches, seconds: asked.append(seconds))
    monkeypatch.setattr(ConsoleTask, "_left", lambda self, step: shown.append(self._time_left.seconds(step)) or "")
    with phase.observed(device.part):
        found = lines(launch(workplace, checkpoint__async_save="false", **RUN).run_dir)
    trained = [line for line in found if line["kind"] == "train"]
    took = [line["step_s"] for line in trained]
    assert took == pytest.approx(device.worked, rel=0.02) and took[0] > FIRST_S > 10 * max(took[1:])
    assert [line["eval_s"] for line in found if line["kind"] == "eval"] == pytest.approx([EVALUATION_S] * 4, rel=0.02)
    saved = 3  # after steps 2, 4 and 6; the one at the end is after the last step
    between = device.ends[-1] - device.ends[0] - 2 * EVALUATION_S - saved * SAVE_S
    assert sum(took[1:]) == pytest.approx(between, rel=0.005)
    assert asked == pytest.approx(took, abs=1e-4)  # MFU is of the same seconds
    rates = [line["tok_per_s"] * line["step_s"] for line in trained]
    ends = [line["tokens"] for line in trained]
    assert rates == pytest.approx([now - before for before, now in zip([0, *ends], ends, strict=False)], rel=0.01)
    assert device.ahead > 0.5 and shown[-1] == 0.0


PERIODS = st.lists(st.integers(1, 12), max_size=3).map(tuple)


@given(periods=PERIODS, after=st.integers(0, 60), last=st.integers(0, 60))
def test_due_steps_are_those_of_the_cadence(periods: tuple[int, ...], after: int, last: int) -> None:
    cadence = Cadence(periods)
    assert due_steps(periods, after, last) == sum(cadence.due_at(step) for step in range(after + 1, last + 1))


@given(
    evaluation=PERIODS,
    points=st.frozensets(st.integers(1, 20), max_size=3),
    saving=PERIODS,
    at_end=st.booleans(),
    always=st.booleans(),
    step=st.integers(0, 20),
)
def test_what_is_due_is_what_the_tasks_do(
    evaluation: tuple[int, ...], points: frozenset[int], saving: tuple[int, ...], at_end: bool, always: bool, step: int
) -> None:
    last, marks = 20, frozenset({7, 20})
    due = Due(last, Cadence(evaluation, at_steps=points), at_end, always, Cadence(saving), marks, at_end)
    evaluated = [s for s in range(step + 1, last + 1) if due.evaluation.due_at(s) or (s == last and at_end)]
    sampled = evaluated if always else [s for s in evaluated if s == last]
    saved = [s for s in range(step + 1, last) if due.saving.due_at(s) or s in marks]
    found = due.after(step)
    assert (found["evaluation"], found["samples"]) == (len(evaluated), len(sampled))
    assert found["save"] == len(saved) + (step < last and at_end)


def test_seconds_are_those_of_steps_and_of_what_is_between_them() -> None:
    due = Due(10, Cadence((5,)), True, False, Cadence((5,), 100.0), frozenset(), True)
    left = TimeLeft(due)
    assert left.seconds(0) is None
    for seconds in (9.0, 2.0, 4.0):  # the first step of a launch warms up
        left.stepped(seconds)
    assert left.seconds(0) == 30.0
    left.took |= {"evaluation": 7.0, "samples": 11.0, "save": 13.0}
    # Two evaluations, one with samples, the saves of steps 5 and 10; the clock asks for none within 55 s.
    assert left.seconds(0) == 30 + 2 * 7 + 11 + 2 * 13
    assert left.seconds(10) == 0
    left.took["evaluation"] = 70.0
    assert left.seconds(0) == 30 + 2 * 70 + 11 + 3 * 13  # of 181 s one save is the clock's
