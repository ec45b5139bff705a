"""The chunked loss equals plain cross-entropy, in value and gradients, also of models that divide, multiply or
softcap their logits.
"""

import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Cohere2Config, CohereConfig, Gemma2Config, GraniteConfig, PretrainedConfig

from tests.fixtures.packed import LENGTHS, drawn_root, gradient, packed_inputs, random_ids, relative
from tests.model.tiny import SHAPE
from tuner.model import output_layer as module
from tuner.model.attention import PACKED
from tuner.model.kernels import native_into_gradient
from tuner.model.output_layer import PLAIN, LogitTransform, OutputLayer, softmax_into_gradient
from tuner.model.probe import require_isolation
from tuner.model.root import CausalLM, position_losses
from tuner.runtime.device import gpu_memory, traced_for
from tuner.runtime.torch_private import TorchDispatchMode
from tuner.train.methods.custom import token_mean


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", {"cpu": 5 * 11})
    monkeypatch.setattr(module, "BLOCK_LOGITS", {"cpu": 2 * 11})
    monkeypatch.setattr(module, "BLOCK_VOCABULARY", {"cpu": 4})


def plain_losses(hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor) -> torch.Tensor:
    """The cross-entropy at each position, by torch."""
    logits, cap = torch.nn.functional.linear(hidden, head.weight, head.bias) * head.transform.scale, head.transform.cap
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("n", [0, 1, 7, 16])
def test_equals_plain(n: int, with_bias: bool, weighted: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(n, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True) if with_bias else None
    targets = torch.randint(0, 11, (n,))
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    weights = torch.rand(n) if weighted else None
    loss = OutputLayer(weight, bias).cross_entropy(hidden, targets, weights)
    found = torch.autograd.grad(3 * loss, leaves)
    losses = plain_losses(hidden, OutputLayer(weight, bias), targets)
    expected = losses.sum() if weights is None else (losses * weights).sum()
    wanted = torch.autograd.grad(3 * expected, leaves)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kernel", [softmax_into_gradient, native_into_gradient])
@pytest.mark.parametrize("shape", [LogitTransform(), LogitTransform(0.5, 2.0)])
@pytest.mark.parametrize("n", [0, 13])
def test_losses_by_position_have_the_gradient_of_any_function_of_them(
    n: int, shape: LogitTransform, kernel: Any
) -> None:
    """Here the square of a document's mean: in it no position's share is known before all losses are."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(n, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    bias, targets, document = torch.randn(11, requires_grad=True), torch.randint(0, 11, (n,)), torch.arange(n) // 5

    def loss(losses: torch.Tensor) -> torch.Tensor:
        return sum((losses[document == one].mean() ** 2 for one in document.unique()), start=losses.sum() * 0)

    head, leaves = OutputLayer(weight, bias, shape, kernel), [hidden, weight, bias]
    expected, losses = plain_losses(hidden, head, targets), head.losses(hidden, targets)
    torch.testing.assert_close(losses, expected)
    found, wanted = (torch.autograd.grad(loss(one), leaves) for one in (losses, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kernel", [softmax_into_gradient, native_into_gradient])
@pytest.mark.parametrize("shape", [LogitTransform(), LogitTransform(0.5, 2.0)])
@pytest.mark.parametrize("trained", [False, True])
def test_losses_by_position_are_the_same_bits_with_and_without_gradients(
    trained: bool, shape: LogitTransform, kernel: Any
) -> None:
    """And a graph that is kept gives the same gradients a second time, though the last chunk's logits are gone."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(13, 8, requires_grad=True), torch.randn(11, 8, requires_grad=trained)
    targets, shares, leaves = torch.randint(0, 11, (13,)), torch.randn(13), [hidden, weight][: 1 + trained]
    head = OutputLayer(weight, None, shape, kernel)
    with torch.no_grad():
        alone = head.losses(hidden, targets)
    losses = head.losses(hidden, targets)
    assert torch.equal(losses, alone) and not alone.requires_grad
    first = torch.autograd.grad((losses * shares).sum(), leaves, retain_graph=True)
    wanted = torch.autograd.grad((plain_losses(hidden, head, targets) * shares).sum(), leaves)
    second = torch.autograd.grad((losses * shares).sum(), leaves)
    torch.testing.assert_close(first, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("trained", "made"), [(False, 4), (True, 7)])
def test_of_losses_by_position_no_more_products_are_made_than_needed_and_never_two_chunks_are_there(
    trained: bool, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four chunks a frozen layer's are made once; a trained one's a second time, but for the last."""
    monkeypatch.setattr(module, "CHUNK_LOGITS", {"cpu": 5 * 11})
    there: list[weakref.ref[torch.Tensor]] = []
    real = module.Head.products

    def counted(head: Any, rows: torch.Tensor) -> torch.Tensor:
        assert all(other() is None for other in there)
        products = real(head, rows)
        there.append(weakref.ref(products))
        return products

    monkeypatch.setattr(module.Head, "products", counted)
    hidden, weight = torch.randn(18, 8, requires_grad=True), torch.randn(11, 8, requires_grad=trained)
    targets = torch.randint(0, 11, (18,))
    OutputLayer(weight).losses(hidden, targets).square().sum().backward()
    assert len(there) == made
    with torch.no_grad():
        OutputLayer(weight).losses(hidden, targets)
    OutputLayer(weight).cross_entropy(hidden, targets)
    assert len(there) == made + 8


def test_frozen_weight_gets_no_gradient() -> None:
    hidden = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(11, 8)
    OutputLayer(weight).cross_entropy(hidden, torch.tensor([1, 2, 3])).backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_without_gradients_it_is_still_the_loss() -> None:
    hidden, weight, targets = torch.randn(3, 8), torch.randn(11, 8), torch.tensor([1, 2, 3])
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    assert OutputLayer(weight).cross_entropy(hidden, targets).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("trained", [False, True])
def test_blocks_of_the_vocabulary_change_no_sum_that_counts(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast: the weight's gradient has the same bits; the hidden states' differs by rounding alone."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 16, requires_grad=True), torch.randn(40, 16, requires_grad=trained)
    leaves, targets, found = [hidden, weight][: 1 + trained], torch.randint(0, 40, (9,)), []
    for size in (7, 40):
        monkeypatch.setattr(module, "BLOCK_VOCABULARY", {"cpu": size})
        with torch.autocast("cpu", torch.bfloat16):
            loss = OutputLayer(weight).cross_entropy(hidden, targets)
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    assert torch.equal(found[0][0], found[1][0])
    assert not trained or torch.equal(found[0][2], found[1][2])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=2e-2, atol=2e-2)


ODD = 50257
"""GPT-2's vocabulary: no multiple of anything."""


def gpu_of(rows: int, vocabulary: int = ODD) -> Any:
    """Within, sizes are chosen as on a GPU whose memory has room for so many rows of logits in a chunk."""
    return traced_for("cuda", module.CHUNK_MEMORY * rows * (-(-vocabulary // module.ALIGNED) * module.ALIGNED))


class Operations(TorchDispatchMode):  # type: ignore[misc]  # its type is not known
    """Counts operations by name, conversions of tensors of ``size`` elements, and the row strides of products."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.converted, self.strides, self.names = size, 0, set[int](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.names[func.name()] += 1
        self.converted += func is torch.ops.aten._to_copy.default and args[0].numel() == self.size
        if func is torch.ops.aten.mm.out:
            self.strides.add((kwargs or {})["out"].stride(0))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [LogitTransform(), LogitTransform(0.5, 2.0)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_on_a_gpu_it_equals_plain_torch(with_bias: bool, weighted: bool, shape: LogitTransform) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(ODD, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(ODD, dtype=torch.float64, requires_grad=True) if with_bias else None
    targets, weights = torch.randint(0, ODD, (7,)), torch.rand(7, dtype=torch.float64) if weighted else None
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    with gpu_of(rows=3):
        loss = OutputLayer(weight, bias, shape).cross_entropy(hidden, targets, weights)
        found = torch.autograd.grad(3 * loss, leaves)
        losses = OutputLayer(weight, bias, shape).losses(hidden, targets)
        by_position = torch.autograd.grad((losses**2).sum(), leaves)
    plain = plain_losses(hidden, OutputLayer(weight, bias, shape), targets)
    expected = plain.sum() if weights is None else (plain * weights).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(losses, plain, rtol=1e-12, atol=0)
    wanted = torch.autograd.grad(3 * expected, leaves, retain_graph=True)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(by_position, torch.autograd.grad((plain**2).sum(), leaves), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("trained", [False, True])
def test_on_a_gpu_the_weight_is_converted_once_and_rows_are_aligned(trained: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(ODD, 4, requires_grad=trained)
    targets, blocks = torch.randint(0, ODD, (8,)), -(-ODD // module.BLOCK_VOCABULARY["cuda"])
    with gpu_of(rows=3), torch.autocast("cpu", torch.bfloat16), Operations(weight.numel()) as seen:
        OutputLayer(weight).cross_entropy(hidden, targets)
    assert seen.converted == 1 and seen.strides == {50304}
    assert seen.names["aten::mm.out"] == seen.names["aten::mm"] - 3 * blocks * trained == 3  # of three chunks
    frozen = weight.detach().bfloat16()
    with gpu_of(rows=3), torch.autocast("cpu", torch.bfloat16), Operations(weight.numel()) as seen:
        OutputLayer(frozen).cross_entropy(hidden, targets)
    assert seen.converted == 0 and seen.names["aten::mm"] == 3
    with gpu_of(rows=100), torch.autocast("cpu", torch.bfloat16), Operations(weight.numel()) as seen:
        OutputLayer(weight).cross_entropy(hidden, targets)
    assert seen.names["aten::mm.out"] == 1


def test_on_a_gpu_a_chunk_has_no_more_logits_than_fit_its_memory_or_fill_it() -> None:
    def logits_of(memory: int | None) -> int:
        weight = torch.empty(1)
        with traced_for("cuda", memory):
            return module.ALIGNED * module.positions_of_chunk(1, weight, gpu_memory(weight))

    assert logits_of(None) == logits_of(80 << 30) == 1 << 29
    assert logits_of(24 << 30) == 24 << 24  # 768 MiB in bf16
    assert module.positions_of_chunk(1, torch.empty(1), None) == 1 << 27


def test_on_a_gpu_the_weights_gradient_is_added_up_in_float32_whatever_its_type() -> None:
    """A gathered weight is bfloat16, and so is its gradient: the float32 one, rounded once."""
    torch.manual_seed(0)
    rounded = torch.randn(300, 4).bfloat16()
    hidden, targets, found = torch.randn(256, 4).bfloat16(), torch.randint(0, 300, (256,)), []
    for dtype in (torch.float32, torch.bfloat16):
        weight = rounded.to(dtype, copy=True).requires_grad_()
        with gpu_of(rows=2, vocabulary=300), torch.autocast("cpu", torch.bfloat16):
            loss = OutputLayer(weight).cross_entropy(hidden, targets)
            found += torch.autograd.grad(0.3 * loss, [weight])
    assert [gradient.dtype for gradient in found] == [torch.float32, torch.bfloat16]
    assert torch.equal(found[0].bfloat16(), found[1])


def test_what_pads_the_rows_of_logits_on_a_gpu_adds_nothing_to_gradients() -> None:
    """A product may take the padding of its rows in, with zeros on the other side: what lies there must be finite."""
    hidden, weight = torch.randn(5, 8, dtype=torch.bfloat16), torch.randn(97, 8, dtype=torch.bfloat16)
    junk = patch.object(torch.Tensor, "new_empty", lambda self, *size: self.new_full(size, torch.nan))
    with traced_for("cuda"), junk:
        (_, _, products), *_ = module.Head.of(hidden, weight, None, torch.bfloat16).chunks()
    whole = products._base
    assert products.shape == (5, 97) and whole is not None and whole.shape == (5, 128)
    assert whole.isfinite().all()


@pytest.mark.parametrize(("n", "size", "gap", "whole"), [(4000, 40.0, 0.0, 2.0**10), (8, 0.1, 18.0, 2.0**16)])
@pytest.mark.parametrize("by_position", [False, True])
def test_fp16_gradients_that_are_made_scaled_neither_overflow_nor_vanish(
    n: int, size: float, gap: float, whole: float, by_position: bool
) -> None:
    """Sums over many positions of one token, and tokens whose probability is below what fp16 has numbers for."""
    torch.manual_seed(0)
    hidden = (torch.rand(n, 8) * size).requires_grad_()
    weight = (torch.rand(11, 8) / 8).requires_grad_()
    bias = torch.zeros(11).index_fill_(0, torch.tensor([3]), gap).requires_grad_()
    targets, scale = torch.full((n,), 3), torch.tensor(whole / n)
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(exact[0], exact[1], exact[2])
    wanted = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, targets), exact)

    def gradients(head: OutputLayer) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            loss = head.losses(hidden, targets).sum() if by_position else head.cross_entropy(hidden, targets)
        mean = torch.nn.functional.cross_entropy(logits, targets).item()
        assert loss.item() / n == pytest.approx(mean, rel=1e-2, abs=1e-5)
        return [one / whole for one in torch.autograd.grad(loss, [hidden, weight, bias], scale)]

    def far(found: list[torch.Tensor]) -> float:
        # Of a target that is all but sure the share is 1 in float32 already.
        rows = slice(None) if gap == 0 else torch.arange(11) != 3
        pairs = [(a[rows], b[rows]) for a, b in zip(found[1:], wanted[1:], strict=True)]
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)

    assert far(gradients(OutputLayer(weight, bias, scale=scale))) < 1e-2
    if not by_position:
        assert not far(gradients(OutputLayer(weight, bias))) < 0.1


GEMMA = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}
CONFIGS: dict[str, tuple[PretrainedConfig, LogitTransform]] = {
    "gemma2": (Gemma2Config(**SHAPE, **GEMMA, attn_logit_softcapping=0.5), LogitTransform(1.0, 2.0)),
    "granite": (
        GraniteConfig(**SHAPE, logits_scaling=8.0, residual_multiplier=0.5, embedding_multiplier=3.0),
        LogitTransform(0.125),
    ),
    "cohere": (CohereConfig(**SHAPE, logit_scale=0.25), LogitTransform(0.25)),
    "cohere2": (Cohere2Config(**SHAPE, logit_scale=3.0, sliding_window=8), LogitTransform(3.0)),
}


def root_for(kind: str, directory: Path) -> CausalLM:
    return drawn_root(CONFIGS[kind][0], directory, spread=8.0).train()


def own_losses(root: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    """The losses of the model's own forward, each document by itself, with stock attention."""
    root.model.set_attn_implementation("eager")
    losses = []
    for document in ids.split(list(LENGTHS)):
        logits = root.model(input_ids=document[None], use_cache=False).logits[0]
        losses.append(cross_entropy(logits[:-1].double(), document[1:], reduction="none"))
    root.model.set_attn_implementation(PACKED)
    return torch.cat(losses)


@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_and_gradients_are_the_models_own(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", {"cpu": 13 * 97})
    root, ids = root_for(kind, tmp_path), random_ids(97)
    assert root.logit_transform == CONFIGS[kind][1]
    require_isolation(root, 97)
    expected = own_losses(root, ids)
    expected.sum().backward()
    wanted = gradient(root)
    root.zero_grad()
    inputs = packed_inputs(ids, LENGTHS)
    loss = root(document_lengths=LENGTHS, **inputs)
    loss.backward()
    assert loss.item() == pytest.approx(expected.sum().item(), rel=1e-6)
    assert relative(gradient(root), wanted) < 1e-5
    assert relative(root(document_lengths=LENGTHS, **inputs, objective=position_losses).double(), expected) < 1e-6
    root.logit_transform = PLAIN
    assert root(document_lengths=LENGTHS, **inputs).item() != pytest.approx(expected.sum().item(), rel=1e-3)


@pytest.mark.parametrize("kind", ["gemma2", "cohere2"])
def test_generated_token_by_token(kind: str, tmp_path: Path) -> None:
    from tuner.model.decode import greedy

    root = root_for(kind, tmp_path).eval()
    prompt = random_ids(97)[:20].tolist()
    [found] = greedy(root, [prompt], [], [6], torch.device("cpu"))
    root.model.set_attn_implementation("eager")
    ids = list(prompt)
    for _ in range(6):
        ids.append(int(root.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert found == ids[20:]


def test_a_loss_of_the_users_own_sees_the_factor() -> None:
    def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor) -> object:
        return cross_entropy(hidden @ weight.T, targets, reduction="sum"), {}

    own = token_mean(plain, "own")  # type: ignore[arg-type]
    hidden, weight, targets = torch.randn(5, 8), torch.randn(11, 8), torch.arange(5)
    expected = cross_entropy(hidden @ weight.T * 0.25, targets, reduction="sum")
    found = own.terms(hidden, OutputLayer(weight, None, LogitTransform(0.25)), targets, {})
    torch.testing.assert_close(found.losses["loss"].value, expected)
