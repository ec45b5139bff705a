"""What a machine's processes take of its memory for the optimizer's states."""

from pathlib import Path

import pytest

from tests.fixtures.tables import cases
from tests.train.synthetic import MAX_LENGTH, recipe_for, write_model
from tuner.runtime.dist import RankInfo
from tuner.setup.host_states import host_bytes
from tuner.setup.resolve import resolve
from tuner.train.host_adamw import BUCKET, buffer_bytes

BILLION = 10**9


@pytest.mark.parametrize(
    ("shard", "tensor", "world", "local", "copies"), cases(__file__, "shards_are_the_machines_own")
)
def test_shards_are_the_machines_own(
    shard: str, tensor: int, world: int, local: int, copies: float, tmp_path: Path
) -> None:
    write_model(tmp_path)
    recipe = recipe_for(tmp_path, optimizer={"offload": "host"}, parallel={"shard": shard, "tensor": tensor})
    ranks = RankInfo(0, world, 0, local)
    found = host_bytes(resolve(recipe, MAX_LENGTH, ranks), BILLION, ranks)
    assert found == copies * 8 * BILLION + local * 3 * 2 * 4 * BUCKET


def test_buffers_are_no_larger_than_what_passes_through_them() -> None:
    assert buffer_bytes(1000) < 8 * 1100
    assert buffer_bytes(100 * BUCKET) == 24 * BUCKET == 192 << 20
