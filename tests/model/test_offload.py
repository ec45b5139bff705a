"""Inputs of recomputed layers on the host: the same bits, gone from the device meanwhile, no race between streams."""

import gc
import sys
import weakref
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.fixtures.cuda_races import watched_streams
from tests.fixtures.packed import LENGTHS, drawn_root, gradient, packed_inputs, random_ids
from tests.model.tiny import family_config
from tuner.errors import MachineError, RecipeError
from tuner.model import blocks as recomputing
from tuner.model import offload
from tuner.model.adapter import LoraSpec
from tuner.model.blocks import apply_offload, apply_recompute, compile_blocks
from tuner.model.build import decoder_blocks
from tuner.model.documents import Padding
from tuner.model.offload import IN_FLIGHT, CudaLane, HostInputs
from tuner.model.root import CausalLM

LAYERS = 4
LORA = LoraSpec(4, 8.0, 0.3, "all-linear")
Level = Literal["selective", "full"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BLOCK", 1 << 12)  # an input of 69 tokens takes three


def root_for(kind: str, directory: Path, lora: LoraSpec | None = None) -> CausalLM:
    config = family_config(kind, tied=False)
    config.num_hidden_layers = LAYERS
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * LAYERS)[:LAYERS]
    return drawn_root(config, directory, lora=lora).train()


def offloaded(kind: str, directory: Path, level: Level = "full", lora: LoraSpec | None = None) -> Any:
    root = root_for(kind, directory, lora)
    apply_recompute(root, level)
    return root, apply_offload(root)


