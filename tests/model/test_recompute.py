"""Recomputed layers: the plain model's gradients, dropout or not, from fewer bytes; a layer that is computed a
second time routes its tokens as it did the first time.
"""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from tests.fixtures.packed import LENGTHS, drawn_root, gradient, packed_inputs, random_ids
from tests.model.tiny import family_config, tiny_config
from tuner.errors import RecipeError
from tuner.model.adapter import LoraSpec
from tuner.model.blocks import _policy, apply_recompute, spread
from tuner.model.build import ModelSpec, build_model
from tuner.model.replay import noted, replayed
from tuner.model.root import CausalLM
from tuner.model.trainable import TrainableSpec
from tuner.model.wrap import Wrapper, wrappers_of
from tuner.parallel.assemble import AssemblySpec, Recompute, assemble
from tuner.profile.recorder import memory_record

LEVELS: tuple[Literal["selective", "full"], ...] = ("selective", "full")


def root_for(kind: str, directory: Path, dropout: bool = False, lora: LoraSpec | None = None) -> CausalLM:
    config = tiny_config(kind)
    if dropout and kind == "gpt2":
        config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.3
    elif dropout:
        config.attention_dropout = 0.3
    return drawn_root(config, directory, lora=lora).train()


def gradients_of(root: CausalLM, bf16: bool = False) -> torch.Tensor:
    root.zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = root(document_lengths=LENGTHS, **packed_inputs(random_ids(97), LENGTHS))
    loss.backward()
    return gradient(root)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_gradients_are_the_plain_models(kind: str, dropout: bool, tmp_path: Path) -> None:
    expected = gradients_of(root_for(kind, tmp_path, dropout))
    for level in LEVELS:
        root = root_for(kind, tmp_path, dropout)
        apply_recompute(root, level)
        assert torch.equal(gradients_of(root), expected), level
    if dropout:
        assert not torch.equal(expected, gradients_of(root_for(kind, tmp_path))), "dropout must have acted"


def test_modules_of_layers_are_recomputed_in_place_of_layers(tmp_path: Path) -> None:
    expected = gradients_of(root_for("llama", tmp_path, dropout=True))
    root = root_for("llama", tmp_path, dropout=True)
    apply_recompute(root, "full", modules=["mlp", "layers.1.self_attn", "gate_proj"])
    wrapped = {name for name, module in root.model.named_modules() if Wrapper.RECOMPUTED in wrappers_of(module)}
    assert wrapped == {"model.layers.0.mlp", "model.layers.1.mlp", "model.layers.1.self_attn"}
    forwards: list[str] = []
    for name in ("gate_proj", "up_proj"):
        module = root.model.get_submodule(f"model.layers.0.mlp.{name}")
        module.register_forward_pre_hook(lambda module, given, name=name: forwards.append(name))
    assert torch.equal(gradients_of(root), expected)
    assert forwards == ["gate_proj", "up_proj"] * 2
    with pytest.raises(RecipeError, match=r"train.gradient_checkpointing_modules: 'embed_tokens' matches nothing"):
        apply_recompute(root_for("llama", tmp_path), "full", modules=["embed_tokens"])


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_an_adapter_with_dropout_in_bf16(
    level: Literal["selective", "full"], dora: bool, tmp_path: Path
) -> None:
    lora = LoraSpec(4, 8.0, 0.3, "all-linear", use_dora=dora)
    expected = gradients_of(root_for("llama", tmp_path, lora=lora), bf16=True)
    root = root_for("llama", tmp_path, lora=lora)
    apply_recompute(root, level, 1)
    assert torch.equal(gradients_of(root, bf16=True), expected)


def forward_bytes(root: CausalLM, bf16: bool) -> int:
    """Bytes of the tensors that forward made and that wait for the backward pass."""
    inputs = packed_inputs(random_ids(97), LENGTHS)
    told = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16, cache_enabled=False), told:
        loss = root(document_lengths=LENGTHS, **inputs)
    loss.backward()
    return memory_record(told, "cpu", [], []).totals()[-1]


@pytest.mark.parametrize("bf16", [False, True])
def test_fewer_bytes_wait_for_the_backward_pass(bf16: bool, tmp_path: Path) -> None:
    plain = forward_bytes(root_for("llama", tmp_path), bf16)
    held: dict[tuple[str, int], int] = {}
    for level in LEVELS:
        for layers in (1, 2):
            root = root_for("llama", tmp_path)
            apply_recompute(root, level, layers)
            held[level, layers] = forward_bytes(root, bf16)
    assert held["full", 2] < held["full", 1] < plain
    assert held["selective", 2] < held["selective", 1] < plain
    assert held["full", 2] < held["selective", 2]


