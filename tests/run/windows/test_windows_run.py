"""Runs over windows: the rows of a plain run, bit for bit the same when resumed, and nothing lost to a bad window."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.tables import cases
from tests.fixtures.trainings import launch
from tests.run.windows import made
from tuner.errors import DataError, RecipeError
from tuner.run.options import LaunchOptions
from tuner.rundir import layout


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made.prepare(tmp_path)
    made.prepare_at_once(monkeypatch)
    return tmp_path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run over the windows comes to that nobody stops."""
    directory = tmp_path_factory.mktemp("unbroken")
    made.prepare(directory)
    with pytest.MonkeyPatch.context() as patch:
        made.prepare_at_once(patch)
        return trainings.outcome(launch(directory).run_dir)


def test_windows_in_order_are_the_rows_of_a_plain_run_over_all_of_them(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = made.Trained(monkeypatch)
    result = launch(work, data__shuffle="false", name="windows")
    assert (result.status, result.step, result.total_steps) == ("finished", 7, 7)
    in_windows, trained.steps = trained.steps, {}
    texts = [(work / "logs" / f"{name}.jsonl").read_text() for name in made.ROWS]
    (work / "all.jsonl").write_text("".join(texts))
    plain = {"data__windows__names": "[]", "data__windows__wait": "null", "data__train": "all.jsonl"}
    launch(work, data__shuffle="false", name="plain", **plain)
    assert in_windows == trained.steps
    ended = [trainings.outcome(work / "runs" / name) for name in ("windows", "plain")]
    assert ended[0]["sha256"] == ended[1]["sha256"]


def test_a_run_stopped_anywhere_ends_as_an_unbroken_one(
    work: Path, unbroken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = made.Trained(monkeypatch)
    launch(work, name="broken", train__stop_after="1 steps")
    for steps in (2, 1, 1, 9):  # within a window, at its end, after it
        result = launch(work, "must", name="broken", train__stop_after=f"{steps} steps")
    assert result.status == "finished"
    assert trainings.outcome(result.run_dir) == unbroken
    assert set(trained.documents.values()) == {1} and sum(trained.documents.values()) == sum(made.ROWS.values())
    assert [(e["name"], e["first_step"], e["last_step"]) for e in made.entries(result.run_dir)] == [
        ("a", 0, 2), ("b", 2, 5), ("c", 5, 7),
    ]  # fmt: skip
    first_of_a, first_of_c = ({text[1:].split(" ")[0] for text in trained.steps[step]} for step in (0, 5))
    assert len(first_of_a) == len(first_of_c) == 4 and first_of_a != first_of_c, "each has an order of its own"


def test_hooks_hear_of_each_window_once(work: Path) -> None:
    (work / "told.py").write_text(
        "def note(report):\n    with open('told', 'a') as file:\n"
        '        file.write(f\'{report.step} {report.metrics["window"]} {report.metrics["name"]}\\n\')\n'
    )
    told = {"hooks": json.dumps([{"use": f"{work}/told.py:note", "stages": ["window"]}])}
    for resume, steps in (("never", 3), ("must", 2), ("must", 9)):
        launch(work, resume, train__stop_after=f"{steps} steps", **told)
    assert (work / "told").read_text().splitlines() == ["2 1 a", "5 2 b", "7 3 c"]


@pytest.mark.slow
def test_a_late_window_stops_the_run_which_goes_on_when_it_is_there(work: Path, unbroken: dict[str, Any]) -> None:
    late = work / "logs" / "b.jsonl"
    late.rename(work / "b")
    result = launch(work, name="late")
    assert (result.status, result.step) == ("stopped", 2)
    assert "window b is not there" in trainings.record(result.run_dir)["launches"][-1]["why"]
    again = launch(work, "must", name="late")
    assert (again.status, again.step) == ("stopped", 2)
    (work / "b").rename(late)
    assert trainings.outcome(launch(work, "must", name="late").run_dir) == unbroken


@pytest.mark.slow
def test_what_was_skipped_stays_skipped(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made.write(work, "a", 0)
    (work / "logs" / "b.jsonl").rename(work / "b")
    flags = {"name": "skipped", "data__windows__late": "skip"}
    trained = made.Trained(monkeypatch)
    launch(work, train__stop_after="1 steps", **flags)
    (work / "b").rename(work / "logs" / "b.jsonl")
    made.write(work, "a", 4)
    result = launch(work, "must", **flags)
    assert (result.status, result.step) == ("finished", 2)
    left_out = {entry["name"]: entry["left_out"] for entry in made.entries(result.run_dir)}
    assert left_out == {"a": "empty", "b": "late", "c": ""}
    assert {text[0] for text in trained.documents} == {"c"}


def test_a_damaged_window_is_refused_by_name_and_nothing_is_lost(work: Path, unbroken: dict[str, Any]) -> None:
    path = work / "logs" / "c.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-9])
    with pytest.raises(DataError, match=r"^window c: .*c\.jsonl:8:") as caught:
        launch(work, name="damaged")
    assert caught.value.exit_code == 3
    assert (work / "runs" / "damaged" / "checkpoints" / "step-5").is_dir()
    with pytest.raises(DataError, match="window c: "):
        launch(work, "must", name="damaged")
    path.write_text(whole)
    assert trainings.outcome(launch(work, "must", name="damaged").run_dir) == unbroken


@pytest.mark.slow
def test_a_known_window_is_trained_as_it_was_whatever_became_of_its_files(work: Path, unbroken: dict[str, Any]) -> None:
    run = launch(work, name="known", train__stop_after="3 steps").run_dir
    (work / "logs" / "a.jsonl").unlink()  # done
    (work / "logs" / "b.jsonl").write_text("another content")  # under way: its prepared data is kept
    assert trainings.outcome(launch(work, "must", name="known").run_dir) == unbroken
    assert run.is_dir()


@pytest.mark.slow
def test_windows_of_a_lost_file_are_those_of_the_checkpoint(work: Path, unbroken: dict[str, Any]) -> None:
    run = launch(work, name="lost", train__stop_after="3 steps").run_dir
    (run / layout.PORTIONS).unlink()
    assert trainings.outcome(launch(work, "must", name="lost").run_dir) == unbroken


@pytest.mark.slow
def test_a_duration_ends_the_run_within_a_window(work: Path) -> None:
    flags = {"train__duration": "4 steps", "schedule__kind": "cosine", "schedule__warmup": "25%"}
    result = launch(work, **flags)
    assert (result.status, result.step) == ("finished", 4)
    assert made.entries(result.run_dir)[-1]["last_step"] == 4
    assert launch(work, "must", **flags).step == 4


@pytest.mark.slow
def test_every_window_ends_with_an_evaluation_and_a_checkpoint(work: Path) -> None:
    made.write(work, "held", 4)
    flags = {"data__eval": "logs/held.jsonl", "checkpoint__every": "never", "eval__samples": "0"}
    run = launch(work, **flags).run_dir
    evaluated = [line["step"] for line in trainings.lines(run) if line["kind"] == "eval"]
    assert evaluated == [0, 2, 5, 7]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-2", "step-5", "step-7"]


@pytest.mark.slow
def test_a_directory_that_grows_is_read_to_its_end(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = made.Trained(monkeypatch)
    (work / "more").mkdir()
    flags = {"data__train": "more", "data__windows__names": "[]", "data__windows__files": "1", "name": "grown"}
    flags["data__windows__grow"] = "true"
    counts: Counter[str] = Counter()
    for number, name in enumerate(made.ROWS):
        (work / "logs" / f"{name}.jsonl").rename(work / "more" / f"{name}.jsonl")
        result = launch(work, "must" if number else "never", **flags)
        counts[result.status] += 1
    (work / "more" / "END").touch()
    result = launch(work, "must", **flags)
    assert (result.status, result.step, counts) == ("finished", 7, {"stopped": 3})
    assert set(trained.documents.values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (LaunchOptions(prepared=Path("x")), "--prepared is one directory"),
        (LaunchOptions("must", reset=("data",)), "--reset data: the windows of a run"),
    ],
)
def test_options_without_a_meaning_for_windows_are_refused(work: Path, options: Any, said: str) -> None:
    if options.resume == "must":
        launch(work, train__stop_after="1 steps")
    with pytest.raises(RecipeError, match=said):
        launch(work, options)


ORDER = ["a", "b", "c"]


@pytest.mark.slow("names")
@pytest.mark.parametrize(
    ("flags", "windows"), cases(__file__, "a_run_goes_over_the_stream_again"), ids=["names", "steps", "files"]
)
def test_a_run_goes_over_the_stream_again(
    flags: dict[str, str], windows: list[list[Any]], work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass has its own order of rows, and a run stopped in any of them ends as one that nobody stops."""
    trained, flags = made.Trained(monkeypatch), {**flags, "data__windows__passes": "stream"}
    whole = launch(work, name="whole", **flags)
    assert [[one["name"], one["first_step"], one["last_step"]] for one in made.entries(whole.run_dir)] == windows
    last = windows[-1][2]
    assert (whole.status, whole.step, len(trained.steps)) == ("finished", last, last)
    if "8" not in flags["train__duration"]:
        assert set(trained.documents.values()) == {2}
        assert trained.steps[0] != trained.steps[last // 2]
    parts = launch(work, name="parts", train__stop_after="5 steps", **flags)
    while parts.status == "stopped":
        parts = launch(work, "must", name="parts", train__stop_after="5 steps", **flags)
    assert trainings.outcome(parts.run_dir) == trainings.outcome(whole.run_dir)


def test_a_stream_of_nothing_ends(work: Path) -> None:
    for name in "bc":
        made.write(work, name, 0)
    flags = {"train__duration": "9 steps", "data__windows__passes": "stream"}
    with pytest.raises(DataError, match=r"no window has rows to train on: b \(empty\), c \(empty\)"):
        launch(work, data__windows__names="[b, c]", **flags)


def test_a_launch_trains_its_windows_and_every_second_is_saved(work: Path, unbroken: dict[str, Any]) -> None:
    flags = {"name": "launches", "data__windows__per_launch": "1", "checkpoint__every": "null"}
    saves = []
    for resume in ("never", "must", "must"):
        result = launch(work, resume, data__windows__save_every="2", **flags)
        saves.append((result.status, result.step))
    assert saves == [("stopped", 2), ("stopped", 5), ("finished", 7)]
    assert trainings.outcome(result.run_dir)["sha256"] == unbroken["sha256"]
    run = launch(work, name="second", data__windows__save_every="2", checkpoint__every="null").run_dir
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-5", "step-7"]


def test_held_out_rows_come_with_their_window(work: Path) -> None:
    (work / "held").mkdir()
    for name, count in zip(ORDER, (1, 2, 3), strict=True):
        rows = [{"prompt": f"{name}{i} ", "completion": name * 9} for i in range(count)]
        (work / "held" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"data__eval": "held/{window}.jsonl"}
    result = launch(work, name="all", **flags)
    launch(work, name="parts", train__stop_after="4 steps", **flags)
    parts = launch(work, "must", name="parts", **flags)
    fixed = launch(work, name="fixed", data__eval="held/b.jsonl")

    def losses(run: Path) -> dict[int, float]:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if line["kind"] == "eval"}

    own, of_b = losses(result.run_dir), losses(fixed.run_dir)
    assert list(own) == [0, 2, 5, 7]
    assert [step for step, loss in own.items() if loss == of_b[step]] == [5]
    samples = [json.loads(line) for line in (parts.run_dir / "samples.jsonl").read_text().splitlines()]
    prompts = [(one["step"], one["prompt"][:1]) for one in samples]
    assert prompts == [(0, "a"), (2, "a"), *[(5, "b")] * 2, *[(7, "c")] * 3]
    assert trainings.outcome(parts.run_dir) == trainings.outcome(result.run_dir)
