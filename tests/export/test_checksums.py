"""What was handed to the system is told from anything else that the disk may give back."""

import hashlib
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.errors import DataError
from tuner.export.tensors import Written, sha256_of_same
from tuner.runtime.files import HASH_BLOCK_BYTES

SECTOR = 4096
DATA = bytes(range(256)) * 48 + b"tail"


def written(path: Path, data: bytes) -> Written:
    path.write_bytes(data)
    return Written(len(data), zlib.crc32(data))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=200), st.integers(0, 10**6), st.integers(0, 3))
def test_any_flipped_bit_is_seen(tmp_path: Path, data: bytes, place: int, sectors: int) -> None:
    data = DATA[: sectors * SECTOR] + data
    whole = written(tmp_path / "file", data)
    changed = bytearray(data)
    changed[place % len(data)] ^= 1 << (place % 8)
    (tmp_path / "file").write_bytes(changed)
    assert sha256_of_same(tmp_path / "file", whole) is None


@pytest.mark.parametrize("size", [0, 5, HASH_BLOCK_BYTES, 2 * HASH_BLOCK_BYTES + 7])
def test_a_file_that_is_as_it_was_written_has_its_sha256(tmp_path: Path, size: int) -> None:
    data = (DATA * (size // len(DATA) + 1))[:size]
    whole = written(tmp_path / "file", data)
    assert sha256_of_same(tmp_path / "file", whole) == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("damage", ["longer", "shorter", "swapped", "missing", "doubled", "zeroed"])
def test_a_file_that_is_another_has_none(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "file"
    one, other, rest = b"a" * SECTOR, b"b" * SECTOR, DATA
    whole = written(path, one + other + rest)
    path.write_bytes({
        "longer": one + other + rest + b"x", "shorter": (one + other + rest)[:-1], "swapped": other + one + rest,
        "missing": one + rest, "doubled": one + one + rest, "zeroed": one + bytes(SECTOR) + rest,
    }[damage])  # fmt: skip
    assert sha256_of_same(path, whole) is None
    with pytest.raises(DataError, match="No such file"):
        sha256_of_same(tmp_path / "none", whole)
