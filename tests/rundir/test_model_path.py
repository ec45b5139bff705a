"""Which checkpoint a path means, from the record and from what is there; and what no recipe can name as its model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rundir import made
from tuner.checkpoint.save import CheckpointDir, save
from tuner.cli.command import load_for_command
from tuner.config.load import Override
from tuner.errors import DataError, RecipeError
from tuner.rundir.checkpoints import last_step
from tuner.rundir.model_path import HfDirectory, RunCheckpoint, Warn, Which, find_checkpoint, resolve_model_path
from tuner.rundir.record import read_run


def run(directory: Path, steps: tuple[int, ...], launches: list[dict[str, Any]], status: str = "finished") -> Path:
    """A run of four steps with checkpoints; the last step's state says that it is finished."""
    path = made.run(directory, launches=launches, status=status)
    for step in steps:
        best = {"metric": "eval/loss", "step": 2, "value": 1.0}
        state = {"step": step, "finished": step == 4, "best": best}
        save(CheckpointDir(path / "checkpoints", "r"), step, {"model/w": torch.zeros(8)}, state, {})
    return path


def ended(first: int, last: int, **more: Any) -> dict[str, Any]:
    return made.launch("10:00:00", "10:01:00", first, last, total_steps=4) | more


def killed(first: int, **more: Any) -> dict[str, Any]:
    return made.launch("11:00:00", None, first, 0, total_steps=4) | more


def chosen(run: Path, warn: Warn = pytest.fail, which: Which = "newest") -> int:
    """The step of the checkpoint that a run's directory means."""
    found = find_checkpoint(run, warn, which=which)
    assert found is not None
    return found.checkpoint.step


@pytest.mark.parametrize(
    ("launches", "steps", "last"),
    [
        ([ended(0, 4, saved_step=4)], (2, 4), 4),
        ([ended(0, 4, saved_step=4)], (2,), 4),
        ([ended(0, 4, saved_step=4)], (2, 4, 9), 4),
        ([ended(0, 4, saved_step=2)], (2,), 2),
        ([ended(0, 4, saved_step=None)], (), None),
        ([killed(0)], (2,), 2),
        ([killed(0)], (), None),
        ([ended(0, 3, saved_step=3, status="stopped"), killed(3)], (2,), 3),
        ([ended(0, 3, saved_step=3, status="stopped"), killed(2)], (2,), 2),
        ([killed(3, began_from="/other/checkpoints/step-3")], (), None),
    ],
)
def test_the_last_step_is_what_the_record_and_the_directory_tell(
    tmp_path: Path, launches: list[dict[str, Any]], steps: tuple[int, ...], last: int | None
) -> None:
    path = run(tmp_path / "r", steps, launches)
    assert last_step(path / "checkpoints", read_run(path).record) == last


def test_records_that_do_not_tell_what_was_saved_mean_their_last_step(tmp_path: Path) -> None:
    old = ended(0, 4)
    del old["saved_step"]
    path = run(tmp_path / "r", (2,), [old])
    with pytest.raises(DataError, match=r"its last checkpoint is not whole: .*step-4: no such directory") as refused:
        find_checkpoint(path, pytest.fail)
    assert refused.value.hint == (
        f"make it whole: tuner resume {path}      take an earlier one: {path / 'checkpoints' / 'step-2'}"
    )


def test_junk_beyond_the_last_step_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    path = run(tmp_path / "r", (2, 4), [ended(0, 4, saved_step=4)])
    (path / "checkpoints" / "step-9").mkdir()
    warnings: list[str] = []
    assert chosen(path, warnings.append) == 4
    (warning,) = warnings
    assert "step-9 is not used" in warning


def test_a_run_before_its_end_is_chosen_with_a_warning(tmp_path: Path) -> None:
    path = run(tmp_path / "r", (2,), [killed(0)], "running")
    warnings: list[str] = []
    assert (chosen(path, warnings.append), read_run(path).status) == (2, "killed")
    assert warnings == [f"{path}: its newest checkpoint is that of step 2 of 4, before the end of the run"]


def test_best_is_known_from_the_last_step_alone(tmp_path: Path) -> None:
    path = run(tmp_path / "r", (2, 4), [ended(0, 4, saved_step=4)])
    assert chosen(path, which="best") == 2
    shutil.rmtree(path / "checkpoints" / "step-2")
    with pytest.raises(DataError, match="step-2") as gone:
        find_checkpoint(path, pytest.fail, which="best")
    assert gone.value.hint == f"take another: {path / 'checkpoints' / 'step-4'}"
    with pytest.raises(DataError, match="step-3: no such directory") as missing:
        find_checkpoint(path, pytest.fail, which=3)
    assert missing.value.hint == "there are: step-4"
    shutil.rmtree(path / "checkpoints" / "step-4")
    with pytest.raises(DataError, match="its last checkpoint is not whole"):
        find_checkpoint(path, pytest.fail, which="best")
    with pytest.raises(RecipeError, match="is one checkpoint"):
        save(CheckpointDir(path / "checkpoints", "r"), 4, {"model/w": torch.zeros(8)}, {"step": 4}, {})
        find_checkpoint(path / "checkpoints" / "step-4", pytest.fail, which="best")


