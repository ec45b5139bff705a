"""A timeline adds up, names its parts, and is the same whether it is looked at by module or in all.

The replayed allocator is held against torch's rules by hand. Layers that will be compiled keep one copy of what the
products of a layer would cast each for itself.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.fixtures.predict_cases import BF16, LONG, SHAPE, Case
from tests.fixtures.predict_counted import resolved_case
from tests.fixtures.predict_traced import predicted
from tests.model.tiny import tiny_config
from tests.profile.test_predict import foreseen
from tuner.profile.allocations import AllocationTracker
from tuner.profile.prediction import Phase
from tuner.profile.timeline import CachingAllocator, ExpandableAllocator, expands_segments, memory_timeline, parts_of
from tuner.profile.tracing import StepTrace, cuda_stand_in, trace_step
from tuner.runtime.device import target


def traced(case: Case, directory: Path) -> StepTrace:
    resolved, launch, step = resolved_case(case, directory)
    return trace_step(resolved, launch, step, step.micro[0])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> StepTrace:
    """A step of a small Llama on one process, and an evaluation."""
    return traced(Case("llama"), tmp_path_factory.mktemp("plain"))


def test_parts_add_up_to_the_peak_that_was_counted(plain: StepTrace, tmp_path: Path) -> None:
    trace, said = plain, predicted(*resolved_case(Case("llama"), tmp_path))
    given = {number for number, storage in enumerate(trace.storages) if storage.given}
    timeline = memory_timeline(trace, {})
    whole = said.parameters + said.optimizer
    phases = [moment.phase for moment in timeline.moments]
    assert list(dict.fromkeys(phases)) == ["build", "forward", "backward", "optimizer", "evaluation"]
    assert 0 <= timeline.peak.total - whole - said.peak <= sum(trace.storages[number].size for number in given)
    assert timeline.peak.parts["parameters"] == said.parameters
    ends = [moment for moment in timeline.moments if moment.phase == "optimizer"]
    assert ends[0].parts["gradients"] == said.gradients and ends[0].parts["activations"] == 0
    evaluation = timeline.peak_of("evaluation")
    assert evaluation is not None and evaluation.parts["gradients"] == evaluation.parts["activations"] == 0


def test_every_layer_keeps_as_much_as_the_other(plain: StepTrace, tmp_path: Path) -> None:
    layers = memory_timeline(plain, {}).layers
    assert list(layers) == ["model.layers.0", "model.layers.1", ""]
    assert layers["model.layers.0"] == layers["model.layers.1"] > layers[""] > 0
    again = memory_timeline(traced(Case("llama", {"train.gradient_checkpointing": "full"}), tmp_path), {})
    assert again.layers["model.layers.0"] < layers["model.layers.0"] / 3
    backward = [m for m in again.moments if m.phase == "backward" and m.module == "model.layers.0"]
    assert max(m.parts["activations"] for m in backward) > sum(again.layers.values())


@pytest.mark.slow
def test_shards_are_gathered_and_gradients_reduced(plain: StepTrace, tmp_path: Path) -> None:
    trace = traced(Case("llama", {}, LONG, 4), tmp_path)
    assert {"gathered", "reduced", "gradients"} <= set(parts_of(trace))
    timeline = memory_timeline(trace, {})
    whole = memory_timeline(plain, {}).peak.parts["parameters"]
    assert timeline.peak.parts["parameters"] == pytest.approx(whole / 4, rel=0.05)
    assert 0 < max(moment.parts["gathered"] for moment in timeline.moments) < 2 * whole
    copies = memory_timeline(traced(Case("llama", {"parallel.shard": "none"}, LONG, 4), tmp_path), {})
    assert copies.peak.parts["parameters"] == whole and copies.peak.parts["gathered"] == 0


def test_kernels_of_another_device_are_chosen_within_the_stand_in_alone() -> None:
    import torch

    tensor = torch.zeros(1)
    with cuda_stand_in():
        assert target(tensor) == "cuda"
    assert target(tensor) == "cpu"


@pytest.mark.slow
def test_the_logits_of_a_gpu_are_bounded_by_its_memory(tmp_path: Path) -> None:
    resolved, rank_info, step = resolved_case(Case("llama"), tmp_path)

    def largest(total_bytes: int) -> int:
        """Of the storages that the loss makes."""
        facts = replace(resolved.facts, kind="cuda", total_bytes=total_bytes)
        trace = trace_step(replace(resolved, facts=facts), rank_info, step)
        return max(storage.size for storage in trace.storages if storage.phase == "forward" and not storage.module)

    row = 4 * 128  # bytes of the logits of 97 tokens, filled up
    assert largest(80 << 30) == len(step.micro[0].trained_positions) * row
    assert largest(64 * 128 * 30) == 30 * row  # chunks of thirty positions


MIB = 1 << 20


def test_sizes_are_rounded_and_segments_are_as_torch_makes_them() -> None:
    for size, held in ((1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB + 1, 12)):
        allocator = CachingAllocator()
        block = allocator.allocate(size)
        assert allocator.held == held * MIB, size
        assert block.size >= size and block.size % 512 == 0


def test_a_segment_is_split_and_made_one_again() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(3 * MIB), allocator.allocate(4 * MIB)
    assert (first.segment, second.start, allocator.held) == (second.segment, 3 * MIB, 20 * MIB)
    allocator.free(first)
    assert allocator.held == 20 * MIB
    allocator.free(second)
    assert allocator.held == 0
    again = allocator.allocate(8 * MIB)
    assert (again.segment, again.start, allocator.held) == (first.segment, 0, 20 * MIB)


def test_the_smallest_block_that_is_large_enough_is_taken_whole_where_little_is_left() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (30, 12, 20)]
    for block in blocks:
        allocator.free(block)
    taken = allocator.allocate(11 * MIB)
    assert (taken.segment, taken.size) == (blocks[1].segment, 12 * MIB)
    assert allocator.allocate(13 * MIB).segment == blocks[2].segment


def test_an_expandable_segment_grows_at_its_end_by_pages() -> None:
    for size, held in ((1, 2), (MIB, 2), (MIB + 1, 20), (11 * MIB + 1, 20), (20 * MIB, 20), (41 * MIB, 60)):
        allocator = ExpandableAllocator()
        assert allocator.allocate(size).start == 0 and allocator.held == held * MIB, size
    allocator = ExpandableAllocator()
    first, second = allocator.allocate(15 * MIB), allocator.allocate(15 * MIB)
    assert (second.start, allocator.held) == (15 * MIB, 40 * MIB)  # over the end of a page
    third = allocator.allocate(512 * 1024)
    assert third.segment != first.segment and allocator.held == 42 * MIB
    allocator.free(first)
    assert allocator.held == 42 * MIB  # the page has some of the second
    grown = allocator.allocate(16 * MIB)
    assert (grown.start, allocator.held) == (30 * MIB, 62 * MIB)  # the gap is too small: the end grows
    allocator.free(second)
    assert allocator.allocate(30 * MIB).start == 0


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    allocator = ExpandableAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (8, 2, 6)]  # four are left at the end of the page
    allocator.free(blocks[0])
    taken = allocator.allocate(3 * MIB)
    assert (taken.start, taken.size) == (0, 3 * MIB)  # though the last four fit it better
    assert allocator.allocate(6 * MIB).start == 16 * MIB and allocator.held == 40 * MIB


def test_pages_without_a_block_are_not_held() -> None:
    allocator = ExpandableAllocator()
    large, small = allocator.allocate(100 * MIB), allocator.allocate(2 * MIB)
    assert allocator.held == 120 * MIB
    allocator.free(large)
    assert allocator.held == 20 * MIB
    allocator.free(small)
    assert allocator.held == 0


@pytest.mark.parametrize(
    ("settings", "expands"),
    [
        ({}, True), ({"PYTORCH_ALLOC_CONF": ""}, True), ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,backend:native"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)  # fmt: skip
def test_what_is_set_for_the_allocator_is_honoured(settings: dict[str, str], expands: bool) -> None:
    assert expands_segments(settings) is expands


@pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])
def test_nothing_is_lost_over_many_turns(kind: type[CachingAllocator | ExpandableAllocator]) -> None:
    generator, allocator = random.Random(0), kind()
    living = []
    for _ in range(3000):
        if living and generator.random() < 0.5:
            allocator.free(living.pop(generator.randrange(len(living))))
        else:
            living.append(allocator.allocate(generator.choice((100, 5000, 700_000, 3 * MIB, 17 * MIB))))
        assert sum(block.size for block in living) <= allocator.held
        places = sorted((block.segment, block.start, block.size) for block in living)
        assert all(a[0] != b[0] or a[1] + a[2] <= b[1] for a, b in zip(places, places[1:], strict=False))
    for block in living:
        allocator.free(block)
    assert allocator.held == 0


LAYER = "model.layers.0"
COPY = sum(LONG[-1]) * SHAPE["hidden_size"] * 2
"""Bytes of the hidden states of the last microbatch in bf16."""


@cache
def traced_layers(compiled: bool, level: str = "none") -> StepTrace:
    """A step of a recomputing level; traced once for all tests."""
    keys = {**BF16, "model.kernels": "torch", "train.gradient_checkpointing": level}
    with TemporaryDirectory() as directory:
        resolved, rank_info, step = resolved_case(Case("llama", keys), Path(directory))
        on_cuda = replace(resolved, facts=replace(resolved.facts, kind="cuda", generation=9))
        return trace_step(on_cuda, rank_info, step, step.micro[0], compiled=compiled)


def kept_by_products(trace: StepTrace) -> Counter[str]:
    """Bf16 tensors of hidden states, by the product of the first layer that made them: a cast input or a result."""
    last = max(at for name, at in trace.marks if name == "forward")
    made = {change.storage for change in trace.changes[last:] if change.delta == COPY}
    parts, layer = parts_of(trace), f"model.{LAYER}."
    stored = ((number, storage) for number, storage in enumerate(trace.storages) if number in made)
    kept = (one for number, one in stored if parts[number] == "activations" and one.module.startswith(layer))
    return Counter(one.module.rpartition(".")[2] for one in kept if one.phase == "forward")


def test_compiled_layers_keep_one_copy_of_what_several_products_cast() -> None:
    plain, compiled = traced_layers(False), traced_layers(True)
    repeats = Counter({"k_proj": 1, "v_proj": 1, "up_proj": 1})
    counted = kept_by_products(plain)
    assert counted - kept_by_products(compiled) == repeats and counted & repeats == repeats
    assert min(kept_by_products(compiled)[name] for name in ("q_proj", "gate_proj")) >= 1
    layers, fewer = memory_timeline(plain, {}).layers, memory_timeline(compiled, {}).layers
    assert layers[LAYER] - fewer[LAYER] == 3 * COPY and layers[""] == fewer[""]


@pytest.mark.slow
def test_layers_that_are_computed_again_cast_once_too() -> None:
    def fullest(trace: StepTrace) -> int:
        """Most bytes of activations in the backward pass of the first layer."""
        parts = parts_of(trace)
        found = [change for change in trace.changes if parts[change.storage] == "activations"]
        levels = accumulate(change.delta for change in found)
        at = ("backward", f"model.{LAYER}.")
        return max(n for one, n in zip(found, levels, strict=True) if (one.phase, f"{one.module}."[: len(at[1])]) == at)

    plain, compiled = (fullest(traced_layers(compiled, "full")) for compiled in (False, True))
    assert plain - compiled == 3 * sum(LONG[0]) * SHAPE["hidden_size"] * 2


def test_what_is_counted_once_is_freed_once_and_with_the_last() -> None:
    for trace in (traced_layers(True), traced_layers(True, "full")):
        levels = Counter[int]()
        for change in trace.changes:
            levels[change.storage] += change.delta
            assert levels[change.storage] >= 0
        parts = parts_of(trace)
        assert not any(levels[number] for number, part in enumerate(parts) if part == "activations")


class Casting(nn.Module):
    """Casts its input, and once more what is taken of it."""

    def forward(self, given: torch.Tensor, taken: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        return [given.bfloat16(), taken(given).bfloat16()]


@pytest.mark.parametrize(
    ("taken", "copies"),
    [
        (lambda given: given, 1),
        (lambda given: given.view(-1, 4).view(-1), 1),
        (lambda given: given[:4], 2),
        (lambda given: given.view(2, 4), 2),
        (lambda given: given.clone(), 2),
        (lambda given: given.add_(1), 2),
        (lambda given: given.half(), 2),
    ],
)
def test_a_cast_is_repeated_where_it_is_of_the_same_numbers(taken: Callable[..., Any], copies: int) -> None:
    def counted(name: str, phase: Phase = "forward") -> int:
        """Copies in bf16 that are counted while both are there."""
        root = nn.ModuleDict({"layer": Casting()})
        tracker = AllocationTracker("cuda", compiled={name})
        tracker.phase = phase
        with tracker.watching(root), tracker:
            kept = root["layer"](torch.zeros(8), taken)
        numbers = {tracker._enter(copy) for copy in kept}
        assert len({copy.data_ptr() for copy in kept}) == 2
        return len(numbers)

    assert counted("layer") == copies
    assert counted("another") == counted("layer", "evaluation") == 2


@pytest.mark.parametrize(("device", "saves"), [("h100-80g", True), pytest.param("cpu", False, marks=pytest.mark.slow)])
def test_a_gpu_alone_is_predicted_with_the_copies_of_compiled_layers(device: str, saves: bool) -> None:
    compiled, plain = (
        foreseen(device, 80 << 30, train={"precision": "bf16", "compile": choice}) for choice in (True, False)
    )
    assert (compiled.memory.layers[LAYER] < plain.memory.layers[LAYER]) == saves
    assert any(text.endswith("one copy of what is cast several times") for text in compiled.assumptions) == saves
    assert not any("compiled" in text for text in plain.assumptions)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, which other threads can undo
def test_torchs_partitioner_keeps_no_input_of_products_twice() -> None:
    """The part of the compiler that the rule stands on, without the code that inductor then writes."""
    torch.compiler.reset()  # a layer that other tests have compiled often enough is not compiled any more
    torch.manual_seed(0)
    config = tiny_config("llama")
    config._attn_implementation = "eager"
    layer, hidden = LlamaDecoderLayer(config, 0), torch.randn(1, 5, config.hidden_size)
    angles = (torch.ones(1, 5, config.hidden_size // config.num_attention_heads),) * 2

    def repeated(run: Callable[..., Any]) -> int:
        """Hidden states in bf16 among the saved tensors that have the numbers of others, in storages of their own."""
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            run(hidden, position_embeddings=angles)
        found = [one for one in saved if one.dtype == torch.bfloat16 and one.numel() == hidden.numel()]
        storages = {one.data_ptr(): tuple(one.flatten().tolist()) for one in found}
        assert storages
        return len(storages) - len(set(storages.values()))

    assert repeated(layer) == 3  # of keys, values and the second product of the MLP
    assert repeated(torch.compile(layer, backend="aot_eager_decomp_partition", dynamic=False)) == 0
