"""Which kernel computes attention inside documents on a CUDA device, and why; docs/models.md has the table.

Flash attention is torch's. Its second version is built in; a third (Hopper) and a fourth (Blackwell) take its place
where their packages are installed, once they are seen to give its results on the device.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from transformers import PretrainedConfig

from tuner.model import flash_attention as flash
from tuner.model import triton_attention as by_triton
from tuner.model.blocked_attention import attend_documents
from tuner.model.documents import Documents
from tuner.model.transformers_private import takes_our_attention
from tuner.runtime.device import AMPERE, compiler_problem, generation, is_traced

Way = Literal["flash", "triton", "blocks"]


@dataclass(frozen=True)
class Version:
    """A later flash attention: its name in torch, the package that brings it, and what it takes."""

    name: str
    module: str
    generation: int
    widest: int


VERSIONS = (Version("FA3", "flash_attn_interface", 9, 256), Version("FA4", "flash_attn.cute.interface", 10, 128))
ALLOWED = 2e-2
"""How far results in bf16 may be from those of the second version, relative: twice what rounding makes of them."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def way_on(index: int | None, dtype: torch.dtype, widest: int, is_capped: bool) -> Way:
    """Whose kernel attends on CUDA device ``index``, to compilers a constant; the widest head has so many channels."""
    return way_and_reason(generation(index), dtype, widest, is_capped)[0]


def way_and_reason(
    device_generation: int, dtype: torch.dtype, widest: int, is_capped: bool, is_here: bool = True
) -> tuple[Way, str]:
    """The kernel for a generation of devices, in a word and in words that say why.

    Of a device that is not here, all is taken to be installed.
    """
    if device_generation < AMPERE:
        return "blocks", "blocks of products, several times slower: this device is below compute capability 8.0"
    if dtype in flash.TYPES and widest <= flash.WIDEST and not is_capped:
        return "flash", "flash attention"
    why = "scores have a soft cap" if is_capped else f"heads have {widest} channels"
    if dtype not in flash.TYPES:
        why = f"heads are {str(dtype).removeprefix('torch.')}"
    problem = None if is_traced() or not is_here else _triton_problem()
    if widest > by_triton.WIDEST.get(dtype, 0):
        problem = f"our Triton kernel takes {by_triton.WIDEST.get(dtype, 0)} channels"
    if problem is not None:
        return "blocks", f"blocks of products, several times slower: {why}, and {problem}"
    return "triton", f"our Triton kernel: {why}"


@cache
def _triton_problem() -> str | None:
    return compiler_problem("cuda")


@dataclass(frozen=True)
class Heads:
    """What a model's config says of its attention: numbers of heads, their widths, cap and dropout."""

    queries: int
    keys: int
    width: int
    value_width: int
    is_capped: bool
    dropout: float

    @property
    def widest(self) -> int:
        """Channels of the widest head."""
        return max(self.width, self.value_width)

    @staticmethod
    def of(config: PretrainedConfig) -> Heads:
        """Those of a text model, by the names that configs of transformers give them."""
        text = config.get_text_config()
        queries = int(getattr(text, "num_attention_heads", 0) or 1)
        width = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // queries
        if getattr(text, "qk_nope_head_dim", None):  # latent attention (DeepSeek): parts with and without a place
            width = text.qk_nope_head_dim + text.qk_rope_head_dim
        value_width = getattr(text, "v_head_dim", None) or width
        widest = max(int(width), int(getattr(text, "global_head_dim", None) or 0))
        dropout = max(getattr(text, name, None) or 0.0 for name in ("attention_dropout", "attn_pdrop", "attn_dropout"))
        cap = getattr(text, "attn_logit_softcapping", None)
        keys = int(getattr(text, "num_key_value_heads", None) or queries)
        return Heads(queries, keys, widest, int(value_width), bool(cap), float(dropout))


def kernel_and_reason(config: PretrainedConfig, device_generation: int, precision: str, is_here: bool) -> str:
    """What attends in a model on a CUDA device, in words: ``bf16`` or ``fp32`` is what is computed in."""
    if not takes_our_attention(config):
        return "the model's own"
    heads, dtype = Heads.of(config), torch.bfloat16 if precision == "bf16" else torch.float32
    if heads.dropout:
        return "torch's, document by document: attention has dropout"
    way, words = way_and_reason(device_generation, dtype, heads.widest, heads.is_capped, is_here)
    if way != "flash":
        return words
    version = wanted_version(heads, device_generation) if is_here else None
    return f"{words} 2" if version is None else f"{words} {version.name[-1]}: {version.module} is installed"


