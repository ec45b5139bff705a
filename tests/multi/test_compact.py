"""States in 8 bits and weights rounded stochastically, whose number of processes changes, bit for bit."""

from pathlib import Path

import pytest

from tests.multi import compact_worker
from tests.multi.compact_worker import WAYS, trained
from tests.multi.launcher import run
from tests.train.synthetic import write_model
from tuner.checkpoint.load import content_sha256
from tuner.checkpoint.open import open_checkpoint
from tuner.runtime.dist import RankInfo

WORKER = str(Path(compact_worker.__file__))


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("worlds", [(1, 2, 1), (4, 2, 1, 4)])
@pytest.mark.parametrize("way", WAYS)
def test_changes_of_processes_change_no_bit(way: str, worlds: tuple[int, ...], tmp_path: Path) -> None:
    write_model(tmp_path)
    whole = trained(tmp_path, way, RankInfo(), None, range(2 * len(worlds)), tmp_path / "whole")
    source = "-"
    for number, world in enumerate(worlds):
        steps = (str(2 * number), str(2 * number + 2))
        source = run([WORKER, str(tmp_path), way, source, *steps, str(tmp_path / str(number))], world).split()[-1]
        found = open_checkpoint(Path(source))
        assert found.manifest["world_size"] == world
        codes = [entry for name, entry in found.index().items() if "_codes/" in name]
        assert any(len(entry.chunks) == world for entry in codes) or way == "chance", "codes lie in shards"
    assert content_sha256(open_checkpoint(Path(source))) == content_sha256(open_checkpoint(whole))
