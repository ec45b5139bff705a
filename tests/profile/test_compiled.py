"""What layers that will be compiled keep: one copy of what the products of a layer would cast each for itself."""

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
from tests.model.tiny import tiny_config
from tests.profile.test_predict import foreseen
from tuner.profile.allocations import AllocationTracker
from tuner.profile.prediction import Phase
from tuner.profile.timeline import memory_timeline, parts_of
from tuner.profile.tracing import StepTrace, trace_step

LAYER = "model.layers.0"
COPY = sum(LONG[-1]) * SHAPE["hidden_size"] * 2
"""Bytes of the hidden states of the last microbatch in bf16."""


@cache
def traced(compiled: bool, level: str = "none") -> StepTrace:
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
    plain, compiled = traced(False), traced(True)
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

    plain, compiled = (fullest(traced(compiled, "full")) for compiled in (False, True))
    assert plain - compiled == 3 * sum(LONG[0]) * SHAPE["hidden_size"] * 2


def test_what_is_counted_once_is_freed_once_and_with_the_last() -> None:
    for trace in (traced(True), traced(True, "full")):
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
