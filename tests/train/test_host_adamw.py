"""AdamW on the host: torch's fused one on a CPU bit for bit, however it is cut, and what it reads and holds; its
copies, on a stand-in for `torch.cuda`, right in whatever order streams may run; its states as tensors of a
checkpoint.
"""

import gc
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.fixtures import tables
from tests.fixtures.cuda_stub import WAYS, LazyCuda, LazyStream, lazy_cuda
from tests.fixtures.processes import fake_group
from tests.fixtures.tensors import Operations
from tests.train.test_optimizer import SECTIONS
from tuner.config.load import load_recipe
from tuner.config.optimizers import AdamwOptimizer
from tuner.errors import RecipeError
from tuner.runtime.parts import local
from tuner.train import host_adamw
from tuner.train import optimizer as optimizer_module
from tuner.train.host_adamw import UNIT, HostAdamW, HostLink, buckets
from tuner.train.optimizer import OptimizerSet, _as_sharded, build_optimizer

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (7, 4), "layer.weight": (37, 53), "layer.bias": (1001,), "norm.weight": (4,),
    "experts.up": (3, 5, 4), "none.weight": (0, 4),
}
GROUPS = [{"match": ["layer.bias"], "lr": 0.02}, {"match": "layer", "weight_decay": 0.2}]


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    own = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    own["turned.weight"] = nn.Parameter(torch.randn((5, 30), generator=generator).t())
    return own


def give(own: Mapping[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in own.values():
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))
    if step == 1:
        own["experts.up"].grad = None  # no document of the step reached it


def built(own: dict[str, nn.Parameter], offload: str, monkeypatch: pytest.MonkeyPatch, bucket: int) -> OptimizerSet:
    section = {"kind": "adamw", "lr": 0.1, "weight_decay": 0.3, "groups": GROUPS, "offload": offload}
    monkeypatch.setattr(host_adamw, "BUCKET", bucket)
    return build_optimizer(SECTIONS.validate_python(section), own)


