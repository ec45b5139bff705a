"""Tensors read in slices: any cut of them, in any number of blocks, gives the whole.

What was handed to the system is told from anything else that the disk may give back.
"""

import hashlib
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.bits import flip_bit
from tuner.checkpoint.index import TensorEntry
from tuner.checkpoint.shard_hash import Chunk
from tuner.checkpoint.storage import DTYPE_NAMES
from tuner.errors import DataError
from tuner.export import tensors
from tuner.export.tensors import OpenFiles, Output, TensorSource, Written, checkpoint_tensor, held_tensor
from tuner.export.weights import Frozen
from tuner.model.low_rank import LowRank
from tuner.runtime.files import HASH_BLOCK_BYTES


def cut(total: int, places: list[int]) -> list[tuple[int, int]]:
    ends = sorted({0, total, *(place % (total + 1) for place in places)})
    return list(zip(ends, ends[1:], strict=False))


def by_blocks(source: TensorSource, places: list[int]) -> torch.Tensor:
    parts = [source.read(a, b) for a, b in cut(source.length, places)]
    return torch.cat(parts) if source.shape else parts[0]


def write_chunks(directory: Path, tensor: torch.Tensor, rows: list[int], columns: list[int]) -> TensorEntry:
    """The tensor as a grid of chunks in two files, in an order of no meaning."""
    chunks: list[Chunk] = []
    held = {"a": b"header", "b": b""}
    for number, (top, bottom) in enumerate(reversed(cut(tensor.shape[0], rows))):
        for left, right in cut(tensor.shape[1], columns):
            data = tensor[top:bottom, left:right].contiguous().numpy().tobytes()
            name = "ab"[number % 2]
            place = ((top, left), (bottom - top, right - left))
            chunks.append(Chunk(name, len(held[name]), len(data), *place, hashlib.sha256(data).hexdigest()))
            held[name] += data
    for name, data in held.items():
        (directory / name).write_bytes(data)
    return TensorEntry(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tuple(chunks))


CUTS = st.lists(st.integers(0, 100), max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 7), CUTS, CUTS, CUTS)
def test_any_sharding_read_in_any_blocks_is_the_tensor(
    tmp_path_factory: pytest.TempPathFactory, height: int, width: int, rows: list[int], columns: list[int],
    blocks: list[int],
) -> None:  # fmt: skip
    directory = tmp_path_factory.mktemp("chunks")
    tensor = torch.arange(height * width, dtype=torch.float32).reshape(height, width)
    entry = write_chunks(directory, tensor, rows, columns)
    with OpenFiles() as files:
        assert torch.equal(by_blocks(checkpoint_tensor(files, directory, "w", entry), blocks), tensor)


def test_a_damaged_chunk_is_named_when_its_end_is_read(tmp_path: Path) -> None:
    tensor = torch.arange(20, dtype=torch.float32).reshape(4, 5)
    entry = write_chunks(tmp_path, tensor, [2], [])
    flip_bit(tmp_path / "b", 3)
    with OpenFiles() as files:
        checkpoint_tensor(files, tmp_path, "model/w", entry).read(0, 1)
    with pytest.raises(DataError, match=r"/b: the SHA-256 of model/w"), OpenFiles() as files:
        checkpoint_tensor(files, tmp_path, "model/w", entry).read(0, 3)


def test_a_check_that_fails_is_told_by_a_later_one_and_other_errors_come_first(tmp_path: Path) -> None:
    def fail() -> None:
        raise DataError("damaged")

    with pytest.raises(DataError, match="damaged"), OpenFiles() as files:
        files.check_meanwhile(fail)
        for _ in range(tensors.CHECKS_AHEAD):
            files.check_meanwhile(lambda: None)
        raise AssertionError("not told")
    with pytest.raises(KeyError), OpenFiles() as files:
        files.check_meanwhile(fail)
        raise KeyError


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_length", [False, True])
@pytest.mark.parametrize("blocks", [[], [1, 2, 3], [4]])
def test_merged_by_blocks_is_merged_at_once(transposed: bool, with_length: bool, blocks: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, a, b, length = (torch.randn(s, generator=generator) for s in ((7, 5), (2, 5), (7, 2), (7,)))
    expected = weight + (b @ a) * 1.5
    if with_length:
        expected = expected * (length / expected.norm(dim=1))[:, None]
    base = weight.T.contiguous() if transposed else weight
    low_rank = LowRank(a, b, 1.5, length if with_length else None, transposed)
    source = tensors.merged_tensor(held_tensor(base), lambda: low_rank)
    torch.testing.assert_close(by_blocks(source, blocks), expected.T if transposed else expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(4, 200))
def test_shards_hold_every_tensor_once_in_order_and_keep_their_size(sizes: list[int], limit: int) -> None:
    outputs = [Output(f"t{i}", torch.float32, held_tensor(torch.zeros(size))) for i, size in enumerate(sizes)]
    shards = tensors.plan_shards(outputs, limit)
    assert [output for group in shards.values() for output in group] == outputs
    for group in shards.values():
        assert len(group) == 1 or sum(output.nbytes for output in group) <= limit


def test_a_scalar_of_the_base_has_no_rows_that_could_have_grown() -> None:
    files = {"beta": held_tensor(torch.tensor(0.5))}
    held = SimpleNamespace(_files=files, _new_ids=range(0), _dtype=torch.float32, _base=None)
    assert Frozen._part(held, "beta", "beta", ()).whole().item() == 0.5  # type: ignore[arg-type]


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
    assert tensors.sha256_of_same(tmp_path / "file", whole) is None


@pytest.mark.parametrize("size", [0, 5, HASH_BLOCK_BYTES, 2 * HASH_BLOCK_BYTES + 7])
def test_a_file_that_is_as_it_was_written_has_its_sha256(tmp_path: Path, size: int) -> None:
    data = (DATA * (size // len(DATA) + 1))[:size]
    whole = written(tmp_path / "file", data)
    assert tensors.sha256_of_same(tmp_path / "file", whole) == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("damage", ["longer", "shorter", "swapped", "missing", "doubled", "zeroed"])
def test_a_file_that_is_another_has_none(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "file"
    one, other, rest = b"a" * SECTOR, b"b" * SECTOR, DATA
    whole = written(path, one + other + rest)
    path.write_bytes({
        "longer": one + other + rest + b"x", "shorter": (one + other + rest)[:-1], "swapped": other + one + rest,
        "missing": one + rest, "doubled": one + one + rest, "zeroed": one + bytes(SECTOR) + rest,
    }[damage])  # fmt: skip
    assert tensors.sha256_of_same(path, whole) is None
    with pytest.raises(DataError, match="No such file"):
        tensors.sha256_of_same(tmp_path / "none", whole)
