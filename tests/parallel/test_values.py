"""What each process reads of a model's files itself, in blocks, every element cast where it goes, and what rank 0
sends: the values are rank 0's either way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import tuner.parallel.values
from tests.fixtures.processes import run_ranks
from tests.parallel.test_fsdp import tiny_model, whole
from tuner.errors import DataError
from tuner.model.root import CausalLM
from tuner.model.unread import InFile, in_files, mapped, sampled
from tuner.parallel.fsdp import shard
from tuner.parallel.mesh import DeviceMeshes, Mesh, MeshSpec
from tuner.parallel.values import READERS, FileBlocks, materialise
from tuner.runtime.dist import RankInfo

values_of: Any = tuner.parallel.values  # whose names are replaced in forked processes
TABLE = "model.model.embed_tokens.weight"


def test_tensors_lie_in_files_until_they_are_written_to(tmp_path: Path) -> None:
    file = tmp_path / "some weights.safetensors"
    saved = {"matrix": torch.arange(6.0).view(2, 3), "half": torch.arange(5).bfloat16(), "number": torch.tensor(3.0)}
    save_file({**saved, "empty": torch.zeros(0)}, file)
    with safe_open(file, "pt") as opened:
        read = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    others = {"own": torch.zeros(3), "columns": read["matrix"].t(), "last": read["matrix"][1]}
    found = in_files({**read, **others})
    assert set(found) == {*saved, "last"}
    content = mapped(found["half"].path)
    for name, place in found.items():
        assert Path(place.path) == file
        assert torch.equal(place.of(content), {**read, **others}[name])
    read["half"].add_(1)
    assert in_files(read) == {}, "a changed page is in no file, and nobody knows whose it is"


def test_a_file_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"matrix": torch.ones(2, 3)}, file)
    with safe_open(file, "pt") as opened:
        read = {"matrix": opened.get_tensor("matrix")}
    assert set(in_files(read)) == {"matrix"}
    file.unlink()
    assert in_files(read) == {}


def test_samples_tell_other_weights_apart() -> None:
    weights = [torch.randn(300, 40), torch.randn(7), torch.tensor(1.0)]
    first = sampled(weights)
    assert sampled([one.clone() for one in weights]) == first
    for number in range(3):
        assert sampled([one + (0.1 if number == place else 0.0) for place, one in enumerate(weights)]) != first


@dataclass(frozen=True)
class Case:
    """A source on rank 0, what is amiss, and how many of the tensors are sent in place of read."""

    saved: torch.dtype = torch.float32
    read: torch.dtype | None = torch.float32
    """The type of the source; None: it is drawn, and in no file."""
    amiss: Callable[[int, CausalLM, Path], None] = lambda rank, source, file: None
    is_read: bool = True


def _write_to_it(rank: int, source: CausalLM, file: Path) -> None:
    with torch.no_grad():
        dict(source.named_parameters())[TABLE][1].add_(1)


def _lose_it(rank: int, source: CausalLM, file: Path) -> None:
    def missing(path: str) -> torch.Tensor:
        raise FileNotFoundError(path)

    if rank:
        values_of.mapped = missing  # in this process


def _have_another(rank: int, source: CausalLM, file: Path) -> None:
    if rank:
        values_of.mapped = lambda path: mapped(str(file.with_name("other.safetensors")))


def _have_a_shorter(rank: int, source: CausalLM, file: Path) -> None:
    if rank:
        values_of.mapped = lambda path: mapped(path)[:1000]


CASES = {
    "read as it is": Case(),
    "cast where it goes": Case(torch.bfloat16, torch.bfloat16),
    "cast on rank 0": Case(torch.bfloat16, torch.float32, is_read=False),
    "drawn": Case(read=None, is_read=False),
    "written to": Case(amiss=_write_to_it, is_read=False),
    "not on another machine": Case(amiss=_lose_it, is_read=False),
    "another on another machine": Case(amiss=_have_another, is_read=False),
    "cut off on another machine": Case(amiss=_have_a_shorter, is_read=False),
}
WARNED = ("another on another machine", "cut off on another machine")


def _with_number() -> CausalLM:
    root = tiny_model()
    root.register_buffer("number", torch.tensor(3.0))  # of no dimension, as a scale of embeddings
    return root


def _source(case: Case, directory: Path) -> CausalLM:
    source = _with_number()
    if case.read is None:
        return source
    own = {name: one.detach().to(case.saved) for name, one in source.named_parameters()}
    save_file(own, directory / "model.safetensors")
    save_file({name: one * 2 for name, one in own.items()}, directory / "other.safetensors")
    source.to(case.read)
    with safe_open(directory / "model.safetensors", "pt") as opened:
        for name, parameter in source.named_parameters():
            parameter.data = opened.get_tensor(name).to(case.read)
    return source


@pytest.mark.slow("whole")
@pytest.mark.multi
@pytest.mark.parametrize("sharded", [True, False], ids=["in shards", "whole"])
def test_values_are_rank_0s(sharded: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sources = {}
    for what, case in CASES.items():
        (tmp_path / what).mkdir()
        sources[what] = _source(case, tmp_path / what)

    def work(rank: int) -> None:
        values_of._BLOCK = 256
        meshes = Mesh.of(RankInfo(rank, 2, rank, 2), MeshSpec("full" if sharded else "none")).device_meshes("cpu")
        for what, case in CASES.items():
            _hold(what, case, sources[what], rank, meshes, tmp_path / what / "model.safetensors")

    assert run_ranks(2, tmp_path, work) == [0, 0]
    warnings = [line for line in capfd.readouterr().err.splitlines() if "rank 1 has other weights in" in line]
    assert [line.count(f"{tmp_path / what}/") for line, what in zip(warnings, WARNED, strict=True)] == [1] * len(WARNED)


def _hold(what: str, case: Case, source: CausalLM, rank: int, meshes: DeviceMeshes, file: Path) -> None:
    """Give a meta model the values of rank 0's source, and look at them and at what was sent. Collective."""
    wanted = {name: one.detach().float().clone() for name, one in source.named_parameters()}
    if case.amiss is _write_to_it:
        wanted[TABLE][1] += 1
    values_of.mapped = mapped
    case.amiss(rank, source, file)
    with torch.device("meta"):
        root = _with_number()
    if meshes.weights is not None:
        shard(root, meshes, True)
    sent: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        real = dist.broadcast
        patched.setattr(dist, "broadcast", lambda block, src: sent.append(block.numel()) or real(block, src=src))
        materialise(root, source if rank == 0 else None, torch.device("cpu"))
    found = {name: whole(one) for name, one in root.named_parameters()}
    for name, one in found.items():
        assert one.dtype == torch.float32, (what, name)
        assert torch.equal(one, wanted[name]), (what, name)
    of_buffers = sum(buffer.numel() for buffer in root.buffers())
    of_all = of_buffers + sum(one.numel() for one in found.values())
    assert sum(sent) == (of_buffers if case.is_read else of_all), what
    assert max(sent) <= 256, what


