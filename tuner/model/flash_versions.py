"""Later flash attentions in place of the second, which torch brings: where installed, and seen to give its results.

The third is for Hopper and the fourth for Blackwell. Torch has them take the place of its own in the whole process
(`torch.nn.attention.activate_flash_attention_impl`).
"""

from __future__ import annotations

import importlib.util
import warnings
from contextlib import suppress
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from tuner.model.cuda_attention import attend, way_and_reason
from tuner.model.documents import Documents
from tuner.model.transformers_private import takes_our_attention
from tuner.runtime.device import generation


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


@dataclass(frozen=True)
class Heads:
    """What a config says of the attention of some layers: numbers of heads, their widths, cap and dropout."""

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
    def of(config: PretrainedConfig) -> list[Heads]:
        """Those of each kind of layers, by the names that configs of transformers give them; none where it has none."""
        with suppress(Exception):  # configs of other kinds of model raise errors of their own
            text = config.get_text_config()
            layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
            return list(dict.fromkeys(Heads._of_layer(layer) for layer in layers))
        return []

    @staticmethod
    def _of_layer(config: PretrainedConfig) -> Heads:
        queries = int(config.num_attention_heads)
        width = getattr(config, "head_dim", None) or config.hidden_size // queries
        if getattr(config, "qk_nope_head_dim", None):  # latent attention (DeepSeek): parts with and without a place
            width = config.qk_nope_head_dim + config.qk_rope_head_dim
        value_width = getattr(config, "v_head_dim", None) or width
        names = ("attention_dropout", "attn_pdrop", "attn_dropout")
        dropout = max(getattr(config, name, None) or 0.0 for name in names)
        is_capped = bool(getattr(config, "attn_logit_softcapping", None))
        keys = int(getattr(config, "num_key_value_heads", None) or queries)
        return Heads(queries, keys, int(width), int(value_width), is_capped, float(dropout))


def kernel_and_reason(config: PretrainedConfig, device_generation: int, precision: str, is_here: bool) -> str:
    """What attends in a model on a CUDA device, in words, with the ``precision`` of the recipe.

    Of a device that is not here, Triton is assumed to be installed, and no later flash attention.
    """
    kinds, found = Heads.of(config), dict[str, None]()
    if not kinds or not takes_our_attention(config):
        return "the model's own"
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
    version = wanted_version(kinds, device_generation) if is_here else None
    for heads in kinds:
        way, words = way_and_reason(device_generation, dtype, heads.widest, heads.is_capped, is_here)
        if heads.dropout:
            words = "torch's, document by document: attention has dropout"
        elif way == "flash" and version is not None:
            words = f"flash attention {version.name[-1]}: {version.module} is installed"
        elif way == "flash":
            words = "flash attention 2"
        found[words] = None
    return "; ".join(found)


def wanted_version(kinds: list[Heads], device_generation: int) -> Version | None:
    """The later flash attention that is for this device and all of these heads that take one, and installed."""
    served = _served(kinds, device_generation)
    # It takes the place of torch's in all that torch does, and none takes dropout.
    if not served or any(heads.dropout for heads in kinds):
        return None
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):  # not in torch 2.11
        return None
    for version in VERSIONS:
        fits = version.generation == device_generation and all(heads.widest <= version.widest for heads in served)
        if fits and version.name in torch.nn.attention.list_flash_attention_impls() and _is_there(version.module):
            return version
    return None


def _served(kinds: list[Heads], device_generation: int) -> list[Heads]:
    """The heads that flash attention serves, in bf16."""
    ways = [way_and_reason(device_generation, torch.bfloat16, one.widest, one.is_capped, False)[0] for one in kinds]
    return [heads for heads, way in zip(kinds, ways, strict=True) if way == "flash"]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a package around it that cannot be imported
        return False


def use_flash_version(config: PretrainedConfig, device: torch.device) -> None:
    """Let the process's flash attention be the latest that device and model take; warn where one turns out wrong.

    Each process decides for itself, before its model attends on the device.
    """
    kinds, major = Heads.of(config), generation(device.index)
    version = wanted_version(kinds, major) if takes_our_attention(config) else None
    if version is not None and (problem := _problem_with(version, _served(kinds, major), device)) is not None:
        warnings.warn(f"{version.module} is installed, and flash attention 2 is used: {problem}", stacklevel=2)
        version = None
    _switch_to(version)


_problems: dict[tuple[str, Heads], str | None] = {}
"""What is wrong with a version for such heads in this process, once that was tried."""
_ours: list[Version] = []
"""The version that this module had torch take, if any: one that others chose stays."""


def _switch_to(version: Version | None) -> None:
    if _ours and _ours[0] != version:
        _ours.clear()
        torch.nn.attention.restore_flash_attention_impl()
    if version is not None and not _ours:
        torch.nn.attention.activate_flash_attention_impl(version.name)
        _ours.append(version)


def _problem_with(version: Version, kinds: list[Heads], device: torch.device) -> str | None:
    """Why a version is not to be used: for some of the heads it fails, or gives other results than the second one."""
    for heads in kinds:
        tried = version.name, heads
        if tried not in _problems:
            _problems[tried] = _tried(version, heads, device)
        if _problems[tried] is not None:
            return _problems[tried]
    return None


def _tried(version: Version, heads: Heads, device: torch.device) -> str | None:
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