def take(updater: OptimizerSet, own: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        give(own, step)
        updater.set_factor(1 / (step + 1))
        divisor = None if step == 3 else torch.tensor(1.0 + 0.37 * step)
        updater.step(torch.tensor(step == 2), divisor)
        updater.zero_grad()


@pytest.mark.parametrize("bucket", [UNIT, 3 * UNIT, 50 * UNIT, 1 << 23])
def test_the_bits_are_those_of_torch(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a step that is left out, clipped and plain ones, groups, and a parameter without a gradient."""
    own, other = parameters(), parameters()
    ours, torchs = built(own, "host", monkeypatch, bucket), built(other, "none", monkeypatch, bucket)
    take(ours, own, range(6))
    take(torchs, other, range(6))
    assert all(torch.equal(own[name], other[name]) for name in own)
    states, expected = ours.state_tensors(), torchs.state_tensors()
    assert states.keys() == expected.keys() == ours.host_names() and not torchs.host_names()
    assert all(torch.equal(states[name], expected[name]) for name in expected)
    assert sum(tensor.nbytes for tensor in states.values()) == 8 * sum(parameter.numel() for parameter in own.values())


def test_a_step_that_is_left_out_changes_nothing_whatever_its_gradients_are(monkeypatch: pytest.MonkeyPatch) -> None:
    own = parameters()
    updater = built(own, "host", monkeypatch, 64)
    take(updater, own, range(1))
    before = {name: tensor.clone() for name, tensor in (*own.items(), *updater.state_tensors().items())}
    for parameter in own.values():
        parameter.grad = torch.full_like(parameter, math.nan)
    updater.step(torch.tensor(True), torch.tensor(math.nan))
    updater.zero_grad()
    after = {**own, **updater.state_tensors()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {float(tensor) for tensor in updater.local_tensors() if tensor.ndim == 0} == {1.0}


def test_a_gradient_may_lie_otherwise_than_its_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = parameters(), parameters()
    for parameters_, turn in ((own, True), (other, False)):
        give(parameters_, 0)
        gradient = parameters_["turned.weight"].grad
        assert gradient is not None and not gradient.is_contiguous()
        parameters_["turned.weight"].grad = gradient.contiguous() if turn else gradient
        built(parameters_, "host", monkeypatch, 64).step()
    assert torch.equal(own["turned.weight"], other["turned.weight"])


@pytest.mark.parametrize(("first", "second"), [("none", "host"), ("host", "none")])
def test_states_continue_on_the_other_side(first: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, own = parameters(), parameters()
    take(built(straight, "none", monkeypatch, 64), straight, range(6))
    before = built(own, first, monkeypatch, 64)
    take(before, own, range(4))
    after = built(own, second, monkeypatch, 64)
    for name, tensor in after.state_tensors().items():
        tensor.copy_(before.state_tensors()[name])
    for count, seen in zip(_steps(after), _steps(before), strict=True):  # of which one lacked a gradient
        count.copy_(seen)
    take(after, own, range(4, 6))
    assert all(torch.equal(own[name], straight[name]) for name in own)


def _steps(updater: OptimizerSet) -> list[torch.Tensor]:
    return [tensor for tensor in updater.local_tensors() if tensor.ndim == 0]


def test_the_host_reads_one_number_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    own = parameters()
    updater = built(own, "host", monkeypatch, 64)
    give(own, 0)
    with Operations(lambda func, *_: [func]) as seen:
        updater.step(torch.tensor(False), torch.tensor(2.0))
    assert seen.found.count(torch.ops.aten._local_scalar_dense.default) == 1


@pytest.mark.parametrize(("optimizer", "said"), tables.cases(__file__, "what_does_not_go_together_is_refused"))
def test_what_does_not_go_together_is_refused(optimizer: dict[str, Any], said: str) -> None:
    tree: dict[str, Any] = {"model": {"name_or_path": "x", "dtype": "bf16"}, "data": {"train": "x"}}
    with pytest.raises(RecipeError, match=re.escape(said)):
        load_recipe({**tree, "optimizer": {"offload": "host", **optimizer}})


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(1, 200))
def test_buckets_hold_each_element_once(sizes: list[int], limit: int) -> None:
    given_ = [torch.zeros(size) for size in sizes]
    groups = [{"params": given_[:2]}, {"params": given_[2:]}]
    limit_kept = max(UNIT, limit // UNIT * UNIT)
    for bucket in (found := buckets(groups, limit)):
        taken: list[int] = []
        for piece in bucket:
            piece.of(piece.parameter).add_(1)
            taken += range(piece.at, piece.at + piece.end - piece.start)
            assert piece.start % UNIT == piece.at % UNIT == 0
            assert piece.end % UNIT == 0 or piece.end == piece.parameter.numel()
        assert len(set(taken)) == len(taken) and max(taken) < limit_kept
    assert all(bool((tensor == 1).all()) for tensor in given_)
    assert len(found) <= 1 + sum(-(-size // UNIT) * UNIT for size in sizes) // limit_kept


def test_without_parameters_there_is_nothing_to_do() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(0))], "lr": 0.1, "weight_decay": 0.0}]
    optimizer = HostAdamW(groups, (0.9, 0.9), 1e-8)
    optimizer.step()
    assert optimizer.problem is None


SIZES, BUCKET, STEPS = (70, 16, 33, 5), 32, 3
Weights = list[torch.Tensor]


def gradient(step: int, number: int) -> torch.Tensor:
    return torch.randn(SIZES[number], generator=torch.Generator().manual_seed(10 * step + number))


def started() -> Weights:
    return [torch.nn.Parameter(gradient(99, number)) for number in range(len(SIZES))]


def expected() -> list[Weights]:
    """The weights after each step of torch's fused AdamW."""
    weights, found = started(), []
    optimizer = torch.optim.AdamW(weights, lr=0.1, betas=(0.9, 0.95), weight_decay=0.2, fused=True)
    for step in range(STEPS):
        for number, weight in enumerate(weights):
            weight.grad = gradient(step, number)
        optimizer.step()
        found.append([weight.detach().clone() for weight in weights])
    return found


@torch.no_grad()
def trained(cuda: LazyCuda) -> list[Weights]:
    """The weights that each step's successor reads on the device, where gradients are made and dropped, too."""
    weights, seen = started(), list[Weights]()
    groups = [{"params": weights, "lr": 0.1, "weight_decay": 0.2}]
    optimizer = HostAdamW(groups, (0.9, 0.95), 1e-8, BUCKET)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)

    def backward(step: int) -> None:
        for number, weight in enumerate(weights):
            assert weight.grad is not None
            weight.grad.copy_(gradient(step, number))

    def forward_again() -> None:
        seen.append([weight.detach().clone() for weight in weights])
        for weight in weights:
            assert weight.grad is not None
            weight.grad.fill_(torch.nan)  # its memory is something else's

    for step in range(STEPS):
        cuda.current.add(lambda step=step: backward(step))  # type: ignore[misc]
        optimizer.step()
        cuda.current.add(forward_again)
    cuda.finish()
    return seen


def is_right(way: str) -> bool:
    with lazy_cuda(way) as cuda:
        found = trained(cuda)
    pairs = zip(found, expected(), strict=True)
    return all(torch.equal(a, b) for ours, torchs in pairs for a, b in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_every_order_that_streams_may_take_gives_the_same_bits(way: str) -> None:
    assert is_right(way)


def nothing(*args: Any) -> None:
    pass


@pytest.mark.parametrize("missing", tables.cases(__file__, "each_wait_is_needed"))
def test_each_wait_is_needed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = missing.partition(":")[0]
    monkeypatch.setattr(LazyStream if name == "wait_event" else HostLink, name, nothing)
    assert not all(map(is_right, WAYS))


def test_a_bucket_is_updated_while_others_are_copied() -> None:
    """Before the host waits for a bucket, those after it are on their way, as many as there are buffers for."""
    with lazy_cuda("late") as cuda:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(200))], "lr": 0.1, "weight_decay": 0.0}]
        optimizer, ahead = HostAdamW(groups, (0.9, 0.95), 1e-8, 16), list[int]()
        wait = HostLink.wait

        def waited(link: HostLink, slot: Any) -> None:
            ahead.append(sum(slot.fetched is not None for slot in link.slots))
            down = slot.fetched.stream
            assert down.done < len(down.queue)
            wait(link, slot)
            assert down.done < len(down.queue) or len(ahead) > 12, "copies are left for the time of the update"

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostLink, "wait", waited)
            groups[0]["params"][0].grad = torch.ones(200)  # type: ignore[attr-defined]
            optimizer.step()
        assert len(ahead) == 13 and ahead[0] == 3
        cuda.finish()


