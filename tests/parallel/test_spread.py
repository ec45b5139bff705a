"""bf16 has one meaning however a model is spread: the bits of one process's losses, and its gradients."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.fixtures.processes import run_ranks
from tests.fixtures.spread import Spread, both, differences, whole_model
from tests.model.tiny import VOCAB
from tuner.checkpoint.load import load_into
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.model.root import CausalLM, position_losses, trained_parameters
from tuner.runtime.parts import local
from tuner.setup.probes import record_probes

CASES = [
    Spread(level="none"), Spread(level="selective"), Spread(level="full", reshard=False, vocabulary=VOCAB),
    Spread(tied=True, whole=True), Spread(family="phi", reshard=False), Spread(family="gpt2"),
    Spread(shard="none", tied=True), Spread(adapter="lora", level="selective"),
    Spread(family="llama", frozen=("embed_tokens",)), Spread(family="llama", adapter="lora", saved=("embed_tokens",)),
    Spread(family="gemma3", adapter="lora", new_ids=range(90, VOCAB)),
]
ROW = (torch.arange(3, 23), torch.arange(20), (20,), torch.arange(19), torch.arange(4, 23))
PROBES = [torch.arange(3, 12), torch.arange(20, 33)]


def tensors_of(root: CausalLM) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in trained_parameters(root).items()}


@pytest.mark.multi
@pytest.mark.parametrize("cases", [CASES[:1], pytest.param(CASES[1:], marks=pytest.mark.slow)], ids=["one", "others"])
def test_bf16_on_two_processes_is_bf16_on_one(cases: list[Spread], tmp_path: Path) -> None:
    """And of the weights of layers no rounded copy is kept for the backward pass."""

    def work(rank: int) -> None:
        found = [f"{case.name}: {line}" for case in cases for line in differences(case, rank, tmp_path)]
        assert not found, "\n".join(found)

    assert run_ranks(2, tmp_path, work) == [0, 0]


@pytest.mark.multi
@pytest.mark.parametrize("shard", ["full", "none"])
def test_logits_and_checkpoints_are_of_the_weights_as_they_are_trained(shard: str, tmp_path: Path) -> None:
    """And not of those that are gathered. A checkpoint of two processes is read by them and by one."""

    def work(rank: int) -> None:
        whole, root = both(Spread(shard=shard, reshard=False), rank, tmp_path)
        tensors = tensors_of(root)
        expected, found = (record_probes(each, PROBES, torch.device("cpu"))["logits"] for each in (whole, root))
        assert torch.equal(expected, found), (expected - found).abs().max()
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), torch.no_grad():
            losses = [each(*ROW, position_losses) for each in (whole, root)]  # rounded again
        assert torch.equal(*losses)
        save(CheckpointDir(tmp_path, "a" * 32), 3, tensors, {}, {})
        dist.barrier()
        before = {name: local(tensor).clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.zero_()
        load_into(open_checkpoint(tmp_path / "step-3"), tensors)
        assert [name for name in before if not torch.equal(local(tensors[name]), before[name])] == []

    assert run_ranks(2, tmp_path, work) == [0, 0]
    read = tensors_of(whole_model(Spread(), tmp_path / "one"))
    expected = {name: tensor.clone() for name, tensor in read.items()}
    for tensor in read.values():
        tensor.zero_()
    load_into(open_checkpoint(tmp_path / "step-3"), read)
    assert [name for name, tensor in read.items() if not torch.equal(tensor, expected[name])] == []
