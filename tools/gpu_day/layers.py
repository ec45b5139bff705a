"""Decoder layers recomputed, compiled and by liger's kernels: gradients of the plain ones, with LoRA and dropout."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tools.commands import workplace
from tools.gpu_day.record import Day, off
from tuner.model import blocks
from tuner.model.adapter import LoraSpec, add_lora
from tuner.model.build import ModelSpec, build_model
from tuner.model.documents import Padding
from tuner.model.kernels import apply_liger
from tuner.model.root import CausalLM

LENGTHS = (300, 120, 50)
LEVELS = ("none", "selective", "full")
VOCABULARY = 1000
ALLOWED = 1e-1
"""Of bf16's rounding, which the ways do in other orders; a rotation done twice is off by a half."""
ALLOWED_SLOPE = 0.1


@dataclass(frozen=True)
class Way:
    """One way to run a small model."""

    kind: str = "llama"
    level: str = "none"
    lora: bool = False
    dropout: float = 0.0
    liger: bool = False
    compiled: bool = False

    @property
    def plain(self) -> Way:
        """The same model without any of it."""
        return replace(self, level="none", liger=False, compiled=False)

    def __str__(self) -> str:
        words = [self.kind, self.level]
        words += [name for name in ("lora", "liger", "compiled") if getattr(self, name)]
        return " ".join(words)


def config_of(kind: str, small: bool) -> Any:
    """A model of four layers, two where the day is small, with heads of 64."""
    from transformers.models.gemma3 import Gemma3TextConfig
    from transformers.models.llama import LlamaConfig
    from transformers.models.mistral import MistralConfig
    from transformers.models.qwen3 import Qwen3Config

    layers, width = (2, 64) if small else (4, 256)
    made = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen3": Qwen3Config, "gemma3": Gemma3TextConfig}[kind]
    extra: dict[str, Any] = {}
    if kind == "gemma3":
        extra = {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "query_pre_attn_scalar": 64}
    if kind in ("gemma3", "mistral"):
        extra["sliding_window"] = 64
    return made(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 64, head_dim=64, max_position_embeddings=1024,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False, **extra,
    )  # fmt: skip


def built(day: Day, way: Way) -> CausalLM:
    """The model of a way, the same weights for every one of its kind."""
    with workplace() as place:
        config_of(way.kind, day.small).save_pretrained(place)
        dtype = torch.bfloat16 if way.lora else torch.float32
        root = CausalLM(build_model(ModelSpec(str(place), random_init=True), dtype, seed=1))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in root.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.08)
        if way.lora:
            add_lora(root.model, LoraSpec(8, 16.0, way.dropout, "all-linear"), seed=2)
            for name, parameter in root.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.05)
    root.to(day.device)
    if way.liger:
        apply_liger(root.model)
    if way.level != "none":
        blocks.apply_recompute(root, "selective" if way.level == "selective" else "full")
    if way.compiled:
        torch._dynamo.reset()
        blocks.compile_blocks(root, Padding(512, 512))
    return root.train()


def gradient(day: Day, root: CausalLM, bf16: bool = True) -> tuple[float, torch.Tensor]:
    """The loss of one row of three documents, and all gradients as one vector."""
    lengths = (20, 7, 5) if day.small else LENGTHS
    tokens = sum(lengths)
    ids = torch.randint(3, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(7)).to(day.device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(day.device)
    at = torch.arange(tokens - 1, device=day.device)
    root.zero_grad()
    torch.manual_seed(11)
    with day.autocast() if bf16 else contextlib.nullcontext():
        loss = root(ids, positions, lengths, at, ids[1:])
    loss.backward()
    found = [parameter.grad.flatten().float() for parameter in root.parameters() if parameter.grad is not None]
    return float(loss), torch.cat(found)


def compared(day: Day, ways: list[Way]) -> dict[str, Any]:
    """How far the gradients of some ways are from the plain model's, and from themselves when taken again."""
    apart: dict[str, float] = {}
    again = 0.0
    for way in ways:
        with unpatched(way.kind):
            _, wanted = gradient(day, built(day, way.plain))
            root = built(day, way)
            _, found = gradient(day, root)
            _, repeated = gradient(day, root)
        apart[str(way)], again = off(found, wanted), max(again, off(repeated, found))
    worst = max(apart, key=lambda name: apart[name])
    wrong = {name: round(error, 4) for name, error in apart.items() if not error < ALLOWED}
    return {
        "ok": not wrong, "ways": len(ways), "largest error": f"{apart[worst]:.2e}", "of": worst,
        "same way again": f"{again:.1e}", "wrong": wrong,
    }  # fmt: skip


@contextlib.contextmanager
def unpatched(kind: str) -> Iterator[None]:
    """Put back, at the end, what liger changes in an architecture's module for every model of the process."""
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    before = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(before)


def slopes(day: Day, ways: list[Way]) -> dict[str, Any]:
    """Whether dropout draws the same numbers when a layer is run again: the gradient is the slope of the loss."""
    found, step = {}, 1e-3
    for way in ways:
        root = built(day, way).float()
        gradient(day, root, bf16=False)
        moved = [parameter for parameter in root.parameters() if parameter.grad is not None]
        generator = torch.Generator(day.device).manual_seed(3)
        along = [torch.randn(p.shape, generator=generator, device=day.device) for p in moved]
        slope = sum(float((p.grad * v).sum()) for p, v in zip(moved, along, strict=True) if p.grad is not None)
        losses = []
        for factor in (step, -2 * step):
            with torch.no_grad():
                for parameter, direction in zip(moved, along, strict=True):
                    parameter.add_(direction, alpha=factor)
            losses.append(gradient(day, root, bf16=False)[0])
        found[str(way)] = (round(slope, 3), round((losses[0] - losses[1]) / 2 / step, 3))
    ok = all(abs(a - b) <= ALLOWED_SLOPE * max(abs(a), abs(b)) for a, b in found.values())
    return {"ok": ok, "gradient and slope": found}


def correctness(day: Day) -> None:
    """Every way that training can take through a decoder layer."""
    kinds = ("llama",) if day.small else ("llama", "mistral", "qwen3", "gemma3")
    both = (False, True)
    recomputed = [Way(kind, level, lora) for kind in kinds for level in LEVELS[1:] for lora in both]
    day.check("recomputed layers, gradients", lambda: compared(day, recomputed))
    if day.on_gpu:  # Triton's kernels need one
        for kind in kinds:
            with_liger = [Way(kind, level, liger=True) for level in LEVELS]
            day.check(f"liger's layers, gradients: {kind}", lambda ways=with_liger: compared(day, ways))
    levels = LEVELS[1:2] if day.small else LEVELS
    loras = (True,) if day.small else both
    compiled = [Way(kind, level, lora, compiled=True) for kind in kinds for level in levels for lora in loras]
    with interpreted(day):
        for way in compiled:
            day.check(f"compiled layers, gradients: {way}", lambda way=way: compared(day, [way]))
        drawn = [Way(lora=True, dropout=0.3, level=level) for level in LEVELS[1:]]
        drawn += [Way(lora=True, dropout=0.3, level=level, compiled=True) for level in LEVELS if day.on_gpu]
        day.check("dropout is drawn alike when a layer is run again", lambda: slopes(day, drawn))


@contextlib.contextmanager
def interpreted(day: Day) -> Iterator[None]:
    """Where the day is small, trace layers as for a compilation, and run their graphs as they are."""
    before = blocks.BACKEND
    blocks.BACKEND = "eager" if day.small else before
    try:
        yield
    finally:
        blocks.BACKEND = before
