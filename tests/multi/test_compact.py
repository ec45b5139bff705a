"""States in 8 bits and weights rounded stochastically, resharded from one process to two and back, bit for bit."""

from pathlib import Path

import pytest

from tests.multi import compact_worker
from tests.multi.launcher import run
from tests.train.synthetic import write_model
from tuner.checkpoint.load import content_sha256
from tuner.checkpoint.open import open_checkpoint
from tuner.runtime.dist import RankInfo

WORKER = str(Path(compact_worker.__file__))


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("way", ["both"])
def test_one_then_two_then_one_process_are_one(way: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    alone = RankInfo()
    whole = compact_worker.trained(tmp_path, way, alone, None, range(6), tmp_path / "whole")
    first = compact_worker.trained(tmp_path, way, alone, None, range(2), tmp_path / "first")
    words = [WORKER, str(tmp_path), way, str(first), "2", "4", str(tmp_path / "second")]
    second = Path(run(words, 2).split()[-1])
    last = compact_worker.trained(tmp_path, way, alone, second, range(4, 6), tmp_path / "last")
    assert open_checkpoint(second).manifest["world_size"] == 2
    index = open_checkpoint(last).index()
    assert any("_codes/" in name for name in index) and any("_scales/" in name for name in index)
    of_two = open_checkpoint(second).index().items()
    assert any("_codes/" in name and len(entry.chunks) > 1 for name, entry in of_two), "codes lie in shards"
    assert content_sha256(open_checkpoint(last)) == content_sha256(open_checkpoint(whole))
