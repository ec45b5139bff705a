"""The MLP of a decoder layer computed over tiles of positions, forward and backward.

What an MLP makes of a position depends on that position alone, and is several times as wide as the row: computed a tile
at a time it never exists for the whole row, only the layer's input and output do (TiledMLP of ALST, Snowflake 2025,
https://arxiv.org/abs/2506.13996). The forward pass keeps the input; the backward pass computes each tile a second time
and differentiates it. Gradients of weights are added up over tiles in float32, or a wider type of their own, and take
their own type once, at the end. Random numbers (dropout of an adapter) are the same in both passes; they are drawn tile
by tile, so a seed gives others than without tiles, of the same distribution.

A module counts as an MLP by its place in the layer, and only where it is shown to compute positions one by one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tuner.errors import RecipeError
from tuner.model.blocks import keeping_nothing
from tuner.model.build import decoder_blocks
from tuner.model.output_layer import gradient_types, spans
from tuner.model.root import CausalLM
from tuner.model.wrap import Wrapper, wrap

LEAST = 1024
"""Positions of a tile at least: products with fewer rows leave a device idle."""
_NAMES = re.compile(r"(.*_)?(mlp|ffn|feed_forward|moe|ff)\d?$")
"""How layers call what they apply to positions after attention."""
_PROBED, _CUT = 24, 7
REASON = 200
"""Letters of an error that are shown."""
_EXACT, _ROUNDED = 1e-4, 3e-2
"""How far two computations of the same rows may be apart, relative to their norm: in float32, and in 16 bits."""


def mlps_of(block: nn.Module) -> dict[str, nn.Module]:
    """What a decoder layer calls as its MLP, by name; none where its products are the layer's own.

    Raises RecipeError where one takes more than the row.
    """
    named = [(name, child) for name, child in block.named_children() if _NAMES.match(name)]
    found = {name: child for name, child in named if any(parameter.ndim > 1 for parameter in child.parameters())}
    for name, module in found.items():
        taken = inspect.signature(module.forward).parameters.values()
        wanted = [one for one in taken if one.kind < one.VAR_POSITIONAL and one.default is one.empty]
        if len(wanted) != 1:
            raise _refused(block, name, f"takes {', '.join(one.name for one in wanted)}")
    return found


def apply_tiles(root: CausalLM) -> None:
    """Compute the MLPs of all decoder layers over tiles, in place; before recomputing is applied.

    Raises RecipeError where no layer has one.
    """
    blocks = decoder_blocks(root.model, "train.tiled_mlp")
    mlps = [module for block in blocks for module in mlps_of(block).values()]
    if not mlps:
        raise RecipeError(
            f"train.tiled_mlp: {type(blocks[0]).__name__} has no MLP as a module of its own",
            hint="write tiled_mlp: false",
        )
    for module in dict.fromkeys(mlps):
        wrap(module, Wrapper.TILED, _forward_over(_Tiles(module)))


def compile_tiles(root: CausalLM, backend: str) -> None:
    """Compile what tiles are made by, in place: the loop over them stays outside of compiled layers."""
    for module in root.modules():
        made: _Tiles | None = getattr(vars(module).get("forward"), "tiles", None)
        if made is not None:
            made.of_tile = _compiled(made, backend)
            wrap(module, Wrapper.UNCOMPILED, torch.compiler.disable(module.forward))


def _forward_over(tiles: _Tiles) -> Any:
    """A function, as compilers and wrappers expect a forward to be."""

    def forward(row: torch.Tensor) -> torch.Tensor:
        return tiles(row)

    forward.tiles = tiles  # type: ignore[attr-defined]
    return forward


def _compiled(tiles: _Tiles, backend: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A tile's forward, compiled in training alone: rows have one size there."""
    plain: Callable[[torch.Tensor], torch.Tensor] = tiles.of_tile
    compiled = torch.compile(plain, backend=backend, dynamic=False)

    def forward(row: torch.Tensor) -> torch.Tensor:
        return compiled(row) if tiles.module.training else plain(row)

    return forward


@torch.no_grad()
def prove_tiles(root: CausalLM) -> None:
    """Show that the MLPs give a part of a row what they give it in the whole row; one of each type.

    On the CPU; of a model without values nothing is shown. Raises RecipeError, naming the first that does not.
    """
    if any(parameter.is_meta for parameter in root.parameters()):
        return
    width, proven = int(root.model.config.get_text_config().hidden_size), set[type]()
    for block in decoder_blocks(root.model, "train.tiled_mlp"):
        for name, module in mlps_of(block).items():
            if type(module) not in proven:
                if (why := _why_not(module, width)) is not None:
                    raise _refused(block, name, why)
                proven.add(type(module))