def wanted_version(heads: Heads, device_generation: int) -> Version | None:
    """The later flash attention that is for this device and these heads, and installed."""
    # It takes the place of torch's in all that torch does, and none takes dropout.
    if heads.dropout or heads.is_capped or not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return None
    for version in VERSIONS:
        fits = version.generation == device_generation and heads.widest <= version.widest
        if fits and version.name in torch.nn.attention.list_flash_attention_impls() and _is_there(version.module):
            return version
    return None


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a package around it that cannot be imported
        return False


def use_flash_version(config: PretrainedConfig, device: torch.device) -> None:
    """Let the process's flash attention be the latest that device and model take; warn where one turns out wrong.

    Each process decides for itself, before its model attends on the device.
    """
    heads = Heads.of(config)
    version = wanted_version(heads, generation(device.index))
    if version is None:
        _switch_to(None)
        return
    tried = version.name, heads
    if tried not in _problems:
        _problems[tried] = _problem_with(version, heads, device)
        if (problem := _problems[tried]) is not None:
            warnings.warn(f"{version.module} is installed, and flash attention 2 is used: {problem}", stacklevel=2)
    _switch_to(version if _problems[tried] is None else None)


_problems: dict[tuple[str, Heads], str | None] = {}
"""What is wrong with a version for such heads in this process."""
_ours: list[Version] = []
"""The version that this module had torch take, if any: one that others chose stays."""


def _switch_to(version: Version | None) -> None:
    if _ours and _ours[0] != version:
        _ours.clear()
        torch.nn.attention.restore_flash_attention_impl()
    if version is not None and not _ours:
        torch.nn.attention.activate_flash_attention_impl(version.name)
        _ours.append(version)


def _problem_with(version: Version, heads: Heads, device: torch.device) -> str | None:
    """Why a version is not to be used: it fails, or gives other results than the second one."""
    _switch_to(None)
    before = _results(heads, device)
    try:
        _switch_to(version)
        far = max(float((a - b).norm() / b.norm()) for a, b in zip(_results(heads, device), before, strict=True))
    except Exception as error:  # noqa: BLE001 - whatever a package that is not ours raises
        return (str(error).splitlines() or [type(error).__name__])[0]
    finally:
        _switch_to(None)
    return None if far <= ALLOWED else f"its results differ by {far:.1%}"


def _results(heads: Heads, device: torch.device) -> list[torch.Tensor]:
    """What attention and its gradients are for some documents, with a window and without."""
    lengths, generator = (70, 200, 1, 113), torch.Generator().manual_seed(0)
    documents, found = Documents.of(lengths, device), []
    shapes = (heads.queries, heads.width), (heads.keys, heads.width), (heads.keys, heads.value_width)
    for window in (0, 64):
        given = [torch.randn(sum(lengths), *shape, generator=generator) for shape in shapes]
        leaves = [one.to(device, torch.bfloat16).transpose(0, 1).requires_grad_() for one in given]
        query, key, value = leaves
        output = attend(query, key, value, documents, window, heads.width**-0.5, 0.0)
        grads = torch.autograd.grad(output, leaves, torch.ones_like(output) / 2 + output.detach())
        found += [tensor.detach().float() for tensor in (output, *grads)]
    return found


def attend(  # noqa: PLR0913, PLR0917 - what all kernels are given
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    window: int,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """Attention ``[T, heads, d_value]`` inside documents of query ``[heads, T, d]`` to key and value, by the best way.

    A query sees ``window`` tokens, all before it for 0; a ``cap`` above 0 bends scores s to cap·tanh(s/cap).
    """
    widest = max(query.shape[-1], value.shape[-1])
    way = way_on(query.device.index, query.dtype, widest, cap > 0)
    bounds, longest, output = documents.device, documents.longest, query
    if way == "flash" and flash.IS_TOLD_BY_TENSOR:
        output, _ = flash.flash_attention(query, key, value, bounds, longest, window, scale)
    elif way == "flash":
        output = flash.told_by_number(query, key, value, documents, window, scale)
    elif way == "triton":
        output, _ = by_triton.triton_attention(query, key, value, bounds, longest, window, scale, cap)
    else:
        output = attend_documents(query, key, value, documents.host, window, scale, cap)
    return output
