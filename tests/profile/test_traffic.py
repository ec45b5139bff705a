"""What sharding moves, counted to the byte."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.fixtures.predict_cases import LORA, Case
from tests.fixtures.predict_counted import resolved_case
from tests.profile.test_predict import predicted, wish
from tuner.profile.report import sentence
from tuner.profile.tracing import trace_step
from tuner.profile.traffic import Traffic, TrafficCounter
from tuner.runtime.torch_private import FakeStore, TorchDispatchMode
from tuner.setup.resolve import Resolved
from tuner.setup.specs import meta_model_of

WIDTH, FULL, HALF = 6, 4, 2


class Watched(TorchDispatchMode):  # type: ignore[misc]  # its type is not known
    """Shows a counter every operation."""

    def __init__(self, counter: TrafficCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.counter.count(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.fixture
def eight() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        yield
    finally:
        dist.destroy_process_group()


def moved(policy: MixedPrecisionPolicy, shape: tuple[int, ...], local_size: int) -> Traffic:
    """By one layer of ``WIDTH`` outputs and inputs, forward and backward, on a mesh of this shape."""
    axes = ("replicate", "shard")[-len(shape) :]
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    counter = TrafficCounter([layer.weight.shape, layer.weight.to_local().shape], local_size)  # type: ignore[attr-defined]
    with Watched(counter):
        counter.begin("forward")
        loss = layer(torch.ones(3, WIDTH, requires_grad=True)).sum()
        counter.begin("backward")
        loss.backward()
        counter.begin("optimizer")
        dist.all_reduce(torch.ones(4))
    assert counter.optimizer == Traffic(reduced=2 * 16 * 7 // 8, far=2 * 16 * 7 // 8 if local_size < 8 else 0)
    return counter.micro[0]


@pytest.mark.usefixtures("eight")
def test_a_layer_is_gathered_twice_and_its_gradient_reduced_once() -> None:
    whole = 8 * WIDTH  # six rows on eight processes: a row each, two of them filled up
    plain = moved(MixedPrecisionPolicy(), (8,), 8)
    assert (plain.gathered, plain.reduced, plain.far) == (2 * whole * FULL * 7 // 8, whole * FULL * 7 // 8, 0)
    half = moved(MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), (8,), 8)
    assert (half.gathered, half.reduced) == (plain.gathered // 2, plain.reduced)
    assert 0 < half.copied < plain.copied and plain.converted == 0 < half.converted


@pytest.mark.usefixtures("eight")
def test_replicas_on_other_machines_are_reduced_over_the_network() -> None:
    whole = 8 * WIDTH  # two rows on each of four
    found = moved(MixedPrecisionPolicy(), (2, 4), 4)
    shards = 2 * (whole // 4) * FULL * 1 // 2  # of two replicas
    assert found.gathered == 2 * whole * FULL * 3 // 4
    assert (found.reduced, found.far) == (whole * FULL * 3 // 4 + shards, shards)


def padded_sizes(resolved: Resolved) -> tuple[dict[str, int], int]:
    """The bytes of each parameter in four shards of whole rows, and of those of all layers."""
    sizes = {name: p.shape for name, p in meta_model_of(resolved).named_parameters()}
    padded = {name: -(-shape[0] // 4) * 4 * shape[1:].numel() * FULL for name, shape in sizes.items()}
    return padded, sum(size for name, size in padded.items() if ".layers." in name)


def test_a_traced_step_gathers_layers_twice_and_the_rest_once(tmp_path: Path) -> None:
    resolved, rank_info, step = resolved_case(Case("llama", {}, ((40, 30, 20),), 4), tmp_path)
    padded, layers = padded_sizes(resolved)
    rest = sum(padded.values()) - layers
    (found,) = trace_step(resolved, rank_info, step).traffic
    assert found.gathered == (2 * layers + rest) * 3 // 4
    assert found.reduced == (layers + rest) * 3 // 4
    resolved, rank_info, step = resolved_case(Case("llama", LORA, ((40, 30, 20),), 4), tmp_path)
    (adapted,) = trace_step(resolved, rank_info, step).traffic
    assert 0 < adapted.reduced < found.reduced < found.gathered < adapted.gathered


def test_a_traced_step_looks_rows_up_where_that_moves_less(tmp_path: Path) -> None:
    """An embedding of 4,099 rows, which 2 x 4 x 256 tokens are at most half of, in shards of 1,025."""
    resolved, rank_info, step = resolved_case(Case("llama-large", {}, ((40, 30, 20),), 4), tmp_path)
    padded, layers = padded_sizes(resolved)
    rest = sum(padded.values()) - layers - padded["model.embed_tokens.weight"]
    tokens, row = 4 * 256, 32 * FULL
    trace = trace_step(resolved, rank_info, step)
    (found,) = trace.traffic
    assert found.gathered == (2 * layers + rest + tokens * (8 + row)) * 3 // 4  # ids, and gradients of rows
    assert found.reduced == (layers + rest + tokens * row) * 3 // 4
    made = [one.size for one in trace.storages if one.module.endswith("embed_tokens")]
    assert max(made) == (1025 + 1) * row  # a shard of the gradient, and a row for all others; about as much as of rows


@pytest.mark.slow
def test_a_prediction_says_what_a_step_moves(tmp_path: Path) -> None:
    alone, many = predicted(wish(tmp_path)), predicted(wish(tmp_path), processes="2")
    assert alone.time.traffic == Traffic() and "gathered" not in sentence(alone)
    more = predicted(wish(tmp_path, train={"global_batch_size": 16}), processes="2")
    assert more.time.traffic.gathered == 2 * many.time.traffic.gathered > 0
    assert "reduced by each process" in sentence(many)