def test_a_kernel_that_draws_random_numbers_is_run_again() -> None:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
    heads = torch.zeros(1, 1, 2, 8)
    assert _policy(None, kernel, heads, heads, heads) == CheckpointPolicy.MUST_SAVE
    for given in ((0.1,), ()):
        kept = _policy(None, kernel, heads, heads, heads, *given, **({} if given else {"dropout_p": 0.1}))
        assert kept == CheckpointPolicy.PREFER_RECOMPUTE


def test_a_product_that_costs_little_for_what_it_makes_is_made_again() -> None:
    mm, addmm = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
    few, many, bias = torch.zeros(3, 4), torch.zeros(4, 32), torch.zeros(32)
    assert _policy(None, mm, few, many) == _policy(None, addmm, bias, few, many) == CheckpointPolicy.PREFER_RECOMPUTE
    assert _policy(None, mm, few, many[:, 1:]) == CheckpointPolicy.MUST_SAVE
    assert _policy(None, addmm, bias[1:], few, many[:, 1:]) == CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("bf16", [False, True])
def test_of_an_adapted_layer_one_result_is_kept(bf16: bool, tmp_path: Path) -> None:
    def held(rank: int) -> int:
        root = root_for("llama", tmp_path, lora=LoraSpec(rank, 8.0, 0.0, ["gate_proj", "up_proj", "down_proj"]))
        apply_recompute(root, "selective")
        return forward_bytes(root, bf16)

    assert held(4) < held(8) - sum(LENGTHS) * 2 * (48 + 48 + 32) * (2 if bf16 else 4) * 0.9


def test_layers_are_evenly_spread() -> None:
    assert spread(4, 4) == [0, 1, 2, 3]
    assert spread(4, 2) == [0, 2]
    assert spread(30, 3) == [0, 10, 20]
    assert spread(5, 4) == [0, 1, 2, 3]


def test_without_gradients_nothing_is_kept_or_run_twice(tmp_path: Path) -> None:
    root = root_for("llama", tmp_path)
    apply_recompute(root, "full")
    runs = []
    root.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    with torch.no_grad():
        root(document_lengths=LENGTHS, **packed_inputs(random_ids(97), LENGTHS))
    assert len(runs) == 1
    gradients_of(root)
    assert len(runs) == 3


class Restless(nn.Module):
    """A router whose scores are others each time, and notes what it chose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5, generator=torch.Generator().manual_seed(0)))
        self.chosen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = tokens @ self.weight + (self.calls == 2) * torch.randn(7, 5)
        values, first = torch.topk(scores, 2, dim=-1)
        columns, second = scores.topk(3, dim=0, sorted=False)
        self.chosen.append((first, second))
        assert torch.equal(values, scores.gather(-1, first)) and torch.equal(columns, scores.gather(0, second))
        return (values * first).sum() + (columns * second).sum() + noted(lambda: float(self.calls))


@pytest.mark.parametrize("replays", [True, False])
def test_the_second_forward_ranks_as_the_first(replays: bool) -> None:
    torch.manual_seed(0)
    router, tokens = Restless(), torch.randn(7, 6, requires_grad=True)
    options: dict[str, Any] = {"context_fn": replayed} if replays else {}
    checkpoint(router, tokens, use_reentrant=False, **options).backward()
    first, second = router.chosen
    assert router.calls == 2
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True)) == replays


def test_what_is_noted_is_made_once_for_both_forwards() -> None:
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    first, second = replayed()
    with first:
        assert [noted(make), noted(make)] == [0, 1]
    for _ in range(2):  # as often as the graph is differentiated
        with second:
            assert [noted(make), noted(make)] == [0, 1]
    assert noted(make) == 2
    assert made == [0, 1, 2]


@pytest.mark.parametrize("level", ["full", "selective"])
def test_gradients_are_those_of_a_model_that_is_not_recomputed(level: Recompute, tmp_path: Path) -> None:
    family_config("qwen3-moe", tied=False).save_pretrained(tmp_path)
    found = []
    for each in ("none", level):
        spec = AssemblySpec(TrainableSpec(drawn=True), seed=0, recompute=each)
        root = assemble(spec, build_model(ModelSpec(str(tmp_path), random_init=True), torch.float32, 1)).train()
        ids = torch.arange(3, 20)
        root(ids, torch.arange(17), (17,), torch.arange(16), ids[1:]).backward()
        found.append([parameter.grad for parameter in root.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
