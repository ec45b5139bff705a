"""Every kind of attention, by every way that computes it, is eager attention of each document by itself."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.fixtures.packed import relative
from tests.model import varlen_stand_in  # noqa: F401 - torch's flash attention has its kernels
from tests.model.cuda_branch import triton_stand_in
from tuner.model import attention, attention_ops, blocked_attention
from tuner.model.attention import NATIVE, PACKED, packed_attention
from tuner.model.counted import ByLogarithm, InSteps
from tuner.model.documents import Documents, GrowingDocuments
from tuner.runtime.device import traced_for

CPU = torch.device("cpu")
LENGTHS = (1, 40, 5, 23)
HEADS, KEYS = 4, 2
SCALE = 0.4


@dataclass(frozen=True)
class Kind:
    """What a layer asks for; ``steps`` is its temperature, ``sinks`` is "head" or "query"."""

    window: int = 0
    cap: float = 0.0
    chunk: int = 0
    sinks: str = ""
    bias: bool = False
    widths: tuple[int, int] = (8, 8)
    temperature: Any = None


KINDS = {
    "plain": Kind(), "window": Kind(window=8), "cap": Kind(cap=2.0), "narrow values": Kind(widths=(12, 6)),
    "wide values": Kind(widths=(6, 12)), "sinks": Kind(sinks="head"),
    "sinks in a window": Kind(sinks="head", window=8, widths=(12, 6)), "sinks and cap": Kind(sinks="head", cap=2.0),
    "chunks": Kind(chunk=8), "chunks and steps": Kind(chunk=8, temperature=InSteps(4.0, 0.5)),
    "sinks of queries": Kind(sinks="query"), "bias": Kind(bias=True, window=8),
    "bias and logarithm": Kind(bias=True, sinks="query", temperature=ByLogarithm(3, 0.4)),
}
EXACT = ("plain", "window", "cap", "narrow values", "sinks", "sinks in a window", "sinks and cap", "chunks")
"""What kernels compute; the rest goes document by document, by torch."""


class Layer(torch.nn.Module):
    """A layer as `packed_attention` sees it."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.tuner_chunk, self.tuner_temperature = kind.chunk, kind.temperature


