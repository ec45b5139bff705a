"""Row-wise embeddings on two processes take the steps of one, and are resumed on either from the other's checkpoint."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.multi.worlds import trained, trained_by
from tests.train.synthetic import assembly_for, recipe_for, write_model
from tuner.checkpoint.load import read_tensors
from tuner.checkpoint.open import CheckpointInfo, open_checkpoint
from tuner.runtime.dist import RankInfo
from tuner.setup.build import Assembly
from tuner.train.step import optimizer_step

ROWS = [5, 20, 3, 15, 20, 7, 9, 1]
NAME = "model.embed_tokens.weight"


def take(assembly: Assembly, step: int) -> None:
    optimizer_step(assembly.train_state, step, assembly.batches.step(step), 1.0 if step % 2 else 0.5).read()
    assert assembly.train_state.parameters[NAME].grad is None


def assert_near(found: CheckpointInfo, wanted: CheckpointInfo) -> None:
    one, other = dict(read_tensors(wanted)), dict(read_tensors(found))
    assert one.keys() == other.keys()
    counts = f"optimizer/row_updates/{NAME}"
    assert torch.equal(other[counts], one[counts]) and len(one[counts].unique()) > 2
    for name, tensor in one.items():
        difference = torch.linalg.vector_norm(other[name] - tensor) / torch.linalg.vector_norm(tensor)
        assert difference < 1e-5, (name, difference)


@pytest.mark.multi
@pytest.mark.parametrize("shard", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_one_then_two_then_one_process_are_one(shard: str, tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    recipe = recipe_for(
        tmp_path,
        train={"global_batch_size": 4, "micro_batch_size": 1, "max_grad_norm": 0.5},
        optimizer={"rows": ["embed_tokens"], "weight_decay": 0.1},
        parallel={"shard": shard},
    )

    def make(rank_info: RankInfo) -> Assembly:
        assembly = assembly_for(recipe, ROWS, rank_info)
        embedding = assembly.train_state.parameters[NAME]
        assert isinstance(embedding, DTensor) == (rank_info.world_size > 1 and shard == "full")
        return assembly

    whole = trained(make(RankInfo()), take, None, range(6), tmp_path / "whole")
    first = trained(make(RankInfo()), take, None, range(2), tmp_path / "first")
    second = open_checkpoint(trained_by(2, make, take, first, range(2, 4), tmp_path / "second"))
    last = trained(make(RankInfo()), take, second.path, range(4, 6), tmp_path / "last")
    assert second.manifest["world_size"] == 2
    counts = second.index()[f"optimizer/row_updates/{NAME}"]
    assert counts.shape == (97,) and len(counts.chunks) == (2 if shard == "full" else 1)
    assert_near(open_checkpoint(last), open_checkpoint(whole))
