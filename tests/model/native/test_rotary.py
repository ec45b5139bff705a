"""The compiled rotation gives transformers' own, in value and gradients, in the layers that are shown to want it."""

import types
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, GemmaConfig, LlamaConfig, PhiConfig, Qwen3Config
from transformers.models.llama import modeling_llama

from tuner.model.native import attention, library
from tuner.model.native.attention import apply_native_rotation, native_rotary

BF16, FP32 = torch.bfloat16, torch.float32
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


def angles(tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(width)
    found = torch.randn(2, 1, tokens, width, generator=generator)
    return found[0].cos(), found[1].sin()


def plain(source: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    low, high = source.chunk(2, -1)
    return source * cosine + torch.cat([-high, low], -1) * sine


@pytest.mark.parametrize("width", [2, 8, 32, 34, 64, 128])
@pytest.mark.parametrize(
    ("inputs", "result", "allowed"), [(FP32, FP32, 1e-6), (BF16, FP32, 1e-6), (BF16, BF16, 4e-3), (FP32, BF16, 4e-3)]
)
def test_equals_plain(width: int, inputs: torch.dtype, result: torch.dtype, allowed: float) -> None:
    """Value and gradient are float64's but for one rounding, of heads that lie in memory as projections give them."""
    generator = torch.Generator().manual_seed(width)
    source = torch.randn(7, 3 * width, generator=generator).to(inputs).view(7, 3, width).transpose(0, 1)
    cosine, sine = (angle[0] for angle in angles(7, width))
    exact, leaf = source.double().requires_grad_(), source.clone().requires_grad_()
    expected, found = plain(exact, cosine, sine), native_rotary(leaf, cosine, sine, result, False)
    upstream = torch.randn(3, 7, width, generator=generator).to(result)
    (wanted,), (gradient,) = (
        torch.autograd.grad(output, given, up)
        for output, given, up in ((expected, exact, upstream.double()), (found, leaf, upstream))
    )
    assert (found.dtype, gradient.dtype) == (result, inputs)
    assert float((found.detach().double() - expected.detach()).norm() / expected.detach().norm()) < allowed
    bound = 4e-3 if BF16 in {inputs, result} else 1e-6
    assert float((gradient.double() - wanted).norm() / wanted.norm()) < bound
    assert torch.equal(native_rotary(source, cosine, sine, result, False), found)


def test_the_same_bits_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    source, found = torch.randn(3, 50, 16), []
    cosine, sine = (angle[0] for angle in angles(50, 16))
    for count in (1, 2, 3):
        monkeypatch.setattr(library, "threads", lambda count=count: count)
        found.append(native_rotary(source, cosine, sine, FP32, True))
    assert all(torch.equal(found[0], other) for other in found[1:])


def model(config: Any) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    return made


def logits(of: nn.Module, rows: int = 1) -> torch.Tensor:
    found: torch.Tensor = of(input_ids=torch.arange(10 * rows).reshape(rows, 10), use_cache=False).logits
    return found


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), Qwen3Config(**SIZES, head_dim=16), GemmaConfig(**SIZES)])
def test_a_model_is_the_same_and_under_autocast_too(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, calls = model(config), model(config), []
    expected = logits(one)
    assert apply_native_rotation(other) == 2
    real = attention.native_rotary
    monkeypatch.setattr(attention, "native_rotary", lambda *given: (calls.append(given[3]), real(*given))[1])
    found = logits(other)
    assert calls == [FP32] * 4
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for of, sums in ((one, expected), (other, found)):
        sums.square().sum().backward()  # type: ignore[no-untyped-call]
        assert all(parameter.grad is not None for parameter in of.parameters())
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    calls.clear()
    with torch.autocast("cpu", BF16):
        torch.testing.assert_close(logits(other), logits(one), rtol=5e-2, atol=5e-2)
    assert calls == [BF16] * 4


def test_what_the_kernel_does_not_take_is_left_to_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows at a time, other types: the same values, and no call."""
    one, other = model(LlamaConfig(**SIZES)), model(LlamaConfig(**SIZES))
    apply_native_rotation(other)
    monkeypatch.setattr(attention, "native_rotary", None)
    assert torch.equal(logits(one, 2), logits(other, 2))
    assert torch.equal(logits(one.double()), logits(other.double()))


def test_only_layers_that_are_shown_to_be_the_same_are_changed() -> None:
    assert apply_native_rotation(model(CohereConfig(**SIZES))) == 0  # neighbours are turned there, not halves
    part = model(PhiConfig(**SIZES, partial_rotary_factor=0.5))  # a part of each head is turned
    before = logits(part)
    assert apply_native_rotation(part) == 2
    torch.testing.assert_close(logits(part), before)
    layers = model(LlamaConfig(**SIZES))
    swapped = layers.model.layers[0].self_attn  # type: ignore[union-attr, index]
    swapped.forward = types.MethodType(type(swapped).forward, swapped)  # type: ignore[union-attr, assignment]
    assert apply_native_rotation(layers) == 1


def test_the_architecture_itself_stays_as_it_is() -> None:
    before = modeling_llama.apply_rotary_pos_emb
    apply_native_rotation(model(LlamaConfig(**SIZES)))
    assert modeling_llama.apply_rotary_pos_emb is before
    assert "forward" not in vars(model(LlamaConfig(**SIZES)).model.layers[0].self_attn)  # type: ignore[union-attr, index]


def test_it_is_found_without_weights_as_well() -> None:
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    assert apply_native_rotation(bare) == 2


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_what_a_compiler_is_told_of_results_holds(dtype: torch.dtype) -> None:
    tests = ("test_schema", "test_faketensor")
    cosine, sine = (angle[0] for angle in angles(5, 8))
    torch.library.opcheck(native_rotary, (torch.randn(2, 5, 8).to(dtype), cosine, sine, dtype, True), test_utils=tests)