def test_page_locked_memory_is_bounded_and_given_back() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(4000))], "lr": 0.1, "weight_decay": 0.0}]
    with lazy_cuda("late"):
        optimizer, locked = HostAdamW(groups, (0.9, 0.95), 1e-8, 64), torch.cuda.cudart().locked
        assert optimizer.problem is None and sum(locked.values()) == 3 * 2 * 64 * 4
        del optimizer
        gc.collect()
        assert not locked


def test_a_system_that_refuses_to_page_lock_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(optimizer_module, "pass_on", said.append)
    section = AdamwOptimizer(lr=0.1, offload="host")
    with lazy_cuda("early", refuse=801):
        optimizer_module.build_optimizer(section, {"one.weight": torch.nn.Parameter(torch.zeros(4, 16))})
    (text,) = said
    assert text.startswith("CUDA cannot page-lock 256 bytes of host memory (error 801): the optimizer's copies wait")


@pytest.fixture
def group() -> Iterator[None]:
    with fake_group(3, 4):
        yield


@pytest.mark.parametrize(("axes", "names"), [((4,), ("shard",)), ((2, 2), ("replicate", "shard"))])
def test_they_lie_over_the_same_processes_and_stay_where_they_are(
    axes: tuple[int, ...], names: tuple[str, ...], group: None
) -> None:
    mesh, placements = init_device_mesh("cuda", axes, mesh_dim_names=names), [Replicate(), Shard(0)][-len(axes) :]
    part = torch.empty(3, 5, device="meta")
    parameter = DTensor.from_local(part, mesh, placements, run_check=False, shape=(3 * axes[-1], 5), stride=(5, 1))
    moment = torch.ones(3, 5)
    found = _as_sharded("exp_avg", moment, parameter)
    assert isinstance(found, DTensor) and found.shape == parameter.shape and found.placements == parameter.placements
    assert local(found).data_ptr() == moment.data_ptr()
    there = found.device_mesh
    assert (there.device_type, there.mesh_dim_names) == ("cpu", names) and torch.equal(there.mesh, mesh.mesh)
    assert there.get_coordinate() == mesh.get_coordinate()
    assert [there.get_group(axis) for axis in names] == [mesh.get_group(axis) for axis in names]
    again = _as_sharded("exp_avg_sq", moment, parameter)
    assert isinstance(again, DTensor) and again.device_mesh is there
