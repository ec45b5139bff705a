"""Whole launches with `model.init_from`: what the run directory says, and what resuming and exporting need of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.trainings import in_full, launch, outcome, saved
from tuner.api.exports import export_hf
from tuner.checkpoint.load import read_tensors
from tuner.cli.runs import verify
from tuner.errors import DataError, RecipeError
from tuner.run.main import train
from tuner.run.options import LaunchOptions, RunResult
from tuner.run.status import resume_source
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo

FLAGS = {"train__duration": "2 steps", "checkpoint__every": "never"}


def second_model(workplace: Path) -> Path:
    """A model of the same kind with other weights."""
    other = shutil.copytree(workplace / "model", workplace / "other")
    tensors = load_file(other / "model.safetensors")
    moved = {name: 1.25 * tensor for name, tensor in tensors.items()}
    save_file(moved, other / "model.safetensors", {"format": "pt"})
    return other


def resumed(run: Path) -> RunResult:
    return train(resume_source(run), LaunchOptions(resume="must"), RankInfo(), Console(main=False))


def noted(run: Path) -> dict[str, Any]:
    facts: dict[str, Any] = saved(run).meta["init_from"]
    return facts


def test_a_run_begins_from_another_and_resumes_without_it(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []
    in_full(workplace)
    monkeypatch.setattr(Console, "say", lambda self, label, text, level="info": said.append((label, text)))
    first = launch(workplace, name="first", **FLAGS)
    flags = {**FLAGS, "model__init_from": '["runs/first"]', "seed": "7"}
    whole = launch(workplace, name="whole", **flags)
    (line,) = [text for label, text in said if label == "init_from"]
    assert line.startswith(f"checkpoint {first.run_dir}/checkpoints/step-2, step 2: 11 of 11 weights")
    report = (whole.run_dir / "init_from.txt").read_text()
    (entry,) = noted(whole.run_dir)["entries"]
    assert (entry["path"], entry["step"]) == (str(first.run_dir / "checkpoints" / "step-2"), 2)
    assert entry["sha256"] in report and "model.layers.0.mlp.up_proj.weight [48, 32] f32" in report
    said.clear()
    verified: Any = verify.__wrapped__([str(whole.run_dir)])  # type: ignore[attr-defined]  # what the command prints
    line = f"whole was given checkpoint {entry['path']}, step 2: 11 tensors, sha256 {entry['sha256'][:16]}"
    assert verified.artifacts["began_with"] == [line]
    stopped = launch(workplace, name="stopped", **flags, train__stop_after="1 step")
    shutil.rmtree(first.run_dir)
    again = resumed(stopped.run_dir)
    assert again.status == "finished" and outcome(again.run_dir) == outcome(whole.run_dir)
    assert noted(again.run_dir) == noted(whole.run_dir)
    assert sum(label == "init_from" for label, _ in said) == 1  # when the run began, and not when it was resumed


@pytest.mark.slow
def test_the_first_step_is_that_of_the_weights_given(workplace: Path) -> None:
    in_full(workplace)
    other = second_model(workplace)
    given = launch(workplace, name="given", **FLAGS, model__init_from=json.dumps([str(other)]))
    named = launch(workplace, name="named", **FLAGS, model__name_or_path=str(other))
    assert outcome(given.run_dir) == outcome(named.run_dir)


@pytest.mark.slow
def test_frozen_weights_are_given_again_and_must_be_the_same(workplace: Path) -> None:
    other = second_model(workplace)
    flags = {**FLAGS, "model__init_from": json.dumps([{"path": str(other), "load": ["self_attn"]}])}
    whole = launch(workplace, name="whole", **flags)
    assert noted(whole.run_dir)["frozen"] == 4
    stopped = launch(workplace, name="stopped", **flags, train__stop_after="1 step")
    again = resumed(stopped.run_dir)
    assert outcome(again.run_dir) == outcome(whole.run_dir)
    exported = load_file(export_hf(whole.run_dir, dtype="fp32").path / "model.safetensors")  # compared with its probes
    base, given = (load_file(path / "model.safetensors") for path in (workplace / "model", other))
    name = "model.layers.0.self_attn.q_proj.weight"
    rank = torch.linalg.matrix_rank
    assert rank(exported[name] - given[name]) == 4 < rank(exported[name] - base[name])
    with pytest.raises(RecipeError, match=r"init_from gave the base other weights than its files hold"):
        export_hf(whole.run_dir, adapter="keep")
    stopped = launch(workplace, name="third", **flags, train__stop_after="1 step")
    tensors = load_file(other / "model.safetensors")
    save_file({**tensors, name: tensors[name] + 1}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="the base model changed since"):
        resumed(stopped.run_dir)


@pytest.mark.slow
def test_an_adapter_goes_on_in_another_run(workplace: Path) -> None:
    first = launch(workplace, name="first", **FLAGS)
    kept = export_hf(first.run_dir, adapter="keep", dtype="fp32").path
    trained = dict(read_tensors(saved(first.run_dir)))
    for source in (first.run_dir, kept):
        flags = {**FLAGS, "model__init_from": json.dumps([str(source)]), "optimizer__lr": "1e-30"}
        second = launch(workplace, name=f"after-{source.name}", **flags)
        found = saved(second.run_dir)
        assert found.meta["init_from"]["frozen"] == 0
        for name, tensor in read_tensors(found):
            if name.startswith("model/"):
                torch.testing.assert_close(tensor, trained[name], rtol=0, atol=1e-20)


def test_wrong_names_are_refused_before_anything_is_written(workplace: Path) -> None:
    in_full(workplace)
    other = second_model(workplace)
    entry = {"path": str(other), "rename": {"model.norm.weight": "model.nrom.weight"}}
    for options in (LaunchOptions(), LaunchOptions(dry_run=True)):
        with pytest.raises(RecipeError, match=r"model\.nrom\.weight .* has no place") as caught:
            launch(workplace, options, **FLAGS, model__init_from=json.dumps([entry]))
        (problem,) = caught.value.problems
        assert problem.key == "model.init_from.0" and "nearest here are model.norm.weight" in problem.message
    assert not (workplace / "runs").exists()


@pytest.mark.slow
def test_a_run_that_is_resumed_keeps_its_sources(workplace: Path) -> None:
    other = second_model(workplace)
    launch(workplace, **FLAGS, train__stop_after="1 step")
    with pytest.raises(RecipeError, match=r"model\.init_from \[\] -> "):
        launch(workplace, "auto", **FLAGS, model__init_from=json.dumps([str(other)]))
