"""The MLP over tiles of positions: the plain model's gradients, and no intermediate of the whole row."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.fixtures.packed import LENGTHS, drawn_root, gradient, packed_inputs, random_ids, relative
from tests.fixtures.tensors import Operations
from tests.model.tiny import FAMILIES, family_config
from tuner.errors import RecipeError
from tuner.model import blocks as recomputing
from tuner.model import tiles
from tuner.model.adapter import LoraSpec
from tuner.model.blocks import apply_offload, apply_recompute, compile_blocks
from tuner.model.build import decoder_blocks
from tuner.model.documents import Padding
from tuner.model.kernels import apply_native
from tuner.model.root import CausalLM, position_losses
from tuner.model.tiles import apply_tiles, compile_tiles, mlps_of, prove_tiles

TOKENS, TILE, WIDE = sum(LENGTHS), 23, 48
"""Of 69 tokens in rows of 32 numbers: three tiles alike."""
LORA = LoraSpec(4, 8.0, 0.0, "all-linear")
DROPPED = LoraSpec(4, 8.0, 0.3, "all-linear")
Level = Literal["none", "selective", "full"]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "LEAST", 8)


def root_for(family: str, directory: Path, lora: LoraSpec | None = None) -> CausalLM:
    return drawn_root(family_config(family, tied=False), directory, spread=6.0, lora=lora).train()


def tiled(root: CausalLM, level: Level = "none", offload: bool = False) -> CausalLM:
    apply_tiles(root)
    if level != "none":
        apply_recompute(root, level)
    if offload:
        apply_offload(root)
    return root


def gradients_of(root: CausalLM, bf16: bool = False) -> torch.Tensor:
    root.zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16, cache_enabled=False):
        loss = root(document_lengths=LENGTHS, **packed_inputs(random_ids(97), LENGTHS))
    loss.backward()
    return gradient(root)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_plain_models(family: str, tmp_path: Path) -> None:
    expected = gradients_of(root_for(family, tmp_path))
    root = root_for(family, tmp_path)
    prove_tiles(root)
    assert relative(gradients_of(tiled(root)), expected) < 1e-6


@pytest.mark.parametrize(
    ("level", "native"),
    [
        ("none", False), ("selective", True), ("full", False), ("full", True),
        pytest.param("none", True, marks=pytest.mark.slow), pytest.param("selective", False, marks=pytest.mark.slow),
    ],
)
def test_with_every_level_and_kernels_and_offload(level: Level, native: bool, tmp_path: Path) -> None:
    expected = gradients_of(root_for("llama", tmp_path, LORA))
    root = root_for("llama", tmp_path, LORA)
    if native:
        apply_native(root.model)
    found = gradients_of(tiled(root, level, offload=level != "none"))
    assert relative(found, expected) < 1e-6


def test_dropout_draws_the_same_numbers_in_both_passes(tmp_path: Path) -> None:
    plain = gradients_of(root_for("llama", tmp_path, DROPPED))
    found = {level: gradients_of(tiled(root_for("llama", tmp_path, DROPPED), level)) for level in ("none", "full")}
    assert torch.equal(found["none"], found["full"])
    assert relative(found["none"], plain) > 1e-3, "the draws are others than without tiles"
    assert 0.8 < float(found["none"].norm() / plain.norm()) < 1.25
    # The gradient is that of the loss: a step along it changes the loss of the same draws as it says.
    root = tiled(root_for("llama", tmp_path, DROPPED))
    slope = gradients_of(root).double().square().sum()

    def loss() -> float:
        torch.manual_seed(5)
        with torch.no_grad():
            return float(root(document_lengths=LENGTHS, **packed_inputs(random_ids(97), LENGTHS)).double())

    def moved(size: float) -> float:
        with torch.no_grad():
            for parameter in root.parameters():
                if parameter.grad is not None:
                    parameter.sub_(size * parameter.grad)
        return loss()

    size = 2e-2 / float(slope)
    ahead = moved(size)
    behind = moved(-2 * size)
    assert (behind - ahead) / 4e-2 == pytest.approx(1.0, abs=0.02), "draws of its own in the backward pass: 0.95"


def rows(func: Any, args: Any, result: Any) -> list[int]:
    """Rows of the tensors that are as wide as the MLP's intermediates."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return [leaf.shape[-2] for leaf in leaves if leaf.ndim > 1 and leaf.shape[-1] == WIDE]


