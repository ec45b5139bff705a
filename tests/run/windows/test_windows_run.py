"""What the finder makes of windows that are there, late, empty or damaged, and of those that a run knows already; and
tiny runs over windows, in this process: the rows of a plain run, bit for bit the same when resumed, and nothing lost to
a bad window.
"""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.tables import cases
from tests.fixtures.trainings import launch
from tuner.config.portions import Portion
from tuner.config.recipe import DataSection
from tuner.data.batches import StepBatches
from tuner.data.building.spec import PrepareSpec
from tuner.errors import DataError, RecipeError
from tuner.run.options import LaunchOptions
from tuner.run.tasks import windows as task
from tuner.run.windows.finder import Finder, PreparedHere, PreparedWindow
from tuner.rundir import layout
from tuner.rundir.windows import WindowEntry
from tuner.runtime.console import Console


class Slow:
    """Prepares a window in so many looks: its key is its text, a window without text has no rows, `bad` is damage."""

    def __init__(self, looks: int = 0) -> None:
        self.looks, self.started = looks, 0
        self._window: Portion | None = None
        self._left = 0

    def start(self, window: Portion) -> None:
        assert self._window is None, "one at a time"
        self._window, self._left = window, self.looks
        self.started += 1

    def outcome(self) -> PreparedWindow | None:
        if self._left:
            self._left -= 1
            return None
        window, self._window = self._window, None
        assert window is not None
        text = "".join(Path(file).read_text() for file in window.files)
        if text == "bad":
            raise DataError("rows.jsonl:1:1: not JSON", hint="fix the row")
        return PreparedWindow(text, len(text)) if text else PreparedWindow()

    def end(self) -> None:
        self._window = None


class Place:
    def __init__(self, directory: Path, **windows: Any) -> None:
        self.directory, self.noted = directory, [()]
        train = {"train": [str(directory / "{window}.jsonl")], "windows": {"names": ["1", "2", "3"], **windows}}
        self.spec = PrepareSpec(DataSection.model_validate(train), *[None] * 4, directory)  # type: ignore[arg-type]
        self.preparation = Slow()

    def write(self, **texts: str) -> None:
        for name, text in texts.items():
            (self.directory / f"{name.removeprefix('w')}.jsonl").write_text(text)

    def finder(self, entries: Sequence[WindowEntry] = (), known: Sequence[WindowEntry] = ()) -> Finder:
        def note(every: Sequence[WindowEntry]) -> None:
            self.noted.append(tuple(every))  # type: ignore[arg-type]

        return Finder(self.spec, self.preparation, entries, known, note)


def opened(finder: Finder) -> WindowEntry:
    found = finder.look()
    assert found.kind == "ready", found
    finder.opened(found.entry)
    return found.entry


