"""A recipe that names a run, a checkpoint or an adapter as its model is answered with the way to train further."""

from pathlib import Path

import pytest

from tests.rundir import made
from tuner.cli.command import load_for_command
from tuner.config.load import Override
from tuner.errors import RecipeError


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
