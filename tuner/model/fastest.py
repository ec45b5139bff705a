"""The fastest of several ways to compute the same: measured, and held to the results of the usual one first. Two
choices are made here: which flash attention, and which kernel that turns logits into loss and gradient on a GPU.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from tuner.model import flash4_attention as flash4
from tuner.model.attention import window_of
from tuner.model.cuda_attention import attend, way_and_reason
from tuner.model.documents import Documents
from tuner.model.kernels import KERNELS
from tuner.model.output_layer import positions_of_chunk
from tuner.model.transformers_private import has_sinks, takes_our_attention
from tuner.runtime.device import generation, gpu_memory


class Version(NamedTuple):
    """A later flash attention: its name, the package that brings it, and the module that is looked for."""

    name: str
    package: str
    module: str


FLASH_3 = Version("flash attention 3", "flash-attn-3", "flash_attn_interface")
FLASH_4 = Version("flash attention 4", "flash-attn-4", flash4.MODULE)
VERSIONS = (FLASH_4, FLASH_3)
"""The newest first."""
DIRECTORY = "kernels"
"""Of the cache: what is compiled, and what was measured."""
USUAL_FLASH = "flash attention 2"
WAY_TO_FLASH_4 = "pip install flash-attn-4==4.0.0b36"
MOST_TOKENS = 16384
"""Of the document that is timed: a pass over one of 100,000 takes a second, and rates hardly grow beyond this."""
FLASH_ALLOWED = 2e-2
"""How far results in bf16 may be from those of the second version, relative: twice what rounding makes of them."""


@dataclass(frozen=True)
class Heads:
    """What a config says of the attention of some layers: numbers of heads, their widths, cap and dropout."""

    queries: int
    keys: int
    width: int
    value_width: int
    cap: float
    """Soft bound of the scores; 0: none."""
    dropout: float
    has_sinks: bool = False

    @property
    def widest(self) -> int:
        """Channels of the widest head."""
        return max(self.width, self.value_width)

    def problem(self, device_generation: int, has_window: bool = False) -> str | None:
        """Why the fourth version does not serve them on such a device; None where it does."""
        is_grouped, is_capped = self.queries != self.keys, self.cap > 0
        return flash4.problem(device_generation, self.width, self.value_width, is_grouped, is_capped, has_window)

    @staticmethod
    def of(config: PretrainedConfig) -> list[Heads]:
        """Those of each kind of layers, by the names that configs of transformers give them; none where it has none."""
        with suppress(Exception):  # configs of other kinds of model raise errors of their own
            text = config.get_text_config()
            layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
            sinks = has_sinks(config)
            return list(dict.fromkeys(replace(Heads._of_layer(layer), has_sinks=sinks) for layer in layers))
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
        cap = float(getattr(config, "attn_logit_softcapping", None) or 0.0)
        keys = int(getattr(config, "num_key_value_heads", None) or queries)
        return Heads(queries, keys, int(width), int(value_width), cap, float(dropout))


def kernel_and_reason(config: PretrainedConfig, device_generation: int, precision: str, is_here: bool) -> str:
    """What attends in a model on a CUDA device, in words, with the ``precision`` of the recipe.

    Of a device that is not here, Triton is assumed to be installed, and no later flash attention.
    """
    kinds, found = Heads.of(config), dict[str, None]()
    if not kinds or not takes_our_attention(config):
        return "the model's own"
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
    there = versions_for(kinds, device_generation) if is_here and dtype in flash4.TYPES else ()
    has_window = window_of(config.get_text_config()) is not None
    for heads in kinds:
        _, words = way_and_reason(device_generation, dtype, heads.widest, heads.cap > 0, is_here, heads.has_sinks)
        version = next((one for one in there if _serves(one, heads, device_generation)), None)
        if heads.dropout:
            words = "torch's, document by document: attention has dropout"
        elif version is not None:
            words = f"{version.name}: {version.package} is installed"
            if version is FLASH_4 and has_window and (why := heads.problem(device_generation, has_window)) is not None:
                words += f", but for layers with a window: {why}"
        elif words == "flash attention":
            words = USUAL_FLASH
        if is_here and not there and dtype in flash4.TYPES and _serves(FLASH_4, heads, device_generation):
            words += f" (for this device there is {FLASH_4.name}: {WAY_TO_FLASH_4})"
        found[words] = None
    return "; ".join(found)


def versions_for(kinds: Sequence[Heads], device_generation: int) -> tuple[Version, ...]:
    """The later flash attentions that are installed and take some of these heads on such a device, the newest first."""
    serving = (one for one in VERSIONS if any(_serves(one, heads, device_generation) for heads in kinds))
    return tuple(version for version in serving if _can_be_taken(version, kinds))


def _serves(version: Version, heads: Heads, device_generation: int) -> bool:
    if heads.dropout:
        return False
    if version is FLASH_4:
        return not heads.problem(device_generation)
    way, _ = way_and_reason(device_generation, torch.bfloat16, heads.widest, heads.cap > 0, is_here=False)
    return device_generation == 9 and way == "flash"


def _can_be_taken(version: Version, kinds: Sequence[Heads]) -> bool:
    if version is FLASH_3:  # it takes the place of torch's in all that torch does, and none takes dropout
        if any(heads.dropout for heads in kinds) or not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
            return False  # not in torch 2.11
        if "FA3" not in torch.nn.attention.list_flash_attention_impls():
            return False
    return _is_there(version.module)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a package around it that cannot be imported
        return False


def use_flash_version(config: PretrainedConfig, device: torch.device, cache: Path, wanted: str | None = None) -> None:
    """Let attention be computed by the version of this name, else by the newest that device and model take.

    One that turns out wrong, or is ``wanted`` and cannot be had, is warned of. What is compiled for it is kept in the
    ``cache``. Each process decides for itself, before its model attends on the device.
    """
    flash4.keep_kernels(cache / DIRECTORY)
    kinds, major = Heads.of(config), generation(device.index)
    there = versions_for(kinds, major) if takes_our_attention(config) and wanted != USUAL_FLASH else ()
    chosen = None
    for version in there:
        if wanted in {None, version.name}:
            tried = (_tried(version, heads, device) for heads in kinds if _serves(version, heads, major))
            if (problem := next((why for why in tried if why is not None), None)) is None:
                chosen = version
                break
            warnings.warn(f"{version.package} is installed, and {USUAL_FLASH} is used: {problem}", stacklevel=2)
    if wanted is not None and wanted not in {USUAL_FLASH, *(version.name for version in there)}:
        said = f"the run was trained with {wanted}, which is not here: results may round otherwise"
        warnings.warn(said, stacklevel=2)
    _switch_to(chosen)


def fastest_version(config: PretrainedConfig, device: torch.device, cache: Path, tokens: int) -> Fastest | None:
    """The fastest flash attention for a model's heads in one document of so many tokens, forward and backward.

    None where no other than the usual one is installed that takes any of them.
    """
    flash4.keep_kernels(cache / DIRECTORY)
    kinds, major, tokens = Heads.of(config), generation(device.index), min(tokens, MOST_TOKENS)
    there = versions_for(kinds, major) if takes_our_attention(config) else ()
    if not there:
        return None
    served = [heads for heads in kinds if any(_serves(version, heads, major) for version in there)]

    def candidate(name: str, version: Version | None) -> Candidate:
        def results() -> list[torch.Tensor]:
            with used(version):
                return [tensor for heads in served for tensor in _results(heads, device)]

        inputs = [random_inputs(heads, (tokens,), device) for heads in served]

        def work() -> None:
            with used(version):
                for heads, leaves in zip(served, inputs, strict=True):
                    one_pass(heads, leaves, Documents.of((tokens,), device), 0)

        return Candidate(name, results, work)

    others = [candidate(version.name, version) for version in there]
    return fastest(candidate(USUAL_FLASH, None), others, FLASH_ALLOWED, seconds_on(device))


_ours: list[Version | None] = [None]
"""The version that this module had the process take, if any: one that others chose stays."""


def _switch_to(version: Version | None) -> None:
    before = _ours[0]
    if before != version:
        _ours[0] = None
        flash4.take(version is FLASH_4)
        if before is FLASH_3:
            torch.nn.attention.restore_flash_attention_impl()
        if version is FLASH_3:
            torch.nn.attention.activate_flash_attention_impl("FA3")
        _ours[0] = version


@contextmanager
def used(version: Version | None) -> Iterator[None]:
    """Within, attention is computed by a version, by the usual one for None."""
    before = _ours[0]
    try:
        _switch_to(version)
        yield
    finally:
        _switch_to(before)


@cache
def _tried(version: Version, heads: Heads, device: torch.device) -> str | None:
    """Why a version is not to be used: for these heads it fails, or gives other results than the second one."""
    with used(None):
        before = _results(heads, device)
    try:
        with used(version):
            return problem_with(_results(heads, device), before, FLASH_ALLOWED)
    except Exception as error:  # noqa: BLE001 - whatever a package that is not ours raises
        return (str(error).splitlines() or [type(error).__name__])[0]


def _results(heads: Heads, device: torch.device) -> list[torch.Tensor]:
    """What attention and its gradients are for some documents, with a window and without."""
    lengths = (70, 200, 1, 113)
    leaves, documents = random_inputs(heads, lengths, device), Documents.of(lengths, device)
    return [tensor.float() for window in (0, 64) for tensor in one_pass(heads, leaves, documents, window)]


def random_inputs(heads: Heads, lengths: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """Query, key and value ``[heads, T, d]``, drawn."""
    generator = torch.Generator().manual_seed(0)
    shapes = (heads.queries, heads.width), (heads.keys, heads.width), (heads.keys, heads.value_width)
    drawn = [torch.randn(sum(lengths), *shape, generator=generator) for shape in shapes]
    return [one.to(device, torch.bfloat16).transpose(0, 1).requires_grad_() for one in drawn]


def one_pass(heads: Heads, leaves: list[torch.Tensor], documents: Documents, window: int) -> list[torch.Tensor]:
    """A forward and a backward pass: output and gradients."""
    query, key, value = leaves
    sink = torch.linspace(-1, 2, heads.queries, device=query.device) if heads.has_sinks else None
    output = attend(query, key, value, documents, window, heads.width**-0.5, heads.cap, sink)
    return [output.detach(), *torch.autograd.grad(output, leaves, output.detach() + 0.5)]


GAIN = 0.97
"""A way takes over from the usual one where it takes at most this share of its time: less is within the noise."""
WARM_UP, ROUNDS = 2, 5


@dataclass(frozen=True)
class Candidate:
    """A way to compute: its name, what it gives for small inputs, and the work that is timed."""

    name: str
    results: Callable[[], Sequence[torch.Tensor]]
    work: Callable[[], object]


@dataclass(frozen=True)
class Fastest:
    """What was found: whose kernel is used, how long each right one took, and why others are passed over."""

    name: str
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    passed_over: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """In a few words, the fastest first."""
        times = sorted(self.milliseconds.items(), key=lambda one: one[1])
        found = [f"{name} {each:.3g} ms" for name, each in times]
        return ", ".join([*found, *(f"{name} passed over: {why}" for name, why in self.passed_over.items())])


def fastest(
    usual: Candidate, others: Sequence[Candidate], allowed: float, seconds: Callable[[Callable[[], object]], float]
) -> Fastest:
    """The fastest of some ways whose results are within ``allowed`` of the usual one's, relative by their norms.

    One that raises or is further off is passed over, however fast. ``seconds`` measures the work of one. What the usual
    way raises is raised.
    """
    wanted = [tensor.detach().float() for tensor in usual.results()]
    times, passed_over = {usual.name: seconds(usual.work) * 1e3}, dict[str, str]()
    for other in others:
        try:
            problem = problem_with(other.results(), wanted, allowed)
            if problem is None:
                times[other.name] = seconds(other.work) * 1e3
        except Exception as error:  # noqa: BLE001 - whatever a package that is not ours raises
            problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if problem is not None:
            passed_over[other.name] = problem
    best = min(times, key=lambda name: times[name])
    return Fastest(best if times[best] <= GAIN * times[usual.name] else usual.name, times, passed_over)


def problem_with(results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], allowed: float) -> str | None:
    """How far results are from those that are ``wanted``, by their norms, in words; None within ``allowed``."""
    far = [float((a.detach().float() - b).norm() / b.norm()) for a, b in zip(results, wanted, strict=True)]
    if all(each <= allowed for each in far):  # NaN is not
        return None
    worst = next(filter(math.isnan, far), max(far))
    return f"its results differ by {worst:.1%}"


def seconds_on(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """What measures work on a device: the median of some rounds, each waited for, after some that are not counted."""

    def one(work: Callable[[], object]) -> float:
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # launches return before the device is through
        return time.perf_counter() - begun

    def measure(work: Callable[[], object]) -> float:
        for _ in range(WARM_UP):
            one(work)
        return statistics.median(one(work) for _ in range(ROUNDS))

    return measure


USUAL_LOSS = "liger"
TRIED = 64
"""Positions whose loss and gradient are held to the usual kernel's."""
LOSS_ALLOWED = 1e-2
"""How far they may be from these, relative: twice what rounding to bf16 makes of a gradient."""


def fastest_loss(vocabulary: int, device: torch.device) -> Fastest:
    """The fastest kernel for logits of so many tokens of a vocabulary in bf16; liger's unless another one is faster."""
    generator = torch.Generator(device).manual_seed(0)
    chunk = torch.empty(0, device=device, dtype=torch.bfloat16)
    count = max(TRIED, positions_of_chunk(vocabulary, chunk, gpu_memory(chunk)))
    logits = torch.randn(count, vocabulary, generator=generator, device=device, dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, (count,), generator=generator, device=device)
    first = logits[:TRIED].clone()  # logits become their gradient, as soon as one kernel is timed

    def candidate(name: str) -> Candidate:
        def results() -> list[torch.Tensor]:
            few = first.clone()
            return [KERNELS[name](few, targets[:TRIED], True, None), few]

        return Candidate(name, results, lambda: KERNELS[name](logits, targets, True, None))

    return fastest(candidate(USUAL_LOSS), [candidate("torch")], LOSS_ALLOWED, seconds_on(device))
