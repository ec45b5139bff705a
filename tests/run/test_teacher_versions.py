"""Runs whose teacher is still learning: newer versions are taken on a cadence, and again by whoever resumes."""

import json
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.newer_versions import shift, versions_appear
from tests.fixtures.trainings import launch, lines, outcome
from tuner.config.recipe import TokenizerSection
from tuner.data.encoding.tokenizer_files import load_tokenizer
from tuner.errors import DataError, RecipeError
from tuner.run.teacher import TeacherVersions
from tuner.rundir.versions import TakenVersion
from tuner.setup.teacher import INDEX, files_read, incomplete, newest_teacher


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = trainings.prepare(tmp_path_factory.mktemp("versions"), 1, layers=1)
    load_tokenizer(str(directory / "model"), None, TokenizerSection(name_or_path="byte")).save(directory / "model")
    return directory


@pytest.fixture
def workplace(made: Path) -> Path:
    """With one version of the teacher."""
    for name in ("runs", "teacher"):
        shutil.rmtree(made / name, ignore_errors=True)
    publish(made, 10)
    return made


def publish(directory: Path, step: int) -> Path:
    """Another version of the teacher, with weights of its own."""
    return shift(shutil.copytree(directory / "model", directory / "teacher" / f"step-{step}"), step)


def flags(directory: Path, **others: str) -> dict[str, Any]:
    given = {
        "method__kind": "distill", "method__teacher": str(directory / "teacher"), "method__teacher_every": "2 steps",
        "train__duration": "8 steps", "checkpoint__every": "3 steps", "optimizer__lr": "1e-2", "name": "run",
    }  # fmt: skip
    return given | others


appearing = partial(versions_appear, TeacherVersions, publish)


def noted(run: Path) -> list[tuple[int, str]]:
    return [(entry["step"], entry["name"]) for entry in json.loads((run / "teachers.json").read_text())["versions"]]


