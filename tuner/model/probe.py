"""Probes at start: does this model keep packed documents apart, and is our output path the model's own?"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tuner.errors import RecipeError
from tuner.model.root import CausalLM
from tuner.model.tokens import NewRows

_FIRST, _SECOND = 7, 9  # document lengths: different, so that a swapped bound shows
LEAK_ALLOWED, DIFFERENCE_ALLOWED = 1e-6, 1e-4
"""What float32 leaves of nothing, relative to the spread of the logits."""


@dataclass(frozen=True)
class IsolationReport:
    """Largest differences relative to the spread of the logits: of a leak, and against the model run alone."""

    leak: float
    against_alone: float


@torch.no_grad()
def require_isolation(root: CausalLM, vocab_size: int, packed: bool = True) -> IsolationReport:
    """Run two packed documents on the CPU, change the first, and want the second unchanged and equal to itself alone.

    The reference is the model's own forward with its stock attention, so a logit transform or an attention option that
    the packed path does not know shows as well. Where rows are never ``packed``, only that comparison is made. All is
    computed in float32, whatever the weights are: rounded to bfloat16 at every step, the logits of two right ways to
    compute a deep model on random tokens are a tenth of their spread apart. Raises RecipeError when our path is not the
    model.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(vocab_size, 32000), (_FIRST + _SECOND,), generator=generator)
    other = ids.clone()
    other[:_FIRST] = (ids[:_FIRST] + 1) % min(vocab_size, 32000)
    try:
        with _in_float32(root):
            second = _second_logits(root, ids) if packed else _only_logits(root, ids[_FIRST:])
            leak = _relative(second, _second_logits(root, other)) if packed else 0.0
            alone = _relative(second, _stock_logits(root, ids[_FIRST:]))
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"{type(root.model).__name__} cannot be trained{' on packed rows' if packed else ''}: {error}",
            hint="choose another model",
        ) from error
    if leak > LEAK_ALLOWED:
        raise RecipeError(
            f"{type(root.model).__name__} cannot be trained on packed rows: its documents see each other "
            f"(a change in one moves the other by {leak:.1e}, allowed {LEAK_ALLOWED:.0e})",
            hint="set data.packing: false and train.micro_batch_size: 1, or choose another model",
        )
    if alone > DIFFERENCE_ALLOWED:
        raise RecipeError(
            f"{type(root.model).__name__} cannot be trained: the logits that would be trained differ from the model's "
            f"own by {alone:.1e}, allowed {DIFFERENCE_ALLOWED:.0e}",
            hint="choose another model",
        )
    return IsolationReport(leak, alone)


@contextmanager
def _in_float32(root: nn.Module) -> Iterator[None]:
    """Within, each module's own parameters are float32 while it runs: one module's worth of memory at a time."""
    # Rows of new tokens are put into the weight of the layer that they belong to, which does not run itself.
    parts = {m: m.parameters(recurse=isinstance(m, NewRows)) for m in root.modules()}
    own = {m: [p for p in parameters if p.is_floating_point()] for m, parameters in parts.items()}
    kept: dict[nn.Module, list[torch.Tensor]] = {}

    def widen(module: nn.Module, inputs: Any) -> None:
        kept[module] = [parameter.data for parameter in own[module]]
        for parameter in own[module]:
            parameter.data = parameter.data.float()

    def restore(module: nn.Module, inputs: Any, output: Any) -> None:
        for parameter, data in zip(own[module], kept.pop(module, []), strict=False):
            parameter.data = data

    with ExitStack() as hooks:
        for module, parameters in own.items():
            if any(parameter.dtype != torch.float32 for parameter in parameters):
                hooks.callback(module.register_forward_pre_hook(widen).remove)
                hooks.callback(module.register_forward_hook(restore, always_call=True).remove)
        yield


def _second_logits(root: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    position_ids = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])
    positions = torch.arange(_FIRST, _FIRST + _SECOND)
    return root.logits(ids, position_ids, (_FIRST, _SECOND), positions).float()


def _only_logits(root: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(_SECOND)
    return root.logits(ids, positions, (_SECOND,), positions).float()


def _stock_logits(root: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    chosen = root.model.config._attn_implementation
    root.model.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = root.model(input_ids=ids[None], use_cache=False).logits[0].float()
    finally:
        root.model.set_attn_implementation(chosen)
    return logits


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / (b - b.mean(-1, keepdim=True)).norm().clamp_min(1e-12))
