"""What choices cost on one GPU: recomputing and compiling, gathers of a sharded model, the loss, sample answers."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tools.gpu_day.models import config_of
from tools.gpu_day.record import Day
from tuner.model import output_layer
from tuner.model.blocks import apply_recompute, compile_blocks
from tuner.model.build import decoder_blocks, meta_model
from tuner.model.decode import greedy
from tuner.model.documents import Padding
from tuner.model.kernels import KERNELS, apply_liger
from tuner.model.output_layer import OutputLayer
from tuner.model.root import CausalLM
from tuner.model.trainable import TrainableSpec
from tuner.parallel.assemble import AssemblySpec, assemble
from tuner.parallel.fsdp import sync_gradients
from tuner.parallel.mesh import DeviceMeshes

DOCUMENTS = 4
LEVELS = ("none", "selective", "full")
WORLD = 8


def fill(day: Day, root: CausalLM) -> None:
    """Give a model without storage drawn values on the device: what a step costs does not depend on them."""
    root.to_empty(device=day.device)
    with torch.no_grad():
        for tensor in [*root.parameters(), *root.buffers()]:
            part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if part.is_floating_point():
                part.normal_(0, 0.02)


def batch(day: Day, tokens: int) -> tuple[Any, ...]:
    """The arguments of one forward over a row of four documents."""
    ids = torch.randint(3, 300, (tokens,), generator=torch.Generator().manual_seed(0)).to(day.device)
    length = tokens // DOCUMENTS
    places = torch.arange(length, device=day.device).repeat(DOCUMENTS)
    at = torch.arange(tokens - 1, device=day.device)
    return ids, places, (length,) * DOCUMENTS, at, ids[1:]


def steps_of(day: Day, root: CausalLM, tokens: int, micro_batches: int) -> dict[str, Any]:
    """Seconds, tokens a second and peak of an optimizer step, AdamW's update included."""
    root.parts.set_once(loss_kernel=KERNELS["liger" if day.on_gpu else "torch"])
    optimizer = torch.optim.AdamW(root.parameters(), lr=1e-6, fused=True)
    given = batch(day, tokens)
    root.train()

    def step() -> None:
        for number in range(micro_batches):
            sync_gradients(root, number == micro_batches - 1)
            with day.autocast():
                loss = root(*given)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with day.peak() as peak:
        seconds = day.seconds(step, 6)
    return {"step ms": round(seconds * 1e3, 1), "tokens/s": round(tokens * micro_batches / seconds), **peak}


def fresh(day: Day) -> None:
    """Forget what the last setting left on the device and in the compiler."""
    gc.collect()
    torch._dynamo.reset()
    if day.on_gpu:
        torch.cuda.empty_cache()


def levels(day: Day) -> None:
    """0.6B on one device: layers as they are, by liger's kernels and compiled, at each level of recomputing."""
    ways = ("plain", "liger", "compiled") if day.on_gpu else ("plain",)
    for tokens in (64,) if day.small else (2048, 4096, 16384):
        for way in ways:
            for level in LEVELS:

                def measured(tokens: int = tokens, way: str = way, level: str = level) -> dict[str, Any]:
                    fresh(day)
                    root = CausalLM(meta_model(config_of(day, "0.6B"), torch.float32))
                    if way == "liger":
                        apply_liger(root.model)
                    if level != "none":
                        apply_recompute(root, "selective" if level == "selective" else "full")
                    if way == "compiled":
                        compile_blocks(root, Padding(tokens, tokens))
                    fill(day, root)
                    return steps_of(day, root, tokens, 1)

                day.figure(f"0.6B, {tokens} tokens, {way} layers, recomputing {level}", measured)