def test_windows_are_prepared_one_after_the_other(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.preparation.looks = 2
    place.write(w1="aa", w2="b", w3="c")
    finder = place.finder()
    assert [finder.look().kind for _ in range(4)] == ["preparing", "preparing", "ready", "ready"]
    first = opened(finder)
    assert (first.name, first.key, first.rows, first.files) == ("1", "aa", 2, (str(tmp_path / "1.jsonl"),))
    place.preparation.looks = 0
    assert [opened(finder).name, opened(finder).name, finder.look().kind] == ["2", "3", "ended"]
    assert place.preparation.started == 3


def test_a_late_window_stops_the_launch_once_it_is_overdue(tmp_path: Path) -> None:
    finder = Place(tmp_path).finder()
    assert finder.look().kind == "late"
    found = finder.look(overdue=True)
    assert (found.kind, "window 1 is not there" in found.words) == ("stop", True)


def test_a_late_window_is_skipped_for_good_where_the_recipe_says_so(tmp_path: Path) -> None:
    place = Place(tmp_path, late="skip")
    place.write(w2="b")
    finder = place.finder()
    assert finder.look().kind == "late"
    assert finder.look(overdue=True).entry.name == "2"
    assert place.noted[-1] == (WindowEntry("1", left_out="late"),)
    place.write(w1="came after all")
    assert opened(finder).name == "2"


def test_an_empty_window_is_skipped_waited_for_or_refused(tmp_path: Path) -> None:
    def look(empty: str, overdue: bool = False) -> tuple[Place, Finder, str]:
        place = Place(tmp_path, empty=empty)
        place.write(w1="", w2="b")
        finder = place.finder()
        return place, finder, finder.look(overdue).kind

    place, finder, kind = look("skip")
    assert (kind, finder.look().entry.name) == ("ready", "2")
    assert place.noted[-1] == (WindowEntry("1", (str(tmp_path / "1.jsonl"),), "empty"),)
    place, finder, kind = look("wait")
    assert (kind, finder.look().kind, place.preparation.started) == ("late", "late", 1)  # not prepared over and over
    place.write(w1="rows at last")
    assert opened(finder).key == "rows at last"
    assert look("wait", overdue=True)[2] == "stop"
    with pytest.raises(DataError, match=r"window 1: .*1\.jsonl: no rows"):
        look("refuse")


def test_a_damaged_window_is_refused_by_name_until_it_is_repaired(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write(w1="bad")
    finder = place.finder()
    for _ in range(3):
        with pytest.raises(DataError, match=r"^window 1: rows\.jsonl:1:1: not JSON$"):
            finder.look()
    assert place.preparation.started == 1
    place.write(w1="good")
    assert opened(finder).key == "good"


def test_windows_of_a_launch_that_had_come_further_are_the_same_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write(w1="a", w2="now it is there", w3="c")
    known = [
        WindowEntry("1", (str(tmp_path / "1.jsonl"),), key="a", rows=1, first_step=0, last_step=4),
        WindowEntry("2", left_out="late"),
        WindowEntry("3", (str(tmp_path / "3.jsonl"),), key="c", rows=1, first_step=4, last_step=5),
    ]
    finder = place.finder(known=known)
    assert [opened(finder), opened(finder)] == [known[0], known[2]]
    assert finder.entries == known and finder.look().kind == "ended"


def test_a_known_window_whose_files_changed_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write(w1="changed")
    known = [WindowEntry("1", (str(tmp_path / "1.jsonl"),), key="a", rows=1, first_step=0, last_step=4)]
    with pytest.raises(DataError, match="window 1: its files changed since it was opened"):
        place.finder(known=known).look()


def test_all_entries_are_noted_with_those_that_are_known(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write(w1="", w2="b")
    finder = place.finder()
    entry = replace(finder.look().entry, last_step=2)
    assert [item.name for item in finder.opened(entry)] == ["1", "2"]


RECIPE = """\
model: {name_or_path: ./model}
tokenizer: {name_or_path: byte}
adapter: {kind: lora, r: 4, dropout: 0.2}
data:
  train: 'logs/{window}.jsonl'
  max_length: 64
  packing: false
  windows: {names: [a, b, c], wait: never}
train: {global_batch_size: 4, micro_batch_size: 2, precision: fp32, device: cpu}
optimizer: {lr: 1e-3}
schedule: {kind: constant, warmup: 3 steps}
checkpoint: {every: 2 steps, keep: 9}
logging: {level: warning}
"""
ROWS = {"a": 8, "b": 12, "c": 8}
"""Rows of each window: whole global batches of 4."""


def prepare(directory: Path) -> None:
    """Write a tiny model, the rows of each window, and the recipe."""
    trainings.prepare(directory, 1, layers=1)
    (directory / "r.yaml").write_text(RECIPE)
    (directory / "logs").mkdir()
    for name, count in ROWS.items():
        write(directory, name, count)


def write(directory: Path, name: str, count: int) -> None:
    """The rows of a window: each says which one it is."""
    rng = random.Random(name)
    rows = [{"prompt": f"{name}{i} ", "completion": "ab" * rng.randint(1, 20)} for i in range(count)]
    (directory / "logs" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def entries(run: Path) -> list[dict[str, Any]]:
    """The windows of a run."""
    found: list[dict[str, Any]] = json.loads((run / "windows.json").read_text())["windows"]
    return found


class Trained:
    """What each step trained, by its number in the run's life: a step that is taken again counts as it was last."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from tuner.train import loop

        self.steps: dict[int, list[str]] = {}
        real = loop.optimizer_step

        def noting(state: Any, index: int, batches: StepBatches, factor: float) -> Any:
            self.steps[index] = [text for batch in batches.micro for text in _texts(batch)]
            return real(state, index, batches, factor)

        patch.setattr(loop, "optimizer_step", noting)

    @property
    def documents(self) -> Counter[str]:
        """How often each document was trained."""
        return Counter(text for texts in self.steps.values() for text in texts)


def _texts(batch: Any) -> list[str]:
    """The prompts of a batch, as the byte tokenizer has them."""
    texts, start = [], 0
    for length in batch.lengths:
        ids = [i for i in batch.input_ids[start : start + length].tolist() if i < 256]
        texts.append(bytes(ids).decode(errors="replace"))
        start += length
    return texts


def prepare_at_once(patch: pytest.MonkeyPatch) -> None:
    """Prepare windows in this process: a process for each takes a second."""

    def here(context: Any, windows: Any) -> Any:
        preparation = PreparedHere(windows.spec, Console(main=False))
        position, run = windows.position, context.run
        known = position.entries[position.number + 1 :]
        note = lambda entries: task.write_windows(run.path, entries)  # noqa: E731
        passes = task.PortionPlans(context.assembly.resolved).passes
        return task.Finder(windows.spec, preparation, position.decided, known, note, passes=passes)

    patch.setattr(task, "_finder", here)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path)
    prepare_at_once(monkeypatch)
    return tmp_path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run over the windows comes to that nobody stops."""
    directory = tmp_path_factory.mktemp("unbroken")
    prepare(directory)
    with pytest.MonkeyPatch.context() as patch:
        prepare_at_once(patch)
        return trainings.outcome(launch(directory).run_dir)


def test_windows_in_order_are_the_rows_of_a_plain_run_over_all_of_them(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(monkeypatch)
    result = launch(work, data__shuffle="false", name="windows")
    assert (result.status, result.step, result.total_steps) == ("finished", 7, 7)
    in_windows, trained.steps = trained.steps, {}
    texts = [(work / "logs" / f"{name}.jsonl").read_text() for name in ROWS]
    (work / "all.jsonl").write_text("".join(texts))
    plain = {"data__windows__names": "[]", "data__windows__wait": "null", "data__train": "all.jsonl"}
    launch(work, data__shuffle="false", name="plain", **plain)
    assert in_windows == trained.steps
    ended = [trainings.outcome(work / "runs" / name) for name in ("windows", "plain")]
    assert ended[0]["sha256"] == ended[1]["sha256"]


def test_a_run_stopped_anywhere_ends_as_an_unbroken_one(
    work: Path, unbroken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(monkeypatch)
    launch(work, name="broken", train__stop_after="1 steps")
    for steps in (2, 1, 1, 9):  # within a window, at its end, after it
        result = launch(work, "must", name="broken", train__stop_after=f"{steps} steps")
    assert result.status == "finished"
    assert trainings.outcome(result.run_dir) == unbroken
    assert set(trained.documents.values()) == {1} and sum(trained.documents.values()) == sum(ROWS.values())
    assert [(e["name"], e["first_step"], e["last_step"]) for e in entries(result.run_dir)] == [
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
    write(work, "a", 0)
    (work / "logs" / "b.jsonl").rename(work / "b")
    flags = {"name": "skipped", "data__windows__late": "skip"}
    trained = Trained(monkeypatch)
    launch(work, train__stop_after="1 steps", **flags)
    (work / "b").rename(work / "logs" / "b.jsonl")
    write(work, "a", 4)
    result = launch(work, "must", **flags)
    assert (result.status, result.step) == ("finished", 2)
    left_out = {entry["name"]: entry["left_out"] for entry in entries(result.run_dir)}
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
    assert entries(result.run_dir)[-1]["last_step"] == 4
    assert launch(work, "must", **flags).step == 4


@pytest.mark.slow
def test_every_window_ends_with_an_evaluation_and_a_checkpoint(work: Path) -> None:
    write(work, "held", 4)
    flags = {"data__eval": "logs/held.jsonl", "checkpoint__every": "never", "eval__samples": "0"}
    run = launch(work, **flags).run_dir
    evaluated = [line["step"] for line in trainings.lines(run) if line["kind"] == "eval"]
    assert evaluated == [0, 2, 5, 7]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-2", "step-5", "step-7"]


@pytest.mark.slow
def test_a_directory_that_grows_is_read_to_its_end(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(monkeypatch)
    (work / "more").mkdir()
    flags = {"data__train": "more", "data__windows__names": "[]", "data__windows__files": "1", "name": "grown"}
    flags["data__windows__grow"] = "true"
    counts: Counter[str] = Counter()
    for number, name in enumerate(ROWS):
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
    trained, flags = Trained(monkeypatch), {**flags, "data__windows__passes": "stream"}
    whole = launch(work, name="whole", **flags)
    assert [[one["name"], one["first_step"], one["last_step"]] for one in entries(whole.run_dir)] == windows
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
        write(work, name, 0)
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
