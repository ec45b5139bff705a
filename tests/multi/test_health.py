"""Planted: a wrong bit in one of two replicas, a slow rank of two, a layer that diverges. Each is named."""

import json
import re
from pathlib import Path

import pytest

from tests.fixtures import trainings
from tests.multi.launcher import start
from tuner.checkpoint.manifest import step_dirs

PLANTED = """
import sys, time
import torch
import tuner.train.loop as loop
real = loop.optimizer_step
def planted(state, index, *rest):
    scalars = real(state, index, *rest)
    rank = state.step_config.mesh.rank
    FAULT
    return scalars
loop.optimizer_step = planted
from tuner.cli.main import main
main(sys.argv[1:])
"""
WRONG_BIT = """
    if index == 5 and rank == 1:
        weight = state.parameters["model.layers.1.mlp.up_proj.lora_A.default.weight"]
        weight.data.view(-1).view(torch.int32)[35] ^= 1 << 3
"""
SLOW_AND_DIVERGING = """
    layers = state.root.model.get_decoder().layers
    if index == 0 and rank == 1:
        layers[0].mlp.register_forward_pre_hook(lambda *_: time.sleep(0.5))
    if index >= 6:
        for name, parameter in state.parameters.items():
            if "layers.2." in name:
                parameter.data.mul_(2.0)
"""


def prepare_whole(directory: Path, layers: int) -> None:
    """A training of all weights, which are sharded by default."""
    trainings.prepare(directory, 2, layers=layers)
    recipe = directory / "r.yaml"
    recipe.write_text("".join(line for line in recipe.read_text().splitlines(True) if "adapter:" not in line))


@pytest.mark.multi
def test_a_wrong_bit_in_one_replica_ends_the_run_and_replaces_no_checkpoint(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 2)
    words = ["train", "r.yaml", "--json", "--parallel.shard", "none", "--health.before_saves", "true"]
    processes = start(["-c", PLANTED.replace("FAULT", WRONG_BIT.strip()), *words], 2, cwd=tmp_path)
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [6, 6], [error for _, error in outputs]
    said = json.loads(outputs[0][0])["error"]["message"]
    name = "model/model.layers.1.mlp.up_proj.lora_A.default.weight"
    assert said.startswith(f"health check after step 8: rank 1 has another {name} than rank 0: first at [1, 3], ")
    assert "either may be the damaged one" in said and said.endswith("all was well after step 4")
    assert "Traceback" not in outputs[0][1] + outputs[1][1]
    assert [step for step, _ in step_dirs(tmp_path / "runs" / "r" / "checkpoints")] == [4]


@pytest.mark.multi
@pytest.mark.slow
def test_a_slow_rank_and_a_diverging_layer_are_named_under_fsdp2(tmp_path: Path) -> None:
    prepare_whole(tmp_path, layers=4)
    words = ["train", "r.yaml", "--train.duration", "9 steps", "--logging.level", "info"]
    words += ["--health.times_every", "1 step", "--logging.internals", "1 step", "--parallel.shard", "full"]
    fault = SLOW_AND_DIVERGING.strip()
    processes = start(["-c", PLANTED.replace("FAULT", fault), *words], 2, cwd=tmp_path)
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], [error for _, error in outputs]
    said = outputs[0][1]
    assert re.search(r"step \d: rank 1 is slow: ", said), said
    assert "layers.2 diverges: its " in said
    assert not [layer for layer in (0, 1, 3) if f"layers.{layer} diverges" in said], said
    lines = trainings.lines(tmp_path / "runs" / "r")
    assert [line["slowest_rank"] for line in lines if line["kind"] == "times"][1:] == [1] * 8
    assert [line["step"] for line in lines if line["kind"] == "internals"] == list(range(1, 10))


@pytest.mark.multi
@pytest.mark.slow
def test_two_processes_train_the_same_bits_with_all_of_it(tmp_path: Path) -> None:
    prepare_whole(tmp_path, layers=2)
    everything = ["--health.every", "3 steps", "--health.before_saves", "true", "--health.times_every", "2 steps"]
    everything += ["--logging.internals", "2 steps"]
    found = []
    for name, flags in (("plain", []), ("watched", everything)):
        words = ["-m", "tuner", "train", "r.yaml", "--parallel.shard", "full"]
        processes = start([*words, "--train.duration", "6 steps", "--name", name, *flags], 2, cwd=tmp_path)
        outputs = [process.communicate(timeout=300) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], [error for _, error in outputs]
        found.append(trainings.outcome(tmp_path / "runs" / name))
    assert found[0]["sha256"] == found[1]["sha256"]
    watched = [line for line in found[1]["log"] if line["kind"] == "train"]
    assert found[0]["log"] == watched