@pytest.mark.slow
def test_a_killed_run_learns_from_the_same_versions_in_the_same_steps(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        appearing(workplace, patch, {2: 20, 6: 30})
        whole = launch(workplace, **flags(workplace, name="whole"))
    assert noted(whole.run_dir) == [(0, "step-10"), (2, "step-20"), (6, "step-30")]
    for number in (20, 30):
        shutil.rmtree(workplace / "teacher" / f"step-{number}")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        appearing(workplace, patch, {2: 20}, dies=6)
        launch(workplace, **flags(workplace))
    publish(workplace, 30)  # step 4 is taken again: its look found nothing newer, and that is final
    again = launch(workplace, "must", **flags(workplace))
    assert noted(again.run_dir) == noted(whole.run_dir)
    assert outcome(again.run_dir) == outcome(whole.run_dir)
    first = launch(workplace, **flags(workplace, name="first", method__teacher_every="never",
                                      method__teacher=str(workplace / "teacher" / "step-10")))  # fmt: skip
    losses = [[line["teacher_ce"] for line in lines(run.run_dir)] for run in (whole, first)]
    assert losses[0][:2] == losses[1][:2] and losses[0][2:] != losses[1][2:]


@pytest.mark.slow
def test_a_run_that_stops_at_a_look_goes_on_as_if_it_had_not(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        appearing(workplace, patch, {4: 20})
        whole = launch(workplace, **flags(workplace, name="whole"))
    shutil.rmtree(workplace / "teacher" / "step-20")
    with monkeypatch.context() as patch:
        appearing(workplace, patch, {4: 20})
        launch(workplace, **flags(workplace, train__stop_after="4 steps"))
    again = launch(workplace, "must", **flags(workplace))
    assert outcome(again.run_dir) == outcome(whole.run_dir)


@pytest.mark.slow
def test_the_current_version_may_go_once_it_is_loaded(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = TeacherVersions.look

    def pruned(self: TeacherVersions, step: int, pass_over: Any) -> TakenVersion:
        publish(workplace, 10 + step)
        shutil.rmtree(workplace / "teacher" / self.current.name)
        return look(self, step, pass_over)

    monkeypatch.setattr(TeacherVersions, "look", pruned)
    run = launch(workplace, **flags(workplace)).run_dir
    assert noted(run) == [(step, f"step-{10 + step}") for step in (0, 2, 4, 6, 8)]


@pytest.mark.slow
def test_a_run_that_died_before_its_first_checkpoint_begins_with_the_same_version(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        appearing(workplace, patch, {}, dies=2)
        launch(workplace, **flags(workplace))
    publish(workplace, 20)
    launch(workplace, "auto", **flags(workplace))
    assert noted(workplace / "runs" / "run") == [(0, "step-10"), (2, "step-20")]


@pytest.mark.slow
def test_a_branch_of_a_run_begins_with_the_version_of_its_checkpoint(workplace: Path) -> None:
    parent = launch(workplace, **flags(workplace, train__stop_after="3 steps"))
    publish(workplace, 20)
    child = launch(workplace, parent.run_dir / "checkpoints" / "step-3", **flags(workplace, name="child"))
    assert noted(child.run_dir) == [(0, "step-10"), (4, "step-20")]


def test_versions_that_are_gone_or_changed_are_refused(workplace: Path) -> None:
    launch(workplace, **flags(workplace, train__stop_after="3 steps"))
    path = workplace / "teacher" / "step-10"
    shift(path, 3)
    with pytest.raises(DataError, match=r"step-10: the teacher changed since the run learned from it"):
        launch(workplace, "must", **flags(workplace))
    path.rename(path.with_name("elsewhere"))
    publish(workplace, 20)
    with pytest.raises(DataError, match=r"step-10 is gone, which the run took after step 0"):
        launch(workplace, "must", **flags(workplace))
    shutil.rmtree(path.with_name("elsewhere"))
    shutil.rmtree(workplace / "teacher" / "step-20")
    publish(workplace, 10)
    assert launch(workplace, "must", **flags(workplace)).status == "finished"


COPIED = {
    "nothing": lambda path: [each.unlink() for each in path.iterdir()],
    "holds no config.json": lambda path: (path / "config.json").unlink(),
    "holds no tokenizer_config.json": lambda path: (path / "tokenizer_config.json").unlink(),
    "holds no tokenizer.json": lambda path: (path / "tokenizer.json").unlink(),
    "holds JSON that is not whole": lambda path: (path / "tokenizer.json").write_text('{"model": {'),
    "holds no whole model.safetensors": lambda path: os.truncate(path / "model.safetensors", 9000),
    "holds no whole b": lambda path: (path / INDEX).write_text(
        json.dumps({"weight_map": {"x": "model.safetensors", "y": "b"}})
    ),
}  # fmt: skip


def test_a_version_that_is_being_copied_is_passed_over(workplace: Path) -> None:
    """Each is incomplete in a way of its own; the newest one that is whole is taken, and there may be none."""
    whole = workplace / "teacher" / "step-10"
    names = files_read(whole)
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names and incomplete(whole, names) is None
    for number, (says, spoil) in enumerate(COPIED.items(), 11):
        path = publish(workplace, number)
        spoil(path)
        assert incomplete(path, names) == ("holds no config.json" if says == "nothing" else says)
        assert newest_teacher(whole.parent) == whole or says == "holds no tokenizer_config.json"
        if says == "holds no tokenizer_config.json":
            shutil.rmtree(path)
    shutil.rmtree(whole)
    with pytest.raises(RecipeError, match="holds no version of a teacher .*; step-17 holds no whole b"):
        newest_teacher(whole.parent)


def test_a_launch_goes_on_while_a_version_is_copied(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = TeacherVersions.look

    def copying(self: TeacherVersions, step: int, pass_over: Any) -> TakenVersion:
        path = workplace / "teacher" / "step-20"
        if step == 2:
            (publish(workplace, 20) / "tokenizer.json").rename(workplace / "later")
        elif step == 4:
            (workplace / "later").rename(path / "tokenizer.json")
        return look(self, step, pass_over)

    monkeypatch.setattr(TeacherVersions, "look", copying)
    run = launch(workplace, **flags(workplace, train__duration="5 steps", logging__level="info")).run_dir
    assert noted(run) == [(0, "step-10"), (4, "step-20")]
    assert "step-20 is passed over: it holds no tokenizer.json" in (run / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"top_k": "8"}, "a teacher's columns are computed once"),
        ({"teacher_revision": "main"}, "has no revision"),
        ({"teacher_every": "5 min"}, "steps"),
    ],
)
def test_a_cadence_is_refused_where_no_newer_teacher_can_come(
    workplace: Path, given: Mapping[str, str], says: str
) -> None:
    own = flags(workplace, **{f"method__{key}": text for key, text in given.items()})
    with pytest.raises(RecipeError, match=says):
        launch(workplace, **own)


def test_a_directory_without_versions_is_named_by_checks_and_launches(workplace: Path) -> None:
    from tuner.setup.check import check_files
    from tuner.setup.findings import Findings

    own = flags(workplace, method__teacher=str(workplace / "model"))
    with pytest.raises(RecipeError, match=r"method.teacher: .*/model holds no version of a teacher"):
        launch(workplace, **own)
    loaded = trainings.loaded(workplace, **own)
    found = Findings(loaded)
    check_files(loaded.recipe, found)
    with pytest.raises(RecipeError, match=r"method.teacher.*holds no version of a teacher"):
        found.raise_any()