def leaves_of(kind: Kind, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Query, key and value ``[1, heads, T, d]`` and what else has a gradient."""
    tokens, generator = sum(LENGTHS), torch.Generator().manual_seed(0)
    width, value_width = kind.widths
    shapes: dict[str, tuple[int, ...]] = {"query": (HEADS, tokens, width), "key": (KEYS, tokens, width)}
    shapes["value"] = (KEYS, tokens, value_width)
    if kind.sinks:
        shapes["sink"] = (HEADS,) if kind.sinks == "head" else (HEADS, tokens, 1)
    if kind.bias:
        shapes["bias"] = (HEADS, tokens, tokens)
    made = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    if kind.sinks:
        made["sink"] += 1.0  # a share that shows
    return {name: (t if t.ndim == 1 else t[None]).to(dtype).requires_grad_() for name, t in made.items()}


def options_of(kind: Kind, leaves: dict[str, torch.Tensor]) -> dict[str, Any]:
    options: dict[str, Any] = {"scaling": SCALE, "sliding_window": kind.window or None, "softcap": kind.cap or None}
    options["places"] = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    if kind.sinks:
        options["s_aux" if kind.sinks == "head" else "sinks"] = leaves["sink"]
    return options | ({"position_bias": leaves["bias"]} if kind.bias else {})


def eager(kind: Kind, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each document by itself: all scores, with the sink as one more column that is dropped again: ``[1, T, h, d]``."""
    found, at = [], 0
    for length in LENGTHS:
        query, key, value = (leaves[name].narrow(2, at, length) for name in ("query", "key", "value"))
        key, value = (tensor.repeat_interleave(HEADS // KEYS, 1) for tensor in (key, value))
        place = torch.arange(length)
        scores = query @ key.mT * SCALE
        bias = leaves["bias"][:, :, at : at + length, at : at + length] if kind.bias else 0
        if kind.temperature is not None:  # as Llama 4 and Inkling have it: on queries, and on the bias
            factor = kind.temperature.of(place).double()[:, None]
            scores, bias = scores * factor, bias * factor
        if kind.cap:
            scores = kind.cap * torch.tanh(scores / kind.cap)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < (kind.window or length))
        if kind.chunk:
            seen &= place[:, None] // kind.chunk == place // kind.chunk
        scores = (scores + bias).masked_fill(~seen, -torch.inf)
        if kind.sinks:
            sink = leaves["sink"].view(1, HEADS, -1, 1)
            sink = sink.expand(1, HEADS, length, 1) if sink.shape[2] == 1 else sink[:, :, at : at + length]
            scores = torch.cat([scores, sink], -1)
        found.append((scores.softmax(-1)[..., :length] @ value).transpose(1, 2))
        at += length
    return torch.cat(found, 1)


def differences(kind: Kind, way: str, dtype: torch.dtype, upstream_type: torch.dtype | None = None) -> list[float]:
    """Of the result and of each gradient from those of eager attention in float64."""
    leaves = leaves_of(kind, dtype)
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    documents = Documents.of(LENGTHS, CPU, chunk=kind.chunk)
    given = [leaves[name] for name in ("query", "key", "value")]
    options = options_of(kind, leaves) | {"documents": documents, "native": way == NATIVE}
    found = packed_attention(Layer(kind), *given, None, **options)[0]
    expected = eager(kind, exact)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    upstream = upstream.to(found.dtype)
    grads = torch.autograd.grad(found, list(leaves.values()), upstream)
    wanted = torch.autograd.grad(expected, list(exact.values()), upstream.double())
    return [relative(found.double(), expected), *map(relative, (grad.double() for grad in grads), wanted)]


@pytest.mark.parametrize("name", KINDS)
def test_blocks_are_eager_attention_of_each_document(name: str) -> None:
    """And what torch computes document by document."""
    kind = KINDS[name]
    assert max(differences(kind, PACKED, torch.float64)) < (1e-12 if kind.temperature is None else 1e-6)
    assert max(differences(kind, PACKED, torch.float32)) < 1e-6


@pytest.mark.parametrize("name", [name for name in EXACT if not KINDS[name].cap])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_compiled_kernel_is(name: str, dtype: torch.dtype, allowed: float) -> None:
    assert max(differences(KINDS[name], NATIVE, dtype)) < allowed


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("dtype", "generation"), [(torch.bfloat16, 9), (torch.float32, 9), (torch.float32, 7)])
def test_the_ways_of_cuda_are(name: str, dtype: torch.dtype, generation: int) -> None:
    """Flash attention, Triton and blocks; the kernels' stand-ins know no sinks: all that is done around them counts."""
    allowed = 1e-2 if dtype == torch.bfloat16 else 1e-6
    with traced_for("cuda", generation=generation), triton_stand_in():
        assert max(differences(KINDS[name], "cuda", dtype)) < allowed


@pytest.mark.parametrize("sink", [-40.0, 0.0, 40.0])
def test_a_sink_may_be_far_below_or_above_all_scores(sink: float) -> None:
    kind = KINDS["sinks in a window"]
    leaves = leaves_of(kind, torch.float32)
    given = [leaves[name] for name in ("query", "key", "value")]
    for way in (PACKED, NATIVE):
        options = options_of(kind, leaves) | {"s_aux": torch.full((HEADS,), sink), "native": way == NATIVE}
        found, _ = packed_attention(torch.nn.Identity(), *given, None, **options, documents=Documents.of(LENGTHS, CPU))
        expected = eager(kind, leaves | {"sink": torch.full((HEADS,), sink)})
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6 * float(expected.detach().abs().max()))


def test_dropout_leaves_out_shares_after_the_sink_had_its_own() -> None:
    """As the models have it: what is dropped of all queries is what dropout says, scaled by what is kept."""
    kind, n = KINDS["sinks"], 200
    leaves = leaves_of(kind, torch.float32)
    given = [leaves[name] for name in ("query", "key", "value")]
    options = options_of(kind, leaves) | {"documents": Documents.of(LENGTHS, CPU), "dropout": 0.3}
    torch.manual_seed(0)
    with torch.no_grad():
        mean = sum(packed_attention(torch.nn.Identity(), *given, None, **options)[0] for _ in range(n)) / n
        assert relative(mean, eager(kind, leaves)) < 0.1


@pytest.mark.parametrize("name", ["window", "sinks in a window", "chunks", "chunks and steps"])
def test_growing_documents_are_the_last_tokens_of_whole_ones(name: str) -> None:
    """Two prompts and then a token each, at lengths at which windows and chunks end differently."""
    kind = KINDS[name]
    leaves = {name: leaf.detach() for name, leaf in leaves_of(kind).items()}
    expected = eager(kind, leaves).split(list(LENGTHS), 1)
    parts = {name: leaves[name].split(list(LENGTHS), 2) for name in ("query", "key", "value")}
    for new in ((1, 40, 5, 23), (1, 1, 1, 1), (1, 7, 3, 9)):
        queries = [query[:, :, length - n :] for query, length, n in zip(parts["query"], LENGTHS, new, strict=True)]
        given = torch.cat(queries, 2), leaves["key"], leaves["value"]
        places = [torch.arange(length - n, length) for length, n in zip(LENGTHS, new, strict=True)]
        options = options_of(kind, leaves) | {"places": torch.cat(places)[None]}
        found, _ = packed_attention(Layer(kind), *given, None, **options, documents=GrowingDocuments(new, LENGTHS))
        lasts = [whole[:, length - n :] for whole, length, n in zip(expected, LENGTHS, new, strict=True)]
        torch.testing.assert_close(found, torch.cat(lasts, 1), rtol=0, atol=1e-6)