def loss_of(root: CausalLM, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    torch.manual_seed(5)
    loss: torch.Tensor = root(document_lengths=lengths, **packed_inputs(random_ids(97)[: sum(lengths)], lengths))
    return loss


def gradients_of(root: CausalLM) -> torch.Tensor:
    root.zero_grad()
    loss_of(root).backward()
    return gradient(root)


@pytest.mark.parametrize(
    ("kind", "lora", "level"),
    [
        ("llama", None, "full"), ("llama", LORA, "selective"), ("gpt2", None, "full"), ("qwen3-moe", None, "selective"),
        pytest.param("llama", None, "selective", marks=pytest.mark.slow),
        pytest.param("llama", LORA, "full", marks=pytest.mark.slow),
        pytest.param("gpt2", None, "selective", marks=pytest.mark.slow),
        pytest.param("qwen3-moe", None, "full", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_the_same_bits(kind: str, lora: LoraSpec | None, level: Level, tmp_path: Path) -> None:
    expected = gradients_of(root_for(kind, tmp_path, lora))
    root, inputs = offloaded(kind, tmp_path, level, lora)
    for _ in range(2):
        assert torch.equal(gradients_of(root), expected)
        assert len(inputs._free) == inputs.n_blocks == 3 * LAYERS
        assert not inputs._away and not inputs._leaving


def test_the_device_keeps_the_newest_inputs_alone(tmp_path: Path) -> None:
    root, _ = offloaded("llama", tmp_path)
    storages: list[weakref.ref[Any]] = []
    for block in decoder_blocks(root.model):
        block.register_forward_pre_hook(lambda _, args: storages.append(weakref.ref(args[0].untyped_storage())))
    loss = loss_of(root)
    gc.collect()
    assert [ref() is not None for ref in storages] == [False] * (LAYERS - IN_FLIGHT) + [True] * IN_FLIGHT
    loss.backward()
    assert all(ref() is None for ref in storages)


def test_one_layer_s_inputs_come_back_ahead_of_it(tmp_path: Path) -> None:
    root, inputs = offloaded("llama", tmp_path)
    there: list[list[int]] = []

    def note(*_: Any) -> None:
        there.append([number for number, place in enumerate(inputs._away) if place.here is not None])

    loss = loss_of(root)
    for block in decoder_blocks(root.model):
        block.mlp.register_forward_pre_hook(note)  # in the backward pass, where the layer is computed again
    loss.backward()
    # The layer's own, as far as the graph has not taken it over, and that of the layer below.
    assert there == [[2, 3], [1, 2], [0], []]


def test_rows_of_other_lengths_use_the_same_blocks_again(tmp_path: Path) -> None:
    root, inputs = offloaded("llama", tmp_path)
    loss_of(root).backward()
    first = inputs.n_blocks
    for lengths in ((5,), (40, 20), (30, 3)):
        loss_of(root, lengths).backward()
    assert inputs.n_blocks == first


def test_a_forward_that_fails_gives_everything_back(tmp_path: Path) -> None:
    root, inputs = offloaded("llama", tmp_path)
    expected = gradients_of(root)

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    hook = decoder_blocks(root.model)[3].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        loss_of(root)
    hook.remove()
    gc.collect()
    assert len(inputs._free) == inputs.n_blocks
    assert torch.equal(gradients_of(root), expected)


def test_views_of_one_storage_are_one_copy() -> None:
    inputs, weight = HostInputs(), torch.ones(3, 3, requires_grad=True)
    row = torch.arange(18.0).reshape(6, 3) @ weight

    def layer(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (first @ weight).sum() * (second[:, None] ** 2).sum() + (first.T**3).sum()

    expected = torch.autograd.grad(layer(row, row[2:, 1]), weight, retain_graph=True)[0]
    output = inputs.run(layer, "first", row, row[2:, 1])
    assert len(inputs._away) == 1
    assert torch.equal(torch.autograd.grad(output, weight)[0], expected)


def test_a_layer_that_changes_its_input_is_refused() -> None:
    inputs, weight = HostInputs(), torch.ones(3, requires_grad=True)
    row = torch.ones(3)
    output = inputs.run(lambda given: (given * weight).sum(), "given", row)
    row.add_(1)
    with pytest.raises(RecipeError, match="changes its own input in place"):
        output.backward()


def test_a_full_host_is_named_with_the_line_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weight = HostInputs(), torch.ones(3, requires_grad=True)

    def run() -> torch.Tensor:
        output: torch.Tensor = inputs.run(lambda given: (given * weight).sum(), "given", given=torch.ones(3))
        return output

    def refused(*_: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(offload, "host_memory", lambda: (1 << 30, 100))
    with pytest.raises(MachineError, match="has no room for the layers' inputs") as raised:
        run()
    assert "offload_activations: false" in str(raised.value.hint)
    monkeypatch.undo()
    monkeypatch.setattr(offload, "host_empty", refused)
    with pytest.raises(MachineError, match="out of memory"):
        run()


class Careless(CudaLane):
    """A lane that leaves the waits out that one place of the code asks for."""

    forgets = ""

    def copy(self, pairs: Any) -> Any:
        if sys._getframe(1).f_code.co_name != self.forgets:
            return super().copy(pairs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._stream, "wait_stream", lambda other: None)
            return super().copy(pairs)

    def wait(self, moved: Any) -> None:
        if sys._getframe(1).f_code.co_name != self.forgets:
            super().wait(moved)


def raced(root: CausalLM, inputs: HostInputs, forgets: str) -> tuple[torch.Tensor, list[str], int]:
    """The gradients of two micro-batches on watched streams, the races that there were, and how many copies."""
    root.zero_grad()
    with watched_streams() as races:
        lane = Careless(torch.device("cuda"))
        lane.forgets, inputs._lane = forgets, lane
        for _ in range(2):
            loss_of(root).backward()
        found = list(races.found)
    return gradient(root), found, races.copies


def test_streams_wait_for_each_other(tmp_path: Path) -> None:
    root, inputs = offloaded("llama", tmp_path)
    expected = root_for("llama", tmp_path)
    for _ in range(2):
        loss_of(expected).backward()
    found, races, copies = raced(root, inputs, "")
    assert races == []
    assert torch.equal(found, gradient(expected))
    assert copies == 2 * 3 * (LAYERS + LAYERS - IN_FLIGHT), "each block leaves, and those come back that were away"


@pytest.mark.parametrize("forgets", ["_leave", "_let_go", "_bring", "_unpack", "_end"])
def test_a_missing_wait_is_a_race(forgets: str, tmp_path: Path) -> None:
    assert raced(*offloaded("llama", tmp_path), forgets)[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.*context_fn")
def test_compiled_layers_keep_their_inputs_on_the_host_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputing, "BACKEND", "aot_eager")
    root = root_for("llama", tmp_path)
    apply_recompute(root, "full")
    compile_blocks(root, Padding(96, 64))
    expected = gradients_of(root)
    inputs = apply_offload(root)
    assert torch.equal(gradients_of(root), expected)
    assert inputs.n_blocks == 3 * LAYERS
