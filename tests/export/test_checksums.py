"""What was handed to the system is told from anything else that the disk may give back."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.errors import DataError
from tuner.export.shards import SECTOR, Piece, piece_of, sha256_of_same, weighted_sum

DATA = bytes(range(256)) * 48 + b"tail"
assert len(DATA) > 3 * SECTOR


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=200), st.integers(0, 10**6), st.integers(0, 3))
def test_any_flipped_bit_changes_the_sum(data: bytes, place: int, sectors: int) -> None:
    data = DATA[: sectors * SECTOR] + data
    changed = bytearray(data)
    changed[place % len(data)] ^= 1 << (place % 8)
    assert weighted_sum(data) != weighted_sum(bytes(changed))


def test_sectors_in_each_others_place_change_the_sum() -> None:
    one, other, rest = b"a" * SECTOR, b"b" * SECTOR, DATA
    assert weighted_sum(one + other + rest) != weighted_sum(other + one + rest)
    assert weighted_sum(one + other) != weighted_sum(one + bytes(SECTOR) + other)
    assert weighted_sum(b"") == 0


def written(path: Path, *blocks: bytes) -> list[Piece]:
    path.write_bytes(b"".join(blocks))
    return [piece_of(block) for block in blocks]


def test_a_file_that_is_as_it_was_written_has_its_sha256(tmp_path: Path) -> None:
    path = tmp_path / "file"
    pieces = written(path, b"head", DATA, b"", DATA[:5000])
    assert sum(length for length, _ in pieces) == path.stat().st_size
    assert sha256_of_same(path, pieces) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("damage", ["longer", "shorter", "flipped", "swapped"])
def test_a_file_that_is_another_has_none(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "file"
    pieces = written(path, b"head", DATA, b"next")
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[4000] ^= 8
    if damage == "swapped":
        data[4 : 4 + SECTOR], data[4 + SECTOR : 4 + 2 * SECTOR] = b"x" * SECTOR, data[4 : 4 + SECTOR]
    path.write_bytes(data + b"x" if damage == "longer" else data[:-1] if damage == "shorter" else data)
    assert sha256_of_same(path, pieces) is None
    with pytest.raises(DataError, match="No such file"):
        sha256_of_same(tmp_path / "none", pieces)