@pytest.mark.multi
def test_a_type_that_does_not_hold_the_sources_values_is_a_bug(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with torch.device("meta"):
            root: Any = tiny_model().bfloat16()
        with pytest.raises(RuntimeError, match=r"float32 at the source and torch\.bfloat16"):
            materialise(root, tiny_model() if rank == 0 else None, torch.device("cpu"))

    assert run_ranks(2, tmp_path, work) == [0, 0]


file_blocks: Any = tuner.parallel.values
CPU = torch.device("cpu")
COUNT = 1000


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setattr(file_blocks, "BLOCK", 64)
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.fixture
def place(values: torch.Tensor, tmp_path: Path) -> InFile:
    (tmp_path / "weights").write_bytes(b"header" + values.view(torch.uint8).numpy().tobytes())
    return InFile(str(tmp_path / "weights"), 6, torch.bfloat16, (COUNT,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_target_gets_its_elements(values: torch.Tensor, place: InFile, dtype: torch.dtype) -> None:
    whole, part = torch.empty(10, 100, dtype=dtype), torch.zeros(8, 20, dtype=dtype)
    number = torch.empty((), dtype=dtype)
    with FileBlocks(CPU) as blocks:
        blocks.give(whole, place)
        blocks.give(part[2:5], place, 137)
        blocks.give(number, place, COUNT - 1)
        blocks.give(torch.empty(0), place)
        assert blocks._n_blocks == 2 * READERS, "memory is a few blocks, whatever is read"
    assert torch.equal(whole, values.view(10, 100).to(dtype))
    assert torch.equal(part[2:5].reshape(-1), values[137:197].to(dtype))
    assert not part[:2].any() and not part[5:].any()
    assert number == values[-1]


def test_parameters_get_theirs_in_place(values: torch.Tensor, place: InFile) -> None:
    weight = nn.Parameter(torch.zeros(COUNT))
    with FileBlocks(CPU) as blocks:
        blocks.give(weight, place)
    assert torch.equal(weight.detach(), values.float()) and weight.grad_fn is None


def test_a_file_that_ends_early_is_named(values: torch.Tensor, place: InFile) -> None:
    Path(place.path).write_bytes(Path(place.path).read_bytes()[:1000])
    with pytest.raises(DataError, match=r"weights: it ends before byte \d+"), FileBlocks(CPU) as blocks:
        blocks.give(torch.empty(COUNT), place)


def test_what_failed_besides_is_raised(values: torch.Tensor, place: InFile) -> None:
    with pytest.raises(KeyError), FileBlocks(CPU) as blocks:
        blocks.give(torch.empty(COUNT), place)
        raise KeyError