def test_a_batch_without_documents_is_causal_in_each_row() -> None:
    """What a layer is given that takes documents as a batch: sinks, bias and temperature of tokens from 0 on."""
    kind = KINDS["bias and logarithm"]
    leaves = {name: leaf.detach() for name, leaf in leaves_of(kind).items()}
    expected, starts = eager(kind, leaves).split(list(LENGTHS), 1), (1, 46)
    length = 23
    batch = {name: torch.cat([leaf[:, :, at : at + length] for at in starts]) for name, leaf in leaves.items()}
    batch["bias"] = torch.cat([leaves["bias"][:, :, at : at + length, at : at + length] for at in starts])
    options = options_of(kind, batch) | {"places": None}
    found, _ = packed_attention(Layer(kind), *(batch[name] for name in ("query", "key", "value")), None, **options)
    torch.testing.assert_close(found[0], expected[1][0, :length], rtol=0, atol=1e-6)
    torch.testing.assert_close(found[1], expected[3][0], rtol=0, atol=1e-6)


def test_one_graph_for_any_documents_with_sinks_and_chunks() -> None:
    """Operations are opaque, and where documents and chunks lie is data to them."""
    counter = CompileCounterWithBackend("aot_eager")
    kind = KINDS["sinks in a window"]
    layers = Layer(kind), Layer(Kind(chunk=8))

    @torch.compile(backend=counter, fullgraph=True)
    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor, documents: Documents) -> Any:
        options: dict[str, Any] = {"documents": documents, "sliding_window": kind.window, "s_aux": sink}
        return packed_attention(layers[0], q, k, v, **options)[0] + packed_attention(layers[1], q, k, v, **{
            "documents": documents
        })[0]  # fmt: skip

    for cut in (1, 9, 14, 24, 40, 68):
        leaves = leaves_of(kind, torch.float32)
        lengths = (cut, 69 - cut)
        block(*leaves.values(), Documents.of(lengths, CPU, bound=69, chunk=8)).sum().backward()
        assert all(leaf.grad is not None for leaf in leaves.values())
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_what_a_compiler_is_told_of_results_holds() -> None:
    leaves = [leaf.detach()[0] for leaf in leaves_of(KINDS["sinks"], torch.float32).values()]
    query, key, value = (leaf.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for leaf in leaves[:3])
    sink, bounds = torch.zeros(HEADS).requires_grad_(), Documents.of(LENGTHS, CPU).host
    tests = ("test_schema", "test_faketensor")
    given = (query, key, value, bounds, 8, SCALE)
    torch.library.opcheck(blocked_attention.attend_with_sinks, (*given, 0.0, sink), test_utils=tests)
    torch.library.opcheck(attention.native_attention, (*given, sink), test_utils=tests)
    plain = [leaf.detach() for leaf in (query, key, value)]
    output, normaliser = blocked_attention.attend_with_sinks(*plain, *given[3:], 0.0, sink.detach())
    arguments = (torch.randn_like(output), *plain, *given[3:], 0.0, normaliser)
    torch.library.opcheck(blocked_attention._backward, arguments, test_utils=tests)


def test_a_kernel_that_knows_no_sinks_serves() -> None:
    """The two formulas alone, against the softmax with one more column."""
    generator = torch.Generator().manual_seed(0)
    scores, values = torch.randn(3, 5, 7, generator=generator), torch.randn(7, 2, generator=generator)
    sink = torch.randn(3, generator=generator)
    whole = torch.cat([scores, sink[:, None, None].expand(3, 5, 1)], -1)
    for unit in (1.0, attention_ops.LN_2):
        output = (scores.softmax(-1) @ values).transpose(0, 1).contiguous()
        found, normaliser = attention_ops.with_sinks(output, scores.logsumexp(-1) / unit, sink, unit)
        torch.testing.assert_close(found, (whole.softmax(-1)[..., :-1] @ values).transpose(0, 1))
        torch.testing.assert_close(normaliser * unit, whole.logsumexp(-1))
