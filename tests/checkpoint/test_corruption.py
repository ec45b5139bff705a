"""Whatever happens to a file of a checkpoint is noticed, named, and stepped over."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.states import full_state
from tests.fixtures.bits import flip_bit
from tuner.checkpoint.index import read_index
from tuner.checkpoint.manifest import sealed
from tuner.checkpoint.open import newest, open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.errors import DataError

FILES = ("rank-0000-of-0001.safetensors", "index.json", "state.json", "probe.safetensors", "manifest.json")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    run = CheckpointDir(tmp_path / "checkpoints", "r")
    for step in (1, 2):
        save(run, step, full_state(step), {"step": step}, {"name": "x"}, {"logits": torch.ones(3)})
    return run.path


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "remove", "link", "directory"])
def test_damage_is_named_and_the_previous_one_used(checkpoints: Path, name: str, damage: str) -> None:
    path = checkpoints / "step-2" / name
    data = path.read_bytes()
    path.unlink()
    if damage == "flip":
        path.write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
    elif damage == "truncate":
        path.write_bytes(data[:-2])
    elif damage == "extend":
        path.write_bytes(data + b"}")
    elif damage == "link":
        path.symlink_to(checkpoints / "step-1" / name)
    elif damage == "directory":
        path.mkdir()
    with pytest.raises(DataError, match=name):
        open_checkpoint(checkpoints / "step-2")
    warnings: list[str] = []
    info = newest(checkpoints, warnings.append)
    assert info is not None
    assert info.step == 1
    assert len(warnings) == 1
    assert name in warnings[0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(checkpoints: Path, name: str, place: float, bit: int) -> None:
    path = checkpoints / "step-2" / name
    data = path.read_bytes()
    flip_bit(path, int(place * len(data)), bit)
    try:
        with pytest.raises(DataError, match=name):
            open_checkpoint(checkpoints / "step-2")
    finally:
        path.write_bytes(data)


def test_mixed_saves_are_noticed(checkpoints: Path) -> None:
    name = "rank-0000-of-0001.safetensors"
    (checkpoints / "step-2" / name).write_bytes((checkpoints / "step-1" / name).read_bytes())
    with pytest.raises(DataError, match=name):
        open_checkpoint(checkpoints / "step-2")


@pytest.mark.parametrize("name", ["../step-1/state.json", "/etc/passwd", "a/../../x", "", "a\0b", "./state.json"])
def test_names_that_leave_the_directory_are_refused(checkpoints: Path, name: str) -> None:
    path = checkpoints / "step-2" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = {"size": 1, "sha256": "0"}
    path.write_text(json.dumps(sealed(manifest)))
    with pytest.raises(DataError, match="unsafe file name"):
        open_checkpoint(checkpoints / "step-2")


def _edit(field: str, value: object) -> Callable[[dict], None]:
    return lambda entry: entry["chunks"][0].update({field: value})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_edit("file", "../../secret"), "unsafe file name"),
        (_edit("file", "other.safetensors"), "not a file of this checkpoint"),
        (_edit("start", 10**9), "beyond the end"),
        (_edit("start", -8), "malformed"),
        (_edit("start", True), "malformed"),
        (_edit("length", 4), "byte length"),
        (_edit("offsets", [1, 0]), "outside the tensor"),
        (_edit("sizes", [7]), "dimensions"),
        (lambda entry: entry.update(chunks=[]), "do not fill"),
        (lambda entry: entry.update(dtype="Q4"), "no type that can be saved"),
        (lambda entry: entry.update(shape="75"), "malformed"),
        (lambda entry: entry.clear(), "malformed"),
    ],
)
def test_a_wrong_index_is_refused(checkpoints: Path, edit: Callable[[dict], None], words: str) -> None:
    directory = checkpoints / "step-2"
    document = json.loads((directory / "index.json").read_text())
    edit(document["tensors"]["model/weight"])
    (directory / "index.json").write_text(json.dumps(document))
    sizes = {name: (directory / name).stat().st_size for name in FILES}
    with pytest.raises(DataError, match=words):
        read_index(directory, sizes)


@pytest.mark.parametrize("offsets", [([0, 0], [0, 0]), ([0, 0], [1, 0])])
def test_chunks_that_overlap_are_refused(checkpoints: Path, offsets: tuple[list[int], list[int]]) -> None:
    directory = checkpoints / "step-2"
    document = json.loads((directory / "index.json").read_text())
    entry = document["tensors"]["model/transposed"]
    whole = entry["chunks"][0]
    assert whole["sizes"] == [6, 4]
    half = {**whole, "sizes": [3, 4], "length": 48}
    good = [{**half, "offsets": [0, 0]}, {**half, "offsets": [3, 0]}]
    sizes = {name: (directory / name).stat().st_size for name in FILES}
    entry["chunks"] = good
    (directory / "index.json").write_text(json.dumps(document))
    assert len(read_index(directory, sizes)["model/transposed"].chunks) == 2
    entry["chunks"] = [{**half, "offsets": place} for place in offsets]
    (directory / "index.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="overlap"):
        read_index(directory, sizes)
