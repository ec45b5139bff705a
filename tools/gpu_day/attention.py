"""Attention over packed documents: the device's kernel against every document alone in float32, and what it costs."""

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from tools.gpu_day.record import Day, off
from tuner.model.attention import packed_attention
from tuner.model.documents import Documents

HEADS = ((32, 8, 128), (16, 8, 128), (14, 2, 64), (32, 32, 80), (8, 8, 96), (8, 1, 256))
"""Query heads, key heads and width: Qwen3 8B and 0.6B, Qwen2 0.5B, Phi-2, Phi-3-like, Gemma."""
LENGTHS = ((700,), (1,) * 9 + (200, 3, 300), (128, 129, 127, 64))
ALLOWED = 2e-2
"""Off by this share of the norm, at most: bf16 has 8 bits, and sums of hundreds of products."""
LONG = ((4096, 4), (4096, 20), (4096, 100), (16384, 16), (16384, 100))
"""Tokens, and documents of one length among them."""


class Case(NamedTuple):
    """One shape: heads, key heads, widths of keys and of values, and what the layer asks for."""

    heads: int
    kv_heads: int
    width: int
    value_width: int
    options: dict[str, Any]
    by_heads: bool = False
    """Whether tensors lie head by head in memory, not token by token."""
    has_sinks: bool = False

    def sinks(self, like: torch.Tensor) -> torch.Tensor:
        """A sink for each head, the same at each call."""
        return torch.linspace(-1, 3, self.heads, device=like.device)

    def tensors(self, day: Day, tokens: int) -> list[torch.Tensor]:
        """Query, key and value ``[1, heads, T, width]`` in bf16, with gradients wanted."""
        generator = torch.Generator(day.device).manual_seed(0)
        found = []
        for heads, width in (
            (self.heads, self.width), (self.kv_heads, self.width), (self.kv_heads, self.value_width),
        ):  # fmt: skip
            drawn = torch.randn(1, tokens, heads, width, generator=generator, device=day.device)
            lying = drawn.to(torch.bfloat16).transpose(1, 2)
            found.append((lying.contiguous() if self.by_heads else lying).detach().requires_grad_())
        return found


class Layer(nn.Module):
    """What the attention function is told of the layer that calls it."""

    is_causal = True


def attend(case: Case, tensors: list[torch.Tensor], documents: Documents) -> torch.Tensor:
    """The product's attention ``[T, heads, value width]``."""
    sinks = {"s_aux": case.sinks(tensors[0])} if case.has_sinks else {}
    output, _ = packed_attention(
        Layer(), *tensors, scaling=case.width**-0.5, documents=documents, **case.options, **sinks
    )  # fmt: skip
    return output[0]


def alone(case: Case, tensors: list[torch.Tensor], lengths: tuple[int, ...]) -> torch.Tensor:
    """Each document by itself, all scores at one time, in the type of the tensors: ``[T, heads, value width]``."""
    parts, groups = [], case.heads // case.kv_heads
    window, cap = case.options.get("sliding_window"), case.options.get("softcap")
    for query, key, value in zip(*(tensor[0].split(list(lengths), 1) for tensor in tensors), strict=True):
        places = torch.arange(query.shape[1], device=query.device)
        distance = places[:, None] - places[None]
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        scores = query @ key.repeat_interleave(groups, 0).mT * case.width**-0.5
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        scores = scores.masked_fill(~seen, -torch.inf)
        if case.has_sinks:
            sinks = case.sinks(scores).to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, sinks], -1)
        share = torch.softmax(scores, -1)[..., : len(places)]
        parts.append((share @ value.repeat_interleave(groups, 0)).transpose(0, 1))
    return torch.cat(parts)


def error_of(day: Day, case: Case, lengths: tuple[int, ...]) -> float:
    """The largest error of the values and of the three gradients."""
    tensors = case.tensors(day, sum(lengths))
    output = attend(case, tensors, Documents.of(lengths, torch.device(day.device)))
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(day.device)
    found = torch.autograd.grad((output.float() * upstream).sum(), tensors)
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    wanted = alone(case, exact, lengths)
    gradients = torch.autograd.grad((wanted * upstream).sum(), exact)
    return max(off(a, b) for a, b in zip((output, *found), (wanted, *gradients), strict=True))


def plain_cases(day: Day) -> list[tuple[Case, tuple[int, ...]]]:
    """Heads by lengths, in windows and out of them, in both layouts."""
    if day.small:
        case = Case(4, 2, 16, 16, {"sliding_window": 8})
        return [(case, (20, 1, 12)), (case._replace(options={}, by_heads=True), (20, 1, 12))]
    ways: tuple[tuple[dict[str, Any], bool], ...] = (({}, False), ({"sliding_window": 64}, False), ({}, True))
    return [
        (Case(heads, kv_heads, width, width, options, by_heads), lengths)
        for (heads, kv_heads, width), lengths, (options, by_heads) in product(HEADS, LENGTHS, ways)
    ]


def judged(day: Day, cases: list[tuple[Case, tuple[int, ...]]]) -> dict[str, Any]:
    """The worst of some cases, and those that are off."""
    errors = [(error_of(day, case, lengths), case, lengths) for case, lengths in cases]
    worst = max(errors, key=lambda one: one[0])
    wrong = [f"{case}, documents of {lengths}: {error:.3g}" for error, case, lengths in errors if not error < ALLOWED]
    return {"ok": not wrong, "shapes": len(cases), "largest error": f"{worst[0]:.2e}", "wrong": wrong[:5]}


SPECIAL = {
    "values narrower than keys, 192 and 128 (DeepSeek)": Case(4, 4, 192, 128, {}),
    "a width that is no multiple of 8": Case(4, 4, 12, 12, {}),
    "heads of 320, above the kernel's widest": Case(4, 4, 320, 320, {}),
    "sinks, in a window (gpt-oss)": Case(64, 8, 64, 64, {"sliding_window": 128}, has_sinks=True),
    "soft-capped scores (Gemma 2)": Case(8, 4, 256, 256, {"softcap": 50.0, "sliding_window": 64}),
}
"""What the kernel of the GPU does not take as it is."""


def correctness(day: Day) -> None:
    """Values and gradients of every shape."""
    day.check("attention, values and gradients", lambda: judged(day, plain_cases(day)))
    lengths = (20, 1, 12) if day.small else (400, 3, 240)
    for name, case in SPECIAL.items():
        day.check(f"attention, {name}", lambda case=case: judged(day, [(case, lengths)]))


def cost(day: Day) -> None:
    """Seconds of a forward and a backward, with the true longest document and with the row's length as the bound."""
    shapes = ((64, 4),) if day.small else LONG
    case = Case(4, 2, 16, 16, {}) if day.small else Case(16, 8, 128, 128, {})
    for tokens, count in shapes:
        lengths = (tokens // count,) * (count - 1) + (tokens - tokens // count * (count - 1),)
        tensors = case.tensors(day, tokens)

        def run(bound: int | None, tensors: list[torch.Tensor] = tensors, own: tuple[int, ...] = lengths) -> None:
            documents = Documents.of(own, torch.device(day.device), bound)
            attend(case, tensors, documents).sum().backward()
            for tensor in tensors:
                tensor.grad = None

        def measured(run: Any = run, tokens: int = tokens) -> dict[str, Any]:
            true, row = day.seconds(lambda: run(None), 20), day.seconds(lambda: run(tokens), 20)
            return {"ms, true longest": round(true * 1e3, 3), "ms, the row as bound": round(row * 1e3, 3)}

        day.figure(f"attention of {tokens} tokens in {count} documents", measured)
