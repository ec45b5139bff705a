"""Averages of the weights through a run: stopped and resumed, evaluated, begun late, and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines
from tuner.api import export_hf
from tuner.checkpoint.load import newest, open_checkpoint, read_tensors
from tuner.errors import DataError, RecipeError
from tuner.export.averages import Weights
from tuner.run.options import LaunchOptions

SHORT = {"train__duration": "6 steps", "checkpoint__every": "2 steps", "checkpoint__keep": "3"}
EMA = {"ema__half_life": "2 steps"}
HELD_OUT = {"data__eval": "25%", "eval__every": "3 steps", "eval__samples": "0"}


def _named(tmp_path: Path, name: str) -> dict[str, str]:
    return {"name": name, "output_dir": str(tmp_path / "runs" / name)}


def _tensors(run: Path, prefix: str) -> dict[str, torch.Tensor]:
    found = newest(run / "checkpoints")
    assert found is not None
    return {name.removeprefix(prefix): t for name, t in read_tensors(found) if name.startswith(prefix)}


def test_a_resumed_run_has_the_same_averages_and_their_evaluation_changes_nothing(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 1)
    plain = launch(tmp_path, **SHORT, **HELD_OUT, **_named(tmp_path, "plain"))
    made = SHORT | HELD_OUT | EMA | {"ema__evaluate": "true"}
    whole = launch(tmp_path, **made)
    evaluated = [line for line in lines(whole.run_dir) if line["kind"] == "eval"]
    assert len(evaluated) == 3 and all("ema/loss" in line for line in evaluated)
    assert evaluated[0]["ema/loss"] == evaluated[0]["loss"], "before the first step the average is the weights"
    assert evaluated[-1]["ema/loss"] != evaluated[-1]["loss"]
    for prefix in ("model/", "optimizer/"):
        ours, others = _tensors(whole.run_dir, prefix), _tensors(plain.run_dir, prefix)
        assert ours.keys() == others.keys() and all(torch.equal(ours[name], others[name]) for name in ours)
    averages = _tensors(whole.run_dir, "ema/")
    assert averages.keys() == _tensors(whole.run_dir, "model/").keys()

    parts = made | _named(tmp_path, "parts")
    assert launch(tmp_path, train__stop_after="3 steps", **parts).step == 3
    again = launch(tmp_path, LaunchOptions("must"), **parts)
    assert trainings.outcome(again.run_dir) == trainings.outcome(whole.run_dir)
    assert [line.get("ema/loss") for line in lines(again.run_dir)] == [
        line.get("ema/loss") for line in lines(whole.run_dir)
    ]


@pytest.mark.slow
def test_it_begins_where_a_run_is_resumed_with_it_and_ends_where_without(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 1)
    short = SHORT | {"checkpoint__every": "never"}
    plain = launch(tmp_path, **short, **_named(tmp_path, "plain"))
    assert launch(tmp_path, train__stop_after="2 steps", **short).step == 2
    run = tmp_path / "runs" / "r"
    begun = _tensors(run, "model/")
    stopped = launch(tmp_path, LaunchOptions("must"), train__stop_after="1 step", **short, **EMA)
    weights, averages = _tensors(stopped.run_dir, "model/"), _tensors(stopped.run_dir, "ema/")
    share = 1 - 0.5**0.5
    for name, average in averages.items():
        torch.testing.assert_close(average, begun[name].lerp(weights[name], share), rtol=1e-6, atol=1e-7)
    ended = launch(tmp_path, LaunchOptions("must"), **short)
    assert not _tensors(ended.run_dir, "ema/")
    assert trainings.outcome(ended.run_dir) == trainings.outcome(plain.run_dir)


def test_averages_are_exported_next_to_the_trained_weights(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 1)
    run = launch(tmp_path, **SHORT, **EMA).run_dir
    trained = export_hf(run, adapter="keep", dtype="fp32")
    averaged = export_hf(run, adapter="keep", dtype="fp32", weights="ema")
    mean = export_hf(run, adapter="keep", dtype="fp32", weights="mean:2")
    assert [report.path.name for report in (trained, averaged, mean)] == [
        "step-6-adapter", "step-6-adapter-ema", "step-6-adapter-mean-2",
    ]  # fmt: skip
    assert "exponential moving average, rebuilt from the run" in averaged.proof()
    held = {step: dict(read_tensors(open_checkpoint(run / "checkpoints" / f"step-{step}"))) for step in (4, 6)}

    def written(path: Path) -> dict[str, torch.Tensor]:
        tensors = load_file(path / "adapter_model.safetensors")
        return {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}

    def there(name: str, prefix: str, step: int) -> torch.Tensor:
        key = name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")
        return held[step][f"{prefix}{key}"]

    for name, tensor in written(averaged.path).items():
        assert torch.equal(tensor, there(name, "ema/", 6))
    for name, tensor in written(mean.path).items():
        both = there(name, "model/", 4).double() + there(name, "model/", 6).double()
        assert torch.equal(tensor, (both / 2).float())
        assert not torch.equal(tensor, written(trained.path)[name])
    facts = json.loads((mean.path / "tuner.json").read_text())
    assert facts["export"]["weights"] == "mean of the checkpoints of steps 4, 6"
    merged = export_hf(run, weights="ema")
    assert merged.path.name == "step-6-ema" and merged.kl is not None
    assert export_hf(run, weights="ema").already_exported

    with pytest.raises(DataError, match="mean of 9 checkpoints up to step-6 needs more than the 3 that are there"):
        export_hf(run, weights="mean:9")
    for text in ("mean", "mean:1", "raw"):
        with pytest.raises(RecipeError, match=f"--weights {text}: not one of trained, ema, mean:N"):
            Weights.parse(text)


def test_a_run_without_an_average_says_what_to_write(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 1)
    run = launch(tmp_path, **SHORT, checkpoint__at_end="true").run_dir
    with pytest.raises(RecipeError, match="--weights ema: it holds no average of the weights"):
        export_hf(run, weights="ema")