def test_a_record_that_is_gone_or_damaged_is_not_what_makes_a_run(tmp_path: Path) -> None:
    path = run(tmp_path / "r", (2, 4), [ended(0, 4, saved_step=4)])
    (path / "run.json").write_text("{")
    warnings: list[str] = []
    assert find_checkpoint(path, warnings.append) is not None
    assert "run.json: not valid JSON" in warnings[0]
    with pytest.raises(DataError, match="not valid JSON") as damaged:
        read_run(path)
    assert damaged.value.hint is not None and "tuner resume" in damaged.value.hint
    (path / "run.json").unlink()
    found = read_run(path)
    assert found.status == "finished"
    lost = f"{path / 'metrics.jsonl'} ends at step {{}} of 4: its later lines are lost"
    (path / "metrics.jsonl").unlink()
    assert read_run(path).problems[1:] == [lost.format(0)]
    (path / "metrics.jsonl").write_text('{"kind": "train", "step": 3}\n{"kind": "train", "ste')
    assert read_run(path).problems[1:] == [lost.format(3)]
    (path / "metrics.jsonl").write_text('{"kind": "train", "step": 4}\n{"kind": "train", "ste')
    found = read_run(path)
    assert found.problems == [f"{path / 'run.json'} is gone: tuner resume {path} writes it again"]
    assert read_run(path).record == found.record
    manifest = path / "checkpoints" / "step-4" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"step": 5}))
    assert read_run(path).status == "damaged"
    assert find_checkpoint(tmp_path, pytest.fail) is None


def test_a_path_is_a_checkpoint_of_a_run_or_a_hugging_face_directory(tmp_path: Path) -> None:
    path = run(tmp_path / "r", (2, 4), [{"from_step": 0, "saved_step": 4, "status": "finished"}])
    found = resolve_model_path(path)
    assert isinstance(found, RunCheckpoint)
    assert (found.run_dir, found.checkpoint.step) == (path, 4)
    found = resolve_model_path(path / "checkpoints" / "step-2")
    assert isinstance(found, RunCheckpoint)
    assert (found.run_dir, found.checkpoint.step) == (path, 2)
    for names, is_adapter in ((["config.json"], False), (["adapter_config.json"], True)):
        directory = tmp_path / names[0]
        directory.mkdir()
        for name in names:
            (directory / name).write_text("{}")
        assert resolve_model_path(directory) == HfDirectory(directory, is_adapter)


def test_a_path_that_is_no_model_is_refused_with_what_a_model_is(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="nowhere: no such directory") as refused:
        resolve_model_path(tmp_path / "nowhere")
    assert refused.value.hint == "give a run, a checkpoint or a Hugging Face directory"
    with pytest.raises(RecipeError, match="neither a run, a checkpoint nor a Hugging Face directory") as refused:
        resolve_model_path(tmp_path)
    assert "checkpoints/step-N" in (refused.value.hint or "")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a run of two checkpoints and a recipe that names it as its model."""
    made.run(tmp_path / "runs" / "l", launches=[made.launch("11:00:00", "11:00:20", 0, 8) | {"saved_step": 8}])
    for step in (4, 8):
        (tmp_path / "runs" / "l" / "checkpoints" / f"step-{step}").mkdir(parents=True)
    (tmp_path / "recipe.yaml").write_text("model:\n  name_or_path: runs/l\ndata: {train: x.jsonl}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(model: str | None = None) -> RecipeError:
    overrides = [] if model is None else [Override("model.name_or_path", model)]
    with pytest.raises(RecipeError) as caught:
        load_for_command("recipe.yaml", overrides)
    return caught.value


def test_a_run_is_exported_first(place: Path) -> None:
    error = refused()
    assert error.message == "recipe.yaml:2:17  model.name_or_path: runs/l is a run, not a model"
    assert error.hint == ("export it first: tuner export-hf runs/l      then model.name_or_path: runs/l/exports/step-8")
    checkpoint = refused("runs/l/checkpoints/step-4")
    assert "flag --model.name_or_path runs/l/checkpoints/step-4  model.name_or_path: runs/l/check" in checkpoint.message
    assert "tuner export-hf runs/l/checkpoints/step-4      then" in (checkpoint.hint or "")


def test_an_export_that_is_there_is_named(place: Path) -> None:
    export = place / "runs" / "l" / "exports" / "step-8"
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    assert refused().hint == "take its export: model.name_or_path: runs/l/exports/step-8"
    assert load_for_command("recipe.yaml", [Override("model.name_or_path", "runs/l/exports/step-8")]).recipe


def test_an_adapter_is_merged_first(place: Path) -> None:
    kept = place / "runs" / "l" / "exports" / "step-8-adapter"
    kept.mkdir(parents=True)
    (kept / "adapter_config.json").write_text("{}")
    error = refused("runs/l/exports/step-8-adapter")
    assert "is an adapter alone, not a model" in error.message
    assert "merged into its base model: tuner export-hf runs/l " in (error.hint or "")


def test_a_run_without_a_checkpoint_is_trained_first(place: Path) -> None:
    made.run(place / "runs" / "new", launches=[])
    assert "tuner resume runs/new" in (refused("runs/new").hint or "")


def test_other_names_are_left_alone(place: Path) -> None:
    assert load_for_command("recipe.yaml", [Override("model.name_or_path", "owner/name")]).recipe
