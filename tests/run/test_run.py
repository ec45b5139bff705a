"""Whole launches in this process: the schedule, stopping, resuming, pruning and the records they leave."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures import trainings
from tests.fixtures.tables import cases
from tests.fixtures.trainings import launch, lines
from tuner.checkpoint.manifest import step_dirs
from tuner.cli.work.train import _evaluated, launch_training
from tuner.data.batches import GlobalBatches
from tuner.errors import DataError, DivergedError, MachineError, MemoryLimitError, RecipeError
from tuner.run import preflight
from tuner.run.options import LaunchOptions, RunResult
from tuner.run.status import resume_source
from tuner.run.tasks import evaluate as evaluate_task
from tuner.run.tasks.save import SaveTask
from tuner.setup import mock
from tuner.setup import resolve as resolve_module
from tuner.train import evaluate, loop


def test_each_step_has_its_learning_rate(workplace: Path) -> None:
    flags = {"schedule__kind": "linear", "schedule__warmup": "4 steps", "schedule__min_lr_ratio": "0.1"}
    result = launch(workplace, **flags, train__duration="8 steps")
    rates = [line["lr"] for line in lines(result.run_dir)]
    assert rates[:5] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3 * (1 - 0.9 / 4)])
    assert rates[-1] == pytest.approx(1e-4)


def test_stopped_and_resumed_is_the_unbroken_run(workplace: Path) -> None:
    """Stopped in the second epoch."""
    flags = {"train__duration": "9 steps"}
    whole = launch(workplace, name="whole", **flags)
    assert (whole.status, whole.step, whole.total_steps) == ("finished", 9, 9)
    stopped = launch(workplace, train__stop_after="7 steps", **flags)
    assert (stopped.status, stopped.step) == ("stopped", 7)
    again = trainings.trained(resume_source(stopped.run_dir), "must")
    assert (again.status, again.step) == ("finished", 9)
    assert trainings.outcome(again.run_dir) == trainings.outcome(whole.run_dir)
    record = trainings.record(again.run_dir)
    assert [(entry["from_step"], entry["status"]) for entry in record["launches"]] == [(0, "stopped"), (7, "finished")]


@pytest.mark.parametrize("at_end", ["true", "false"])
def test_a_finished_run_says_the_same_again(workplace: Path, at_end: str) -> None:
    flags = {"data__eval": "7 documents", "eval__samples": "0", "train__duration": "3 steps"}
    flags |= {"checkpoint__every": "2 steps", "checkpoint__at_end": at_end}
    first = launch(workplace, **flags)
    assert launch(workplace, **flags) == first
    assert (first.step, first.metrics["first_eval_step"], first.metrics["eval_step"]) == (3, 0, 3)
    assert set(first.metrics) == {
        "step", "tokens", "trained_tokens", "loss", "eval_loss", "eval_step", "first_eval_loss", "first_eval_step",
        "best",
    }  # fmt: skip
    record = first.run_dir / "run.json"
    facts = json.loads(record.read_text())
    if at_end == "true":  # killed before it could write down that it is finished
        del facts["metrics"], facts["launches"][-1]["step"]
        record.write_text(json.dumps(facts | {"status": "running"}))
        assert launch(workplace, "auto", **flags) == first


@pytest.mark.parametrize(("metrics", "said"), cases(__file__, "the_first_loss_is_shown_where_it_was_an_earlier_one"))
def test_the_first_loss_is_shown_where_it_was_an_earlier_one(metrics: dict[str, Any], said: str) -> None:
    assert _evaluated(metrics) == said


def test_a_base_model_that_changed_is_refused(workplace: Path) -> None:
    launch(workplace, train__stop_after="1 step")
    file = workplace / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(DataError, match="the base model changed since this checkpoint was saved"):
        launch(workplace, "auto")


def test_checkpoints_are_pruned_but_not_the_one_resumed_from(workplace: Path) -> None:
    flags = {"train__duration": "5 steps", "checkpoint__keep": "1"}
    stopped = launch(workplace, train__stop_after="3 steps", **flags)
    assert [step for step, _ in step_dirs(stopped.run_dir / "checkpoints")] == [3]
    done = launch(workplace, "auto", **flags)
    assert [step for step, _ in step_dirs(done.run_dir / "checkpoints")] == [5, 3]


def test_evaluation_is_weighted_by_tokens_and_its_rows_are_bounded(workplace: Path) -> None:
    found = []
    for micro in ("1", "2"):
        flags = {"data__eval": "9 documents", "eval__max_rows": "5", "eval__samples": "1", "train__duration": "1 step"}
        result = launch(workplace, name=f"micro{micro}", train__micro_batch_size=micro, **flags)
        evaluations = [line["loss"] for line in lines(result.run_dir) if line["kind"] == "eval"]
        assert len(evaluations) >= 2
        assert (result.run_dir / "samples.jsonl").is_file()
        found.append(evaluations[0])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_failed_launch_says_so_and_can_go_on(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"train__duration": "5 steps", "checkpoint__every": "2 steps"}
    real = GlobalBatches.step

    def failing(self: GlobalBatches, i: int) -> Any:
        if i == 3:
            raise OSError("the disk is gone")
        return real(self, i)

    monkeypatch.setattr(GlobalBatches, "step", failing)
    with pytest.raises(OSError, match="disk is gone"):
        launch(workplace, **flags)
    monkeypatch.undo()
    run = workplace / "runs" / "r"
    record = trainings.record(run)
    assert (record["status"], record["launches"][0]["why"]) == ("failed", "OSError: the disk is gone")
    assert trainings.saved(run).step == 2
    with pytest.raises(RecipeError, match="unfinished run, at step 2"):
        launch(workplace, **flags)
    assert launch(workplace, "auto", **flags).status == "finished"
    assert [line["step"] for line in lines(run)] == list(range(1, 6))


def test_a_stop_file_saves_stops_and_is_used_up(workplace: Path) -> None:
    run = workplace / "runs" / "r"
    run.mkdir(parents=True)
    launch(workplace, train__stop_after="2 steps", train__duration="4 steps")
    (run / "STOP").touch()
    stopped = launch(workplace, "auto", train__duration="4 steps")
    assert (stopped.status, stopped.step) == ("stopped", 3)
    assert not (run / "STOP").exists()
    assert trainings.record(run)["launches"][1]["why"] == "STOP"
    assert trainings.saved(run).step == 3
    assert launch(workplace, "auto", train__duration="4 steps").status == "finished"


@pytest.mark.slow
def test_a_signal_in_an_evaluation_cuts_it_short_and_it_is_done_when_the_run_goes_on(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"data__eval": "7 documents", "eval__every": "2 steps", "eval__samples": "1", "eval__samples_at": "all"}
    flags |= {"train__duration": "4 steps", "checkpoint__every": "3 steps"}
    whole = launch(workplace, name="whole", **flags)
    evaluated = [0, 2, 4]
    real, signal_at = evaluate.answer_samples, {"evaluation": 0}

    def signalled(*args: Any, **options: Any) -> Any:
        signal_at["evaluation"] -= 1
        if signal_at["evaluation"] == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **options)

    monkeypatch.setattr(evaluate_task, "answer_samples", signalled)
    for last, step in ((0, 0), (0, 2), (2, whole.step)):
        signal_at["evaluation"] = evaluated.index(step) - evaluated.index(last) + 1
        stopped = launch(workplace, "auto", **flags)
        assert (stopped.status, stopped.step) == ("stopped", step)
    done = launch(workplace, "auto", **flags)
    assert (done.status, done.metrics["eval_loss"]) == ("finished", whole.metrics["eval_loss"])
    assert trainings.outcome(done.run_dir) == trainings.outcome(whole.run_dir)
    ended, unbroken = trainings.saved(done.run_dir), trainings.saved(whole.run_dir)
    assert ended.state == unbroken.state
    assert ended.manifest["files"]["probe.safetensors"] == unbroken.manifest["files"]["probe.safetensors"]
    assert launch(workplace, **flags) == done
    samples = [json.loads(line)["step"] for line in (done.run_dir / "samples.jsonl").read_text().splitlines()]
    assert samples == evaluated


@pytest.mark.parametrize(("step", "every", "named"), [(2, "1 step", "runs/r"), (1, "never", "runs/r")])
def test_a_run_directory_that_is_removed_under_a_run_is_named(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, step: int, every: str, named: str
) -> None:
    real = loop.optimizer_step

    def removing(state: Any, index: int, *rest: Any) -> Any:
        if index == step:
            shutil.rmtree(workplace / "runs" / "r")
        return real(state, index, *rest)

    monkeypatch.setattr(loop, "optimizer_step", removing)
    with pytest.raises(MachineError, match=f"{named}(/run.json: its|: this) directory is not there any more") as caught:
        launch(workplace, train__duration="3 steps", checkpoint__every=every)
    assert ".tmp" not in caught.value.message and caught.value.hint


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_stop_file_from_before_the_run_stops_it_and_goes(workplace: Path, resume: Literal["never", "auto"]) -> None:
    stop = workplace / "runs" / "r" / "STOP"
    stop.parent.mkdir(parents=True)
    stop.touch()
    stopped = launch(workplace, resume, train__duration="2 steps")
    assert (stopped.status, stopped.step, stop.exists()) == ("stopped", 1, False)
    assert launch(workplace, "must", train__duration="2 steps").status == "finished"


def test_an_owed_evaluation_that_is_killed_is_written_once(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"data__eval": "7 documents", "eval__samples": "1", "train__duration": "3 steps"}
    flags |= {"eval__at_start": "false", "eval__every": "never"}
    cut = lambda *_: (_ for _ in ()).throw(evaluate.EvaluationCutError)  # noqa: E731 - raises in an expression
    monkeypatch.setattr(evaluate_task, "evaluate", cut)
    stopped = launch(workplace, **flags)
    assert (stopped.status, stopped.step) == ("stopped", 3)
    assert stopped.checkpoint is not None and (stopped.checkpoint / "probe.safetensors").is_file()
    monkeypatch.undo()
    dies = lambda *_, **__: (_ for _ in ()).throw(OSError("killed"))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(SaveTask, "_save", dies)
        with pytest.raises(OSError, match="killed"):
            launch(workplace, "auto", **flags)
    run = launch(workplace, "auto", **flags).run_dir
    assert [(line["kind"], line["step"]) for line in lines(run)][-2:] == [("train", 3), ("eval", 3)]
    assert len((run / "samples.jsonl").read_text().splitlines()) == 1


def test_a_signal_before_the_first_step_leaves_a_run_to_go_on_with(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    loaded = trainings.loaded(workplace)
    monkeypatch.setattr(preflight, "prepare_to_use", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch_training(loaded, LaunchOptions(resume="auto"), False)
    monkeypatch.undo()
    stopped = launch(workplace, train__stop_after="1 step")
    monkeypatch.setattr(preflight, "prepare_to_use", interrupted)
    outcome = launch_training(loaded, LaunchOptions(resume="auto"), False)
    assert (outcome.status, outcome.exit_code, outcome.metrics["step"]) == ("stopped", 75, 1)
    assert outcome.artifacts["checkpoint"] == str(stopped.checkpoint)


@pytest.mark.parametrize("limit", ["0.5 epochs", "0.5%", "500 tokens"])
def test_a_launch_may_end_after_any_duration(workplace: Path, limit: str) -> None:
    """Six steps an epoch of about 1,100 tokens, and 18 in all."""
    result = launch(workplace, train__stop_after=limit)
    assert (result.status, result.step) == ("stopped", 1 if limit == "0.5%" else 3)


def test_evaluations_and_checkpoints_count_tokens_too(workplace: Path) -> None:
    flags = {"data__eval": "9 documents", "eval__samples": "0", "eval__every": "500 tokens", "checkpoint__keep": "9"}
    run = launch(workplace, checkpoint__every="0.5 epochs", train__duration="6 steps", **flags).run_dir
    found = lines(run)
    mean = next(line["tokens"] for line in found if line["step"] == 6) / 6
    every = -(-500 // mean)
    steps = [line["step"] for line in found if line["kind"] == "eval"]
    assert steps == sorted({0, 6, *range(0, 7, int(every))})
    assert sorted(step for step, _ in step_dirs(run / "checkpoints")) == [3, 6]


def test_the_first_batch_is_trained_on_again_and_again(workplace: Path) -> None:
    flags = {"train__stop_after": "2 steps", "optimizer__lr": "1e-12", "adapter__dropout": "0"}
    losses = [line["loss"] for line in lines(launch(workplace, train__overfit_first_batch="true", **flags).run_dir)]
    others = [line["loss"] for line in lines(launch(workplace, name="all", **flags).run_dir)]
    assert losses == pytest.approx([others[0]] * 2, rel=1e-6)
    assert others[1] != pytest.approx(others[0], rel=1e-5)


def test_the_mock_batch_changes_nothing(workplace: Path) -> None:
    plain = launch(workplace, name="plain", train__stop_after="2 steps")
    mocked = launch(workplace, name="mocked", train__stop_after="2 steps", train__mock_batch="true")
    assert [line["loss"] for line in lines(plain.run_dir)] == [line["loss"] for line in lines(mocked.run_dir)]


@pytest.mark.parametrize(("rows", "passes"), [(1, 1), (2, 2), (8, 2)])
def test_the_mock_batch_is_no_more_than_a_step(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, rows: int, passes: int
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(mock, "forward_backward", lambda train_state, index, batches: seen.append(len(batches.micro)))
    settings = {"train__global_batch_size": str(rows), "train__micro_batch_size": "1", "train__mock_batch": "true"}
    launch(workplace, name=f"of-{rows}", train__stop_after="1 step", **settings)
    assert seen == [passes]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no room"),
        pytest.param(
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas`"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_mock_batch_that_does_not_fit_ends_the_launch_before_the_first_step(
    error: Exception, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(mock, "forward_backward", full)
    with pytest.raises(MemoryLimitError, match="out of memory in the largest micro-batch, forward"):
        launch(workplace, train__mock_batch="true")
    assert not (workplace / "runs" / "r" / "metrics.jsonl").exists()


def seen_in_steps(monkeypatch: pytest.MonkeyPatch, look: Callable[[], Any]) -> list[Any]:
    """What is seen whenever a step takes its rows."""
    seen, real = list[Any](), GlobalBatches.step
    monkeypatch.setattr(GlobalBatches, "step", lambda self, i: seen.append(look()) or real(self, i))
    return seen


def test_deterministic_kernels_are_asked_for_and_let_go(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import deterministic

    is_on = torch.are_deterministic_algorithms_enabled
    seen = seen_in_steps(monkeypatch, lambda: (is_on(), deterministic.fill_uninitialized_memory))
    launch(workplace, train__deterministic="true", train__stop_after="1 step")
    assert set(seen) == {(True, False)}, "no tensor is filled before it is written to"
    assert not is_on()
    assert deterministic.fill_uninitialized_memory


def test_float32_products_as_tf32_are_asked_for_and_let_go(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    products, precision = torch.backends.cuda.matmul, torch.get_float32_matmul_precision
    # What the compiler asks for, too: it must not raise.
    seen = seen_in_steps(monkeypatch, lambda: (products.allow_tf32, precision()))
    with pytest.raises(MachineError, match=r"train\.tf32: .* has no TF32 units"):
        launch(workplace, name="cpu", train__tf32="true")
    monkeypatch.setattr(resolve_module, "_check_numerics", lambda recipe, facts: None)
    launch(workplace, train__tf32="true", train__stop_after="1 step")
    assert set(seen) == {(True, "high")}
    assert (products.allow_tf32, precision()) == (False, "highest")


def nan_at(monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    """From a step (0-based) on until the next begins, the last layer's MLP gives NaN."""
    real, begun = loop.optimizer_step, list[int]()

    def planted(train_state: Any, index: int, *rest: Any) -> Any:
        if not begun:
            mlp = train_state.root.model.get_decoder().layers[-1].mlp
            mlp.register_forward_hook(lambda m, i, output: output * float("nan") if begun[-1] == bad else output)
        begun.append(index)
        return real(train_state, index, *rest)

    monkeypatch.setattr(loop, "optimizer_step", planted)


