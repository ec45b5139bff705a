"""Shards in the host's memory: the bits of a run without, brought to a stand-in device and back."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures.processes import run_ranks
from tests.train.synthetic import MAX_LENGTH, assembly_for, recipe_for, write_model
from tuner.parallel.fsdp import is_whole_along
from tuner.profile.devices import find_device
from tuner.profile.predict import Target, predict
from tuner.profile.prediction import Prediction
from tuner.runtime.dist import RankInfo
from tuner.runtime.parts import local
from tuner.runtime.torch_private import moved_shards
from tuner.setup.build import Assembly, run_tensors
from tuner.train.step import optimizer_step

STEPS, TRAINED = 3, [20, 7, 25, 2, 9, 24, 3, 11]
SECTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"train": {"precision": "bf16", "gradient_checkpointing": "full"}, "ema": {"decay": 0.9}},
    "sgd": {"optimizer": {"kind": "sgd", "momentum": 0.9}, "parallel": {"reshard_after_forward": False}},
    "lora": {"adapter": {"kind": "lora", "r": 4}, "train": {"precision": "bf16"}},
}


class StandIn:
    """A device with memory of its own, that counts the bytes which come to it and go back."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()

    def up(self, shard: torch.Tensor) -> torch.Tensor:
        self.bytes["up"] += shard.nbytes
        return shard.clone()

    def down(self, gradient: torch.Tensor) -> torch.Tensor:
        self.bytes["down"] += gradient.nbytes * (not gradient.is_meta)  # which a model has before its values
        return gradient.clone()


def trained(directory: Path, rank_info: RankInfo, offload: str, sections: dict[str, Any]) -> tuple[Assembly, list[Any]]:
    """What some steps make of a model; its micro-batches are half of what each process has of a step."""
    micro = 4 // rank_info.world_size
    changes = {**sections, "train": {"global_batch_size": 8, "micro_batch_size": micro, **sections.get("train", {})}}
    changes["parallel"] = {**sections.get("parallel", {}), "offload": offload}
    assembly = assembly_for(recipe_for(directory, **changes), TRAINED * STEPS, rank_info)
    steps = [optimizer_step(assembly.train_state, n, assembly.batches.step(n), 1.0).read() for n in range(STEPS)]
    return assembly, [(step.loss, step.grad_norm) for step in steps]


def same_bits(one: Assembly, other: Assembly) -> None:
    ours, theirs = (run_tensors(each.train_state) for each in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():  # each process's own rows, in the order in which it has them
        whole, part = local(tensor).reshape(-1), local(theirs[name]).reshape(-1)
        assert torch.equal(whole, part), name


@pytest.mark.slow("1-1-bf16")
@pytest.mark.parametrize(("world", "local_size", "kind"), [(1, 1, name) for name in SECTIONS] + [(4, 2, "bf16")])
def test_the_bits_are_those_without_and_weights_come_twice_a_pass(
    world: int, local_size: int, kind: str, tmp_path: Path
) -> None:
    write_model(tmp_path)

    def work(rank: int) -> None:
        torch.use_deterministic_algorithms(True)
        rank_info, sections, device = RankInfo(rank, world, rank % local_size, local_size), SECTIONS[kind], StandIn()
        plain, expected = trained(tmp_path, rank_info, "none", sections)
        with moved_shards(device.up, device.down):
            assert not device.bytes
            hosted, found = trained(tmp_path, rank_info, "host", sections)
        assert found == expected
        same_bits(hosted, plain)
        blocks, parameters = hosted.train_state.root.model.model.layers, list(hosted.train_state.root.parameters())
        in_layers = {id(parameter) for parameter in blocks.parameters()}
        shards = [parameter for parameter in parameters if not is_whole_along(parameter)]
        # Rows are filled up to equal shards. The root, with the tied output layer, stays gathered to its backward pass.
        bytes_of = {id(one): -(-one.shape[0] // local_size) * one[0].numel() * one.itemsize for one in shards}
        again = set(bytes_of) & in_layers if kind != "sgd" else set()
        passes = 2 * STEPS  # of micro-batches
        assert device.bytes["up"] == passes * (sum(bytes_of.values()) + sum(bytes_of[one] for one in again))
        # The gradients of a second micro-batch are added to these where they lie, which no function of FSDP2's does.
        assert device.bytes["down"] == STEPS * sum(local(one).nbytes for one in shards if one.requires_grad) > 0

    assert run_ranks(world, tmp_path, work) == [0] * world


def test_a_prediction_has_them_on_the_host_and_counts_their_copies(tmp_path: Path) -> None:
    write_model(tmp_path)
    device = find_device("h100-80g")

    def on(offload: str) -> Prediction:
        sections = {"train": {"device": "auto", "micro_batch_size": 1}, "parallel": {"offload": offload}}
        recipe = recipe_for(tmp_path, data={"max_length": MAX_LENGTH}, **sections)
        return predict(recipe, Target(device, RankInfo(), 80 << 30))

    plain, hosted = on("none"), on("host")
    before, after = (one.memory.peak_of("backward") for one in (plain, hosted))
    assert before is not None and after is not None
    weights = before.parts["parameters"]  # trained in float32
    assert after.parts["parameters"] + after.parts["optimizer"] + after.parts["gradients"] < 0.1 * weights
    assert before.parts["parameters"] + before.parts["optimizer"] >= 3 * weights
    kept = hosted.memory.host
    assert kept["parameters"] == kept["gradients"] == pytest.approx(weights, rel=0.01)
    assert kept["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    twice = 2 * 16 * weights / device.host_link  # in each of 16 micro-batches
    assert hosted.time.busy_s >= twice > plain.time.busy_s
