"""Averages of the weights through a run: stopped and resumed, evaluated, begun late, and exported."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures import trainings
from tests.fixtures.trainings import in_parts, launch, lines
from tuner.api.exports import export_hf
from tuner.checkpoint.load import read_tensors
from tuner.checkpoint.open import open_checkpoint
from tuner.errors import DataError, RecipeError
from tuner.export.source import Weights

SHORT = {"train__duration": "4 steps", "checkpoint__every": "2 steps", "checkpoint__keep": "3"}
EMA = {"ema__half_life": "2 steps"}
HELD_OUT = {"data__eval": "25%", "eval__every": "3 steps", "eval__samples": "0"}
MADE = SHORT | HELD_OUT | EMA | {"ema__evaluate": "true"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run with averages, `whole`, has ended, and the same without, `plain`."""
    directory = trainings.prepare(tmp_path_factory.mktemp("averages"), 1, layers=1)
    launch(directory, **SHORT, **HELD_OUT, name="plain")
    launch(directory, **MADE, name="whole")
    return directory


def _tensors(run: Path, prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): t for name, t in read_tensors(trainings.saved(run)) if name.startswith(prefix)}


@pytest.mark.slow
def test_a_resumed_run_has_the_same_averages_and_their_evaluation_changes_nothing(place: Path) -> None:
    plain, whole = (place / "runs" / name for name in ("plain", "whole"))
    evaluated = [line for line in lines(whole) if line["kind"] == "eval"]
    assert len(evaluated) == 3 and all("ema/loss" in line for line in evaluated)
    assert evaluated[0]["ema/loss"] == evaluated[0]["loss"], "before the first step the average is the weights"
    assert evaluated[-1]["ema/loss"] != evaluated[-1]["loss"]
    for prefix in ("model/", "optimizer/"):
        ours, others = _tensors(whole, prefix), _tensors(plain, prefix)
        assert ours.keys() == others.keys() and all(torch.equal(ours[name], others[name]) for name in ours)
    averages = _tensors(whole, "ema/")
    assert averages.keys() == _tensors(whole, "model/").keys()

    again = in_parts(place, "3 steps", **MADE)
    assert trainings.outcome(again) == trainings.outcome(whole)
    assert [line.get("ema/loss") for line in lines(again)] == [line.get("ema/loss") for line in lines(whole)]


@pytest.mark.slow
def test_it_begins_where_a_run_is_resumed_with_it_and_ends_where_without(workplace: Path) -> None:
    short = SHORT | {"checkpoint__every": "never"}
    plain = launch(workplace, **short, name="plain")
    assert launch(workplace, train__stop_after="2 steps", **short).step == 2
    run = workplace / "runs" / "r"
    begun = _tensors(run, "model/")
    stopped = launch(workplace, "must", train__stop_after="1 step", **short, **EMA)
    weights, averages = _tensors(stopped.run_dir, "model/"), _tensors(stopped.run_dir, "ema/")
    share = 1 - 0.5**0.5
    for name, average in averages.items():
        torch.testing.assert_close(average, begun[name].lerp(weights[name], share), rtol=1e-6, atol=1e-7)
    ended = launch(workplace, "must", **short)
    assert not _tensors(ended.run_dir, "ema/")
    assert trainings.outcome(ended.run_dir) == trainings.outcome(plain.run_dir)


def test_averages_are_exported_next_to_the_trained_weights(place: Path) -> None:
    run = place / "runs" / "whole"
    trained = export_hf(run, adapter="keep", dtype="fp32")
    averaged = export_hf(run, adapter="keep", dtype="fp32", weights="ema")
    mean = export_hf(run, adapter="keep", dtype="fp32", weights="mean:2")
    assert [report.path.name for report in (trained, averaged, mean)] == [
        "step-4-adapter", "step-4-adapter-ema", "step-4-adapter-mean-2",
    ]  # fmt: skip
    assert "exponential moving average, rebuilt from the run" in averaged.proof()
    held = {step: dict(read_tensors(open_checkpoint(run / "checkpoints" / f"step-{step}"))) for step in (2, 4)}

    def written(path: Path) -> dict[str, torch.Tensor]:
        tensors = load_file(path / "adapter_model.safetensors")
        return {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}

    def there(name: str, prefix: str, step: int) -> torch.Tensor:
        key = name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")
        return held[step][f"{prefix}{key}"]

    for name, tensor in written(averaged.path).items():
        assert torch.equal(tensor, there(name, "ema/", 4))
    for name, tensor in written(mean.path).items():
        both = there(name, "model/", 2).double() + there(name, "model/", 4).double()
        assert torch.equal(tensor, (both / 2).float())
        assert not torch.equal(tensor, written(trained.path)[name])
    facts = json.loads((mean.path / "tuner.json").read_text())
    assert facts["export"]["weights"] == "mean of the checkpoints of steps 2, 4"
    merged = export_hf(run, weights="ema")
    assert merged.path.name == "step-4-ema" and merged.auto_dtype == merged.dtype
    assert export_hf(run, weights="ema").already_exported

    with pytest.raises(DataError, match="mean of 9 checkpoints up to step-4 needs more than the 2 that are there"):
        export_hf(run, weights="mean:9")
    for text in ("mean", "mean:1", "raw"):
        with pytest.raises(RecipeError, match=f"--weights {text}: not one of trained, ema, mean:N"):
            Weights.parse(text)


def test_a_run_without_an_average_says_what_to_write(place: Path) -> None:
    with pytest.raises(RecipeError, match="--weights ema: it holds no average of the weights"):
        export_hf(place / "runs" / "plain", weights="ema")
