"""Row-wise embeddings on two processes take the steps of one, and are resumed on either from the other's checkpoint."""

from pathlib import Path

import pytest
import torch

from tests.multi import rows_worker
from tests.multi.launcher import run
from tests.train.synthetic import write_model
from tuner.checkpoint.load import read_tensors
from tuner.checkpoint.open import CheckpointInfo, open_checkpoint
from tuner.runtime.dist import RankInfo

WORKER = str(Path(rows_worker.__file__))
ALONE = RankInfo()


def assert_near(found: CheckpointInfo, wanted: CheckpointInfo) -> None:
    one, other = dict(read_tensors(wanted)), dict(read_tensors(found))
    assert one.keys() == other.keys()
    counts = f"optimizer/row_updates/{rows_worker.NAME}"
    assert torch.equal(other[counts], one[counts]) and len(one[counts].unique()) > 2
    for name, tensor in one.items():
        difference = torch.linalg.vector_norm(other[name] - tensor) / torch.linalg.vector_norm(tensor)
        assert difference < 1e-5, (name, difference)


@pytest.mark.multi
@pytest.mark.parametrize("shard", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_one_then_two_then_one_process_are_one(shard: str, tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    whole = rows_worker.trained(tmp_path, shard, ALONE, None, range(6), tmp_path / "whole")
    first = rows_worker.trained(tmp_path, shard, ALONE, None, range(2), tmp_path / "first")
    words = [WORKER, str(tmp_path), shard, str(first), "2", "4", str(tmp_path / "second")]
    second = open_checkpoint(Path(run(words, 2).split()[-1]))
    last = rows_worker.trained(tmp_path, shard, ALONE, second.path, range(4, 6), tmp_path / "last")
    assert second.manifest["world_size"] == 2
    counts = second.index()[f"optimizer/row_updates/{rows_worker.NAME}"]
    assert counts.shape == (97,) and len(counts.chunks) == (2 if shard == "full" else 1)
    assert_near(open_checkpoint(last), open_checkpoint(whole))