@contextmanager
def fake_group() -> Iterator[None]:
    """Within, this is rank 0 of eight: real kernels, copies and memory, and no bytes on a wire."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(day: Day, how: str, level: str, tokens: int) -> CausalLM:
    """A third of 8B's layers over eight processes: as the product shards it, or by plain FSDP2 in one type."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(day.device, (WORLD,), mesh_dim_names=("shard",))
    model = meta_model(config_of(day, "8B", layers=12), torch.float32)
    spec = AssemblySpec(
        TrainableSpec(None, (), range(0), True),
        seed=0,
        recompute=level,  # type: ignore[arg-type]
        padding=Padding(tokens, tokens) if day.on_gpu else None,
        tokens=tokens,
    )
    if how == "tuner":
        return assemble(spec, model, meshes=DeviceMeshes(weights=mesh), give_values=lambda root: fill(day, root))
    root = assemble(spec, model)
    type_of = {"fp32 gathers": torch.float32, "bf16 gathers": torch.bfloat16}[how]
    policy = MixedPrecisionPolicy(param_dtype=type_of, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in decoder_blocks(root.model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fill(day, root)
    return root


def gathers(day: Day) -> None:
    """Rank 0 of eight without a wire: time and memory of gathers, casts and kept gradients."""
    with fake_group():
        for tokens in (64,) if day.small else (2048, 4096, 8192):
            for how in ("tuner", "fp32 gathers", "bf16 gathers"):
                for level, micro_batches in (("none", 1), ("none", 2), ("selective", 1)):
                    if micro_batches > 1 and how != "tuner":
                        continue

                    def measured(given: tuple[str, str, int] = (how, level, tokens), m: int = micro_batches) -> Any:
                        fresh(day)
                        return steps_of(day, sharded(day, *given), given[2], m)

                    what = (
                        f"12 layers of 8B, rank 0 of 8, {tokens} tokens x {micro_batches}, {how}, recomputing {level}"
                    )
                    day.figure(what, measured)


def loss(day: Day) -> None:
    """The output layer of 0.6B on a row of 4096: chunks of several sizes, a head that is trained and a frozen one."""
    tokens, width, vocabulary = (64, 16, 300) if day.small else (4096, 1024, 151936)
    hidden = torch.randn(tokens, width, device=day.device, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,), device=day.device)
    chunk, block = dict(output_layer.CHUNK_LOGITS), dict(output_layer.BLOCK_VOCABULARY)
    sizes: list[tuple[str, int, int]] = [("as it is", chunk[day.device], block[day.device])]
    sizes += [(f"chunks of 2^{power}, whole vocabulary", 1 << power, 1 << 30) for power in (27, 28, 29, 30)]
    try:
        for name, output_layer.CHUNK_LOGITS[day.device], output_layer.BLOCK_VOCABULARY[day.device] in sizes:
            for frozen in (False, True):
                weight = torch.randn(vocabulary, width, device=day.device) * 0.02
                weight = weight.to(torch.bfloat16) if frozen else weight.requires_grad_()
                run = once(day, hidden, weight, targets)

                def measured(run: Callable[[], None] = run) -> dict[str, Any]:
                    with day.peak() as peak:
                        seconds = day.seconds(run)
                    return {"ms": round(seconds * 1e3, 2), **peak}

                day.figure(f"loss of {tokens} tokens, {name}, {'frozen' if frozen else 'trained'} head", measured)
    finally:
        output_layer.CHUNK_LOGITS.update(chunk)
        output_layer.BLOCK_VOCABULARY.update(block)


def once(day: Day, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    """One forward and backward of the output layer."""
    layer = OutputLayer(weight, None, kernel=KERNELS["liger" if day.on_gpu else "torch"])

    def run() -> None:
        with day.autocast():
            found = layer.cross_entropy(hidden, targets)
        found.backward()
        hidden.grad = weight.grad = None

    return run


def answers(day: Day) -> None:
    """Sample answers as an evaluation gives them: three prompts, 128 tokens each."""

    def measured() -> dict[str, Any]:
        fresh(day)
        root = CausalLM(meta_model(config_of(day, "0.6B"), torch.float32)).eval()
        fill(day, root)
        limit = 4 if day.small else 128
        prompts = [[5] * 20, [6] * 10, [7] * 5]

        def decode() -> None:
            with day.autocast():
                greedy(root, prompts, (), [limit] * len(prompts), torch.device(day.device))

        return {"s": round(day.seconds(decode, 1, 1), 2)}

    day.figure("sample answers, 3 x 128 tokens, 0.6B", measured)


def cost(day: Day) -> None:
    """All of it, the most telling first."""
    gathers(day)
    loss(day)
    levels(day)
    answers(day)