@pytest.mark.parametrize("level", ["none", "selective", "full"])
def test_no_intermediate_has_the_whole_row(level: Level, tmp_path: Path) -> None:
    root = tiled(root_for("llama", tmp_path), level)
    with Operations(rows) as seen:
        gradients_of(root)
    assert max(seen.found) == 32, "the weight of down_proj; a tile has 23 rows"
    plain = root_for("llama", tmp_path)
    with Operations(rows) as seen:
        gradients_of(plain)
    assert max(seen.found) == TOKENS


@pytest.mark.parametrize(("level", "times"), [("none", 2), ("selective", 2), ("full", 2)])
def test_a_layer_that_is_computed_again_makes_its_mlp_once_more_alone(level: Level, times: int, tmp_path: Path) -> None:
    root, calls = tiled(root_for("llama", tmp_path), level), []
    decoder_blocks(root.model)[0].mlp.gate_proj.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape))
    gradients_of(root)
    assert calls == [(1, TILE, 32)] * 3 * times


def test_gradients_of_bf16_weights_are_added_up_in_float32(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)).bfloat16()
    row = torch.randn(1, 4096, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    up = torch.randn(1, 4096, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = torch.autograd.grad(module.float()(row.float()), [*module.parameters()], up.float())
    module = module.bfloat16()
    found = torch.autograd.grad(tiles._Tiles(module)(row), [*module.parameters()], up)
    for each, expected in zip(found, exact, strict=True):
        assert each.dtype == torch.bfloat16
        assert relative(each.float(), expected) < 2**-8, "512 tiles added up in bfloat16 are off by ten times as much"


def test_under_autocast_gradients_are_as_close_to_float32_as_the_plain_ones(tmp_path: Path) -> None:
    exact = gradients_of(root_for("llama", tmp_path))
    plain = relative(gradients_of(root_for("llama", tmp_path), bf16=True), exact)
    assert relative(gradients_of(tiled(root_for("llama", tmp_path), "full"), bf16=True), exact) < 1.1 * plain


def test_without_gradients_rows_are_tiled_too(tmp_path: Path) -> None:
    root = root_for("llama", tmp_path).eval()
    inputs = packed_inputs(random_ids(97), LENGTHS)
    expected = root(document_lengths=LENGTHS, **inputs, objective=position_losses).detach()
    tiled(root)
    with torch.no_grad(), Operations(rows) as seen:
        found = root(document_lengths=LENGTHS, **inputs, objective=position_losses)
    assert max(seen.found) == 32
    assert torch.allclose(found, expected, rtol=1e-5)


class Shifted(nn.Module):
    """Looks at the position before, as RWKV's does."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(32, 32)

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.up_proj(nn.functional.pad(row, (0, 0, 1, -1)))
        return found


class Counting(Shifted):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += row.shape[-2]
        found: torch.Tensor = self.up_proj(row)
        return found


class Two(Shifted):
    def forward(self, row: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return row


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Shifted, "makes of a position what depends on others"),
        (Counting, "keeps sums over the tokens that it sees"),
        (Two, "takes row, routes"),
    ],
)
def test_what_is_not_computed_position_by_position_is_refused(kind: type[nn.Module], why: str, tmp_path: Path) -> None:
    root = root_for("llama", tmp_path)
    decoder_blocks(root.model)[1].mlp = kind()
    with pytest.raises(RecipeError, match=f"train.tiled_mlp: mlp of LlamaDecoderLayer .*{why}"):
        prove_tiles(root)


def test_a_layer_without_an_mlp_of_its_own_is_refused(tmp_path: Path) -> None:
    root = root_for("llama", tmp_path)
    for block in decoder_blocks(root.model):
        block.fc1 = block.mlp
        del block.mlp
        assert mlps_of(block) == {}
    with pytest.raises(RecipeError, match="LlamaDecoderLayer has no MLP as a module of its own"):
        apply_tiles(root)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.*context_fn")
@pytest.mark.parametrize("level", ["none", "selective", "full"])
def test_compiled_layers_are_tiled(level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputing, "BACKEND", "aot_eager")
    expected = gradients_of(root_for("llama", tmp_path))
    root = root_for("llama", tmp_path)
    apply_tiles(root)
    compile_tiles(root, "aot_eager")
    compile_blocks(root, Padding(96, 64))
    if level != "none":
        apply_recompute(root, level)
    with Operations(rows) as seen:
        found = gradients_of(root)
    assert relative(found, expected) < 1e-6
    assert max(seen.found) == 32
