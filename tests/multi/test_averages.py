"""Averages of the weights, what the prober writes, and steps left out: one process and two FSDP2 processes agree."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures import trainings
from tests.fixtures.trainings import lines
from tuner.checkpoint.load import read_tensors
from tuner.checkpoint.open import newest
from tuner.config.load import Override, load_recipe
from tuner.run.launch import launch
from tuner.run.options import LaunchOptions

COMMON = {
    "train.duration": "5 steps", "checkpoint.every": "never", "data.eval": "25%", "eval.every": "2 steps",
    "eval.samples": "0", "train.steps_to_skip": "[3]",
}
ADDED = {
    "ema.half_life": "2 steps", "ema.evaluate": "true", "prober.steps": "[1-3]",
    "prober.modules": "[embed_tokens, layers.0.mlp]",
}


def _train(directory: Path, name: str, processes: int, keys: dict[str, str]) -> Path:
    own = {"name": name, "output_dir": str(directory / "runs" / name), "parallel.processes": str(processes)}
    own |= {"train.micro_batch_size": str(4 // processes), "model.kernels": "torch"}
    overrides = [Override(key, text) for key, text in (COMMON | keys | own).items()]
    return launch(load_recipe(directory / "r.yaml", overrides, cwd=directory), LaunchOptions()).run_dir


def _tensors(run: Path) -> dict[str, torch.Tensor]:
    found = newest(run / "checkpoints")
    assert found is not None
    return dict(read_tensors(found))


@pytest.mark.slow
@pytest.mark.multi
def test_one_process_and_two_agree(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 1)
    text = (tmp_path / "r.yaml").read_text().replace("adapter: {kind: lora, r: 4, dropout: 0.2}\n", "")
    (tmp_path / "r.yaml").write_text(text)
    one, two = (_train(tmp_path, f"on{count}", count, ADDED) for count in (1, 2))
    plain = _train(tmp_path, "plain", 2, {})
    here, there, bare = _tensors(one), _tensors(two), _tensors(plain)
    assert here.keys() == there.keys() and any(name.startswith("ema/") for name in here)
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, rtol=2e-3, atol=2e-5, msg=name)
    assert all(torch.equal(there[name], tensor) for name, tensor in bare.items()), "in place and back, bit for bit"
    for a, b in zip(lines(one), lines(two), strict=True):
        assert a.get("reason") == b.get("reason")
        assert ("ema/loss" in a) == ("ema/loss" in b) == (a["kind"] == "eval")
        assert a.get("ema/loss", 0.0) == pytest.approx(b.get("ema/loss", 0.0), rel=1e-4)
    assert lines(two)[-1]["ema/loss"] != lines(two)[-1]["loss"]

    assert sorted(path.name for path in (two / "prober").iterdir()) == ["step-1", "step-2"], "the third was left out"
    of_one = load_file(one / "prober" / "step-1" / "rank-0.safetensors")
    first, second = (load_file(two / "prober" / "step-1" / f"rank-{rank}.safetensors") for rank in (0, 1))
    assert first.keys() == of_one.keys() and not any(name.startswith("gradients/") for name in second)
    for name in (name for name in of_one if name.startswith("gradients/")):
        torch.testing.assert_close(first[name], of_one[name], rtol=1e-4, atol=1e-6, msg=name)