def _why_not(module: nn.Module, width: int) -> str | None:
    """Why a module cannot be computed over tiles of a row of this width; None where it can."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point() and p.ndim > 1), torch.float32)
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, _PROBED, width, generator=generator).to(dtype)
    was_training = module.training
    changes = [buffer.clone() for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            module.train()
            module(row)  # what it notes of its rows in training is another thing than its result
            module.eval()
            whole, parts = module(row), [module(part) for part in row.split([_CUT, _PROBED - _CUT], 1)]
    except Exception as error:  # noqa: BLE001 - of the model's own code
        return f"does not take a part of a row: {' '.join(str(error).split())[:REASON]}"
    finally:
        module.train(was_training)
    if any(not torch.equal(*pair) for pair in zip(changes, module.buffers(), strict=True)):
        return "keeps sums over the tokens that it sees"
    if not isinstance(whole, torch.Tensor) or whole.shape != row.shape:
        return "gives more than a row"
    off = float((torch.cat(parts, 1) - whole).float().norm() / whole.float().norm().clamp_min(1e-30))
    allowed = _EXACT if dtype.itemsize > 2 else _ROUNDED
    return None if off <= allowed else f"makes of a position what depends on others (off by {off:.1e})"


def _refused(block: nn.Module, name: str, why: str) -> RecipeError:
    return RecipeError(
        f"train.tiled_mlp: {name} of {type(block).__name__} cannot be computed over tiles of positions: it {why}",
        hint="write tiled_mlp: false",
    )


class _Tiles:
    """A module's forward over tiles."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.of_tile: Callable[[torch.Tensor], torch.Tensor] = module.forward

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        """What the module makes of a row ``[..., T, D]``: ``[..., T, D]``."""
        size = self.size(row)
        if size >= row.shape[-2]:
            return self.of_tile(row)
        weights = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if not torch.is_grad_enabled() or not (row.requires_grad or weights):
            return self.whole(row.detach(), size)
        # An own node for what is saved, and before the work: a layer that is computed again in the backward pass stops
        # at the last thing that it saved, so that it makes the MLP's output a second time only where it is wanted.
        kept = _Kept.apply(torch.empty(0, requires_grad=True, device=row.device), row)  # type: ignore[no-untyped-call]
        output: torch.Tensor = _Tiled.apply(self, kept.grad_fn, size, row, *weights)  # type: ignore[no-untyped-call]
        return output

    def size(self, row: torch.Tensor) -> int:
        """Positions of a tile: as many as the row is wide, all tiles alike but the last."""
        most = max(1, max(LEAST, row.shape[-1]) * row.shape[-2] * row.shape[-1] // max(1, row.numel()))
        return -(-row.shape[-2] // -(-row.shape[-2] // most)) if row.shape[-2] else 1

    def whole(self, row: torch.Tensor, size: int) -> torch.Tensor:
        """The output for the whole row, a tile at a time; without gradients."""
        output: torch.Tensor | None = None
        with torch.no_grad(), keeping_nothing():
            for span in spans(row.shape[-2], size):
                part = self.of_tile(row[..., span, :])
                if output is None:
                    output = part.new_empty(*part.shape[:-2], row.shape[-2], part.shape[-1])
                output[..., span, :] = part
        assert output is not None
        return output


class _Kept(torch.autograd.Function):
    """Saves a row for the backward pass of its tiles, which reads it off this node."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[None, None]:
        raise AssertionError("nothing is computed from what this node gives")


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tiles: _Tiles, kept: Any, size: int, row: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.tiles, ctx.kept, ctx.size, ctx.weights = tiles, kept, size, weights
        ctx.replay = _replay(row.device)
        return tiles.whole(row, size)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (row,), weights = ctx.kept.saved_tensors, list(ctx.weights)
        ctx.kept = ctx.weights = None
        wants_row, wanted = ctx.needs_input_grad[3], ctx.needs_input_grad[4:]
        grad_row = torch.empty_like(row) if wants_row else None
        sums: list[torch.Tensor | None] = [None] * len(weights)
        with ctx.replay(), keeping_nothing():
            for span in spans(row.shape[-2], ctx.size):
                part = row[..., span, :].detach().requires_grad_(wants_row)
                with torch.enable_grad():
                    made = ctx.tiles.of_tile(part)
                inputs = [part] * wants_row + weights
                found = list(torch.autograd.grad(made, inputs, upstream[..., span, :], allow_unused=True))
                del made
                if grad_row is not None:
                    grad_row[..., span, :] = found.pop(0)
                _add(sums, found)
                del found, part
        given = [
            None if each is None or not wants else each.to(dtype)
            for each, wants, dtype in zip(sums, wanted, gradient_types(*weights), strict=True)
        ]
        return (None, None, None, grad_row, *given)


def _add(sums: list[torch.Tensor | None], found: Sequence[torch.Tensor | None]) -> None:
    """Add a tile's gradients to the sums, in place, in float32 or their own wider type."""
    for number, gradient in enumerate(found):
        before = sums[number]
        if gradient is None:
            continue
        if before is None:  # a copy: several weights may have one gradient
            sums[number] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        else:
            before.add_(gradient)


def _replay(device: torch.device) -> Callable[[], Any]:
    """A context with the random numbers and the autocast of here and now."""
    kind = device.type
    state, on_device = torch.get_rng_state(), torch.cuda.get_rng_state(device) if kind == "cuda" else None
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    @contextmanager
    def again() -> Iterator[None]:
        devices = [] if on_device is None else [device]
        with torch.random.fork_rng(devices=devices), torch.autocast(kind, dtype, enabled, cache_enabled=False):
            torch.set_rng_state(state)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, device)
            yield

    return again
