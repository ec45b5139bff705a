"""One process: what is saved is what is loaded, and only into what it belongs to; damage of any file is noticed,
named, and stepped over.
"""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.checkpoint.states import blank, equal, full_state
from tests.fixtures.bits import flip_bit
from tuner.checkpoint.index import read_index
from tuner.checkpoint.load import content_sha256, load_into, read_probe, read_tensors
from tuner.checkpoint.manifest import sealed
from tuner.checkpoint.open import newest, open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.errors import DataError, MachineError
from tuner.rundir.checkpoints import prune
from tuner.runtime import files


@pytest.fixture
def run(tmp_path: Path) -> CheckpointDir:
    return CheckpointDir(tmp_path / "checkpoints", "run1")


def test_round_trip(run: CheckpointDir) -> None:
    state = full_state()
    path = save(run, 3, state, {"step": 3}, {"data_key": "k"}, {"logits": torch.ones(2, 3)})
    info = open_checkpoint(path)
    assert (path.name, info.step, info.state, info.meta) == ("step-3", 3, {"step": 3}, {"data_key": "k"})
    target = blank(state)
    load_into(info, target)
    assert equal(target, state)
    assert equal(dict(read_tensors(info)), state)
    assert [name for name, _ in read_tensors(info, ["optimizer/ids", "model/short"])] == [
        "optimizer/ids",
        "model/short",
    ]
    assert torch.equal(read_probe(info)["logits"], torch.ones(2, 3))
    assert sorted(os.listdir(run.path)) == ["step-3"]


def test_parameters_are_filled_in_place(run: CheckpointDir) -> None:
    info = open_checkpoint(save(run, 0, {"w": torch.arange(6.0).reshape(2, 3)}, {}, {}))
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    address = parameter.data_ptr()
    load_into(info, {"w": parameter})
    assert parameter.data_ptr() == address
    assert parameter.requires_grad
    assert torch.equal(parameter.data, torch.arange(6.0).reshape(2, 3))


def test_the_shard_is_a_readable_aligned_safetensors_file(run: CheckpointDir) -> None:
    state = full_state()
    path = save(run, 1, state, {}, {}) / "rank-0000-of-0001.safetensors"
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(state)
        assert all(torch.equal(file.get_tensor(name), state[name]) for name in state)
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    for entry in json.loads((path.parent / "index.json").read_text())["tensors"].values():
        width = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1}[entry["dtype"]]
        assert all(chunk["start"] % width == 0 for chunk in entry["chunks"])


def test_saving_a_valid_step_again_changes_nothing(run: CheckpointDir) -> None:
    path = save(run, 1, full_state(0), {}, {})
    before = content_sha256(open_checkpoint(path)), os.stat(path).st_ino
    assert save(run, 1, full_state(1), {}, {}) == path
    assert (content_sha256(open_checkpoint(path)), os.stat(path).st_ino) == before


def test_saving_over_an_invalid_step_keeps_it_aside(run: CheckpointDir) -> None:
    path = save(run, 1, full_state(0), {}, {})
    (path / "state.json").write_text("{")
    save(run, 1, full_state(1), {}, {})
    assert equal(dict(read_tensors(open_checkpoint(path))), full_state(1))
    assert sorted(os.listdir(run.path)) == ["invalid-step-1-run1", "step-1"]


def test_content_sha256_sees_names_types_shapes_and_bytes(run: CheckpointDir) -> None:
    base = {"a": torch.zeros(2, 3)}
    others = (
        {"b": torch.zeros(2, 3)},
        {"a": torch.zeros(3, 2)},
        {"a": torch.zeros(2, 3).int()},
        {"a": torch.ones(2, 3)},
    )
    hashes = [
        content_sha256(open_checkpoint(save(run, step, state, {"step": step}, {"run": step})))
        for step, state in enumerate((base, *others, base))
    ]
    assert len(set(hashes)) == 5
    assert hashes[0] == hashes[-1]


@pytest.mark.parametrize("value", [3, "text", None, [1.0], {"nested": torch.zeros(1)}])
def test_values_other_than_tensors_are_refused(run: CheckpointDir, value: object) -> None:
    with pytest.raises(TypeError, match="bad: only tensors"):
        save(run, 1, {"bad": value}, {}, {})  # type: ignore[dict-item]
    assert newest(run.path) is None