def test_a_step_that_is_not_finite_ends_the_run_and_the_message_says_where(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings.emptied(workplace, layers=2)
    nan_at(monkeypatch, 3)
    said = r"step 4: loss nan.*the output of model\.layers\.1\.mlp; rows \d"
    with pytest.raises(DivergedError, match=said) as raised:
        launch(workplace, checkpoint__every="2 steps")
    assert "step-2" in (raised.value.hint or "")
    run = workplace / "runs" / "r"
    assert [step for step, _ in step_dirs(run / "checkpoints")] == [2]
    assert [line["step"] for line in lines(run)] == [1, 2, 3]
    record = trainings.record(run)
    assert (record["status"], record["launches"][0]["step"]) == ("failed", 3)


def test_skipped_steps_are_marked_and_survive_a_resume(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(name: str, stop: str) -> RunResult:
        with monkeypatch.context() as patch:
            nan_at(patch, 2)
            flags = {"train__nonfinite": "{skip: 1}", "train__duration": "5 steps", "train__stop_after": stop}
            return launch(workplace, "auto", name=name, **flags)

    whole = once("whole", "never")
    once("parts", "3 steps")
    parts = once("parts", "never")
    assert (whole.status, parts.status) == ("finished", "finished")
    assert [line.get("skipped", False) for line in lines(whole.run_dir)] == [False, False, True, False, False]
    assert lines(whole.run_dir)[2]["loss"] is None
    assert trainings.outcome(parts.run_dir) == trainings.outcome(whole.run_dir)
