"""The compiled attention and rotation give masked attention and transformers' rotation, in value and gradients,
whatever the layout and the threads, in the layers that are shown to want them.
"""

import types
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, GemmaConfig, LlamaConfig, PhiConfig, Qwen3Config
from transformers.models.llama import modeling_llama

from tests.fixtures.packed import masked_attention
from tests.model.tiny import taken
from tuner.model import attention
from tuner.model.documents import Documents
from tuner.model.native import attention as native
from tuner.model.native import library
from tuner.model.native.attention import apply_native_rotation, native_attention, native_rotary

CPU = torch.device("cpu")
LENGTHS = [(1,), (40,), (5, 40, 1, 23), (130, 300, 64, 65, 1)]
WINDOWS, WIDTHS = (0, 1, 20, 150), ((32, 32), (8, 6), (20, 48), (80, 16))
OF_BLOCKS = [*zip(WINDOWS, WIDTHS, strict=True), (0, (8, 6)), (150, (32, 32))]
"""Windows and widths that documents of several blocks are taken with."""


def inputs(n_tokens: int, dtype: torch.dtype, widths: tuple[int, int] = (32, 32)) -> list[torch.Tensor]:
    """Query, key and value as projections leave them: the heads of a token lie together."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, widths[0]), (2, widths[0]), (2, widths[1]))
    made = (torch.randn(n_tokens, *shape, generator=generator).to(dtype).transpose(0, 1) for shape in shapes)
    return [leaf.requires_grad_() for leaf in made]


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    found, exact = found.detach(), exact.detach()
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-12))


@pytest.mark.parametrize(
    ("lengths", "window", "widths"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case[0] == LENGTHS[-1] and case[1:] not in OF_BLOCKS else ())
        for case in product(LENGTHS, WINDOWS, WIDTHS)
    ],
)
def test_equals_plain(lengths: tuple[int, ...], window: int, widths: tuple[int, int]) -> None:
    for dtype, allowed in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3)):
        leaves = inputs(sum(lengths), dtype, widths)
        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
        found, _ = native_attention(*leaves, Documents.of(lengths, CPU).host, window, 0.3)
        exact = masked_attention(*doubles, lengths, window, 0.3)
        upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert found.dtype == dtype and relative(found, exact) < allowed
        grads = torch.autograd.grad(found, leaves, upstream)
        for grad, expected in zip(grads, torch.autograd.grad(exact, doubles, upstream.double()), strict=True):
            if float(expected.norm()) < 1e-9:  # one key: its share is 1, whatever query and key are
                assert float(grad.float().norm()) < (1e-4 if dtype == torch.float32 else 2e-1)
            else:
                assert relative(grad, expected) < allowed


def test_the_same_bits_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = LENGTHS[-1]
    leaves, found = inputs(sum(lengths), torch.bfloat16), []
    upstream = torch.randn(sum(lengths), 4, 32)
    for count in (1, 2, 3):
        monkeypatch.setattr(library, "threads", lambda count=count: count)
        output, _ = native_attention(*leaves, Documents.of(lengths, CPU).host, 0, 0.3)
        found.append([output, *torch.autograd.grad(output, leaves, upstream.bfloat16())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_document_does_not_depend_on_its_neighbours() -> None:
    leaves = [leaf.detach() for leaf in inputs(200, torch.float32)]
    alone, _ = native_attention(*(leaf[:, :70] for leaf in leaves), Documents.of((70,), CPU).host, 0, 0.3)
    packed, _ = native_attention(*leaves, Documents.of((70, 130), CPU).host, 0, 0.3)
    assert torch.equal(packed[:70], alone)


def test_huge_scores_stay_finite() -> None:
    q, k, v = (leaf.detach() for leaf in inputs(90, torch.float32))
    exact = masked_attention(q.double() * 300, k.double(), v.double(), (90,), 0, 1.0)
    found, _ = native_attention(q * 300, k, v, Documents.of((90,), CPU).host, 0, 1.0)
    assert relative(found, exact) < 1e-4


def test_a_number_that_is_none_is_not_hidden() -> None:
    leaves = [leaf.detach() for leaf in inputs(50, torch.float32)]
    leaves[1][0, 20, 3] = torch.nan
    found, _ = native_attention(*leaves, Documents.of((50,), CPU).host, 0, 0.3)
    assert found[:20].isfinite().all() and not found[20:, :2].isfinite().any(-1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_compiler_is_told_of_results_holds(dtype: torch.dtype) -> None:
    leaves, bounds = inputs(68, dtype), Documents.of((5, 40, 23), CPU).host
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(native_attention, (*leaves, bounds, 0, 0.3), test_utils=tests)
    inputs_, results = [leaf.detach() for leaf in leaves], native_attention(*leaves, bounds, 0, 0.3)
    arguments = (torch.randn(68, 4, 32, dtype=dtype), *inputs_, *(r.detach() for r in results), bounds, 0, 0.3)
    torch.library.opcheck(native._backward, arguments, test_utils=tests)


def test_what_the_kernel_does_not_compute_is_computed_by_torch() -> None:
    """A soft bound of the scores and float64, through the function that transformers calls."""
    documents = Documents.of((30, 38), CPU)
    for dtype, options in ((torch.float32, {"softcap": 5.0}), (torch.float64, {})):
        given: dict[str, Any] = {"documents": documents, **options}
        leaves = [leaf.detach().to(dtype)[None] for leaf in inputs(68, torch.float32)]
        found, _ = attention.compiled_attention(torch.nn.Identity(), *leaves, **given)
        expected, _ = attention.packed_attention(torch.nn.Identity(), *leaves, **given)
        assert torch.equal(found, expected)
    found, _ = attention.compiled_attention(
        torch.nn.Identity(), *(leaf.float() for leaf in leaves), documents=documents
    )
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)


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
def test_a_rotation_equals_plain(width: int, inputs: torch.dtype, result: torch.dtype, allowed: float) -> None:
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


def test_the_same_rotation_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert taken(apply_native_rotation, other) == 2
    real = native.native_rotary
    monkeypatch.setattr(native, "native_rotary", lambda *given: (calls.append(given[3]), real(*given))[1])
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
    monkeypatch.setattr(native, "native_rotary", None)
    assert torch.equal(logits(one, 2), logits(other, 2))
    assert torch.equal(logits(one.double()), logits(other.double()))


def test_only_layers_that_are_shown_to_be_the_same_are_changed() -> None:
    assert taken(apply_native_rotation, model(CohereConfig(**SIZES))) == 0  # neighbours are turned there, not halves
    part = model(PhiConfig(**SIZES, partial_rotary_factor=0.5))  # a part of each head is turned
    before = logits(part)
    assert taken(apply_native_rotation, part) == 2
    torch.testing.assert_close(logits(part), before)
    layers = model(LlamaConfig(**SIZES))
    swapped = layers.model.layers[0].self_attn  # type: ignore[union-attr, index]
    swapped.forward = types.MethodType(type(swapped).forward, swapped)  # type: ignore[union-attr, assignment]
    assert taken(apply_native_rotation, layers) == 1


def test_the_architecture_itself_stays_as_it_is() -> None:
    before = modeling_llama.apply_rotary_pos_emb
    apply_native_rotation(model(LlamaConfig(**SIZES)))
    assert modeling_llama.apply_rotary_pos_emb is before
    assert "forward" not in vars(model(LlamaConfig(**SIZES)).model.layers[0].self_attn)  # type: ignore[union-attr, index]


def test_it_is_found_without_weights_as_well() -> None:
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    assert taken(apply_native_rotation, bare) == 2


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_what_a_compiler_is_told_of_rotations_holds(dtype: torch.dtype) -> None:
    tests = ("test_schema", "test_faketensor")
    cosine, sine = (angle[0] for angle in angles(5, 8))
    torch.library.opcheck(native_rotary, (torch.randn(2, 5, 8).to(dtype), cosine, sine, dtype, True), test_utils=tests)