def test_unknown_dtypes_are_refused(run: CheckpointDir) -> None:
    with pytest.raises(TypeError, match="complex64"):
        save(run, 1, {"c": torch.zeros(2, dtype=torch.complex64)}, {}, {})
    assert not os.listdir(run.path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("model/weight"), "model/weight is not expected"),
        (lambda s: s.update({"model/new": torch.zeros(1)}), "model/new is missing"),
        (lambda s: s.update({"model/weight": torch.zeros(5, 7)}), r"F32 \[7, 5\] in it, F32 \[5, 7\] is wanted"),
        (lambda s: s.update({"model/weight": torch.zeros(7, 5).half()}), r"F16 \[7, 5\] is wanted"),
    ],
)
def test_another_models_state_is_refused(run: CheckpointDir, change: object, words: str) -> None:
    info = open_checkpoint(save(run, 1, full_state(), {}, {}))
    target = blank(full_state())
    change(target)  # type: ignore[operator]
    with pytest.raises(DataError, match=words):
        load_into(info, target)
    assert all(not tensor.any() for tensor in target.values())


def test_missing_things_are_named(run: CheckpointDir) -> None:
    with pytest.raises(DataError, match=r"step-9: no such directory"):
        open_checkpoint(run.path / "step-9")
    info = open_checkpoint(save(run, 1, {"a": torch.zeros(1)}, {}, {}))
    with pytest.raises(DataError, match="no tensor 'b'"):
        list(read_tensors(info, ["b"]))
    with pytest.raises(DataError, match="without a probe"):
        read_probe(info)


def test_a_full_disk_is_seen_before_anything_is_written(run: CheckpointDir, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, 1, full_state(), {}, {})
    monkeypatch.setattr("tuner.checkpoint.save.free_bytes", lambda path: 1234)
    with pytest.raises(MachineError, match=r"checkpoints: no room .*needed 1,\d{3},\d{3} bytes, free 1,234 bytes"):
        save(run, 2, full_state(), {}, {})
    assert os.listdir(run.path) == ["step-1"]


def test_newest_orders_by_number_and_passes_over_other_names(run: CheckpointDir) -> None:
    assert newest(run.path) is None
    for step in (9, 10, 2):
        save(run, step, {"a": torch.zeros(1)}, {}, {})
    (run.path / "step-11").mkdir()
    (run.path / "step-012").mkdir()
    (run.path / "step-99").symlink_to(run.path / "step-10")
    (run.path / ".tmp-step-50-x").mkdir()
    warnings: list[str] = []
    info = newest(run.path, warnings.append)
    assert info is not None
    assert info.step == 10
    assert len(warnings) == 1
    assert "step-11" in warnings[0]


def test_a_checkpoint_under_another_steps_name_is_refused(run: CheckpointDir) -> None:
    save(run, 1, {"a": torch.zeros(1)}, {}, {}).rename(run.path / "step-5")
    with pytest.raises(DataError, match="belongs to step 1"):
        open_checkpoint(run.path / "step-5")


def test_prune_keeps_the_newest_valid_and_the_protected(run: CheckpointDir) -> None:
    paths = [save(run, step, {"a": torch.zeros(1)}, {}, {}) for step in range(6)]
    (paths[5] / "state.json").unlink()
    removed = prune(run.path, 2, protect=[paths[0]])
    assert removed == [paths[2], paths[1]]
    assert sorted(os.listdir(run.path)) == ["step-0", "step-3", "step-4", "step-5"]
    assert prune(run.path, 2, protect=[paths[4]]) == [paths[0]]  # one of the newest two: no extra
    assert sorted(os.listdir(run.path)) == ["step-3", "step-4", "step-5"]
    with pytest.raises(ValueError, match="at least one"):
        prune(run.path, 0)


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=st.dictionaries(names, st.tuples(shapes, dtypes), max_size=6), seed=st.integers(0, 999))
def test_any_tensors_round_trip(tmp_path_factory: pytest.TempPathFactory, layout: dict, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randint(0, 2**15, shape, generator=generator).to(dtype) for name, (shape, dtype) in layout.items()
    }
    info = open_checkpoint(save(CheckpointDir(tmp_path_factory.mktemp("c"), "r"), 0, state, {}, {}))
    target = blank(state)
    load_into(info, target)
    assert equal(target, state)
    assert equal(dict(read_tensors(info)), state)


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_same_step_with_another_state_takes_its_place(
    run: CheckpointDir, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    probe = {"logits": torch.ones(2)}
    path = save(run, 1, full_state(0), {"finished": False}, {})
    if not exchanges:

        def unknown(first: Path, second: Path) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(files, "_exchange", unknown)
    assert save(run, 1, full_state(0), {"finished": True}, {}, probe) == path
    assert open_checkpoint(path).state == {"finished": True}
    assert torch.equal(read_probe(open_checkpoint(path))["logits"], probe["logits"])
    assert os.listdir(run.path) == ["step-1"]
    before = os.stat(path).st_ino
    save(run, 1, full_state(0), {"finished": True}, {}, probe)
    assert os.stat(path).st_ino == before


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
