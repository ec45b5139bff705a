"""Adapted layers on a GPU: peft's numbers, one reading of an input that several take, nothing copied to be added to."""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from functorch.compile import make_boxed_func
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fixtures.packed import drawn_root, packed_inputs, relative
from tests.model.cuda_branch import take
from tests.model.test_compile import LONGEST, TOKENS, packing
from tests.model.tiny import VOCAB, family_config
from tuner.model import blocks as compiling
from tuner.model import cuda_attention
from tuner.model.adaptable import TOGETHER, add_in_product
from tuner.model.adapted_products import Together, adapted_products, take_together
from tuner.model.adapter import ADAPTER, LoraSpec, adapter_off, add_lora, lora_layers
from tuner.model.blocks import apply_recompute, compile_blocks
from tuner.model.documents import Padding
from tuner.model.quantize import linear
from tuner.model.quantize.codes import Kind, dequantize, quantize
from tuner.model.quantize.layers import QuantizeSpec, quantize_
from tuner.model.root import CausalLM
from tuner.runtime import torch_private
from tuner.runtime.device import traced_for

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the tracer's own
RANKS, INPUTS, OUTPUTS, ROWS = (3, 4, 2), 130, (70, 64, 5), 9
LORA = LoraSpec(4, 8.0, 0.0, "all-linear")


def given(count: int, dtype: torch.dtype, bias: bool = False, kind: Kind | None = None) -> dict[str, Any]:
    """What so many layers are computed from, and with ``kind`` their bases in codes."""
    generator = torch.Generator().manual_seed(count)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    weights = [drawn(out, INPUTS) / 8 for out in OUTPUTS[:count]]
    held = [quantize(weight.float(), kind, "weight", False) for weight in weights] if kind else []
    return {
        "source": drawn(ROWS, INPUTS).requires_grad_(),
        "held": [*(one.codes for one in held), *(one.scales for one in held)] if held else weights,
        "biases": [drawn(out) for out in OUTPUTS[:count]] if bias else [],
        "downs": drawn(sum(RANKS[:count]), INPUTS).requires_grad_(),
        "ups": [drawn(out, rank).requires_grad_() for out, rank in zip(OUTPUTS, RANKS[:count], strict=False)],
    }


def asked(values: dict[str, Any], is_whole: bool) -> tuple[Any, ...]:
    source, downs = values["source"], values["downs"]
    inner = source.detach() @ downs.detach().T if is_whole else source.cos() @ downs.T
    return source, inner, values["held"], values["biases"], downs if is_whole else None, values["ups"]


def plain(values: dict[str, Any], is_whole: bool) -> list[torch.Tensor]:
    source, held, ups = values["source"], values["held"], values["ups"]
    taken = source if is_whole else source.cos()
    found = []
    for number, (up, down) in enumerate(zip(ups, values["downs"].split([one.shape[1] for one in ups]), strict=True)):
        weight = held[number]
        if len(held) > len(ups):
            weight = dequantize(weight, held[len(ups) + number], INPUTS, source.dtype)
        bias = values["biases"][number] if values["biases"] else None
        found.append(nn.functional.linear(source, weight, bias) + taken @ down.T @ up.T)
    return found


@pytest.mark.parametrize("kind", [None, "nf4", "int8"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "dropped"])
@pytest.mark.parametrize("count", [1, 3])
def test_values_and_gradients_are_the_plain_ones(
    count: int, is_whole: bool, bias: bool, kind: Kind | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(linear.TILE_BYTES, "cpu", 4096)  # several tiles of a quantised weight
    values = given(count, torch.float32 if kind else torch.float64, bias, kind)
    leaves = [values["source"], values["downs"], *values["ups"]]
    found, wanted = adapted_products(*asked(values, is_whole)), plain(values, is_whole)
    upstream = [torch.randn(one.shape, generator=torch.Generator().manual_seed(9)).to(one.dtype) for one in wanted]
    grads = [torch.autograd.grad(made, leaves, upstream) for made in (found, wanted)]
    near = {"rtol": 1e-5 if kind else 1e-12, "atol": 1e-4 if kind else 1e-12}
    torch.testing.assert_close((*found, *grads[0]), (*wanted, *grads[1]), **near)
    first = [values["source"], *values["ups"]]  # an input without a gradient, as the first layer's may be
    values["source"] = values["source"].detach()
    alone = torch.autograd.grad(adapted_products(*asked(values, is_whole)), first[1:], upstream)
    torch.testing.assert_close(alone, grads[0][2:], rtol=0, atol=0)


@pytest.mark.parametrize("is_whole", [True, False])
def test_it_is_an_operation_as_torch_wants_them(is_whole: bool) -> None:
    source, inner, *others = asked(given(2, torch.float64, bias=True), is_whole)
    torch.library.opcheck(adapted_products, (source, inner.detach().requires_grad_(not is_whole), *others))


KINDS: dict[str, dict[str, Any]] = {
    "lora": {}, "rslora": {"lora": replace(LORA, use_rslora=True)}, "recomputed": {"level": "full"},
    "selective": {"level": "selective"}, "dropout": {"lora": replace(LORA, dropout=0.3)},
    "some": {"lora": replace(LORA, target_modules=["q_proj", "v_proj", "down_proj"])},
    "biases": {"family": "llama", "biases": True}, "nf4": {"quantized": "nf4"},
    "int8": {"quantized": "int8", "level": "selective"}, "dora": {"lora": replace(LORA, use_dora=True)},
    "conv1d": {"family": "gpt2"}, "fused": {"family": "phi3"},
    "experts": {"family": "qwen3-moe", "lora": replace(LORA, experts=True)},
}
APART = {"dropout", "dora", "conv1d", "fused"}
"""Kinds whose layers are computed one at a time."""


def root_of(
    directory: Path, *, family: str = "qwen3", lora: LoraSpec = LORA, quantized: Kind | None = None,
    biases: bool = False, level: Any = "none",
) -> CausalLM:  # fmt: skip
    config = family_config(family, tied=False)
    config.update({"attention_bias": True} if biases else {})
    root = drawn_root(config, directory)
    if quantized is not None:
        quantize_(root.model, QuantizeSpec(quantized))
    add_lora(root.model, lora, seed=2)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in root.named_parameters():
        if "lora_B" in name or name.endswith("_lora_B"):
            parameter.data = torch.randn(parameter.shape, generator=generator) / 20
    if level != "none":
        apply_recompute(root, level)
    return root.train()


def on_gpu(run: Callable[[], Any]) -> Any:
    def decode(output: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        output.copy_(dequantize(codes, scales, output.shape[1], output.dtype))

    way = patch.object(cuda_attention, "way_on", lambda *given: "blocks")
    with traced_for("cuda"), way, patch.object(linear, "launch", decode):
        return run()


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_within_the_rounding_of_bf16(name: str, tmp_path: Path) -> None:
    root = root_of(tmp_path, **KINDS[name])
    exact_loss, exact = take(root, packing(0), torch.float32)
    _, rounded = take(root, packing(0))
    loss, found = on_gpu(lambda: take(root, packing(0)))
    assert loss == pytest.approx(exact_loss, rel=5e-3)
    # No farther from float32 than the branch of the CPU, whose roundings are others.
    assert relative(found, exact) < 1.15 * relative(rounded, exact) + 1e-6
    groups = (getattr(layer, TOGETHER)[0] for _, layer in lora_layers(root.model) if hasattr(layer, TOGETHER))
    assert any(len(group._layers) > 1 for group in groups) is (name not in APART)


class Operations(TorchDispatchMode):
    """What is computed, inside of custom operations, too, with the shapes of what it is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tuner" and (body := torch_private.custom_body(func)) is not None:
            with self:
                return body(*args, **(kwargs or {}))
        shapes = tuple(tuple(each.shape) for each in args if isinstance(each, torch.Tensor))
        self.found.append((func.name(), shapes))
        return func(*args, **(kwargs or {}))

    def readings(self, width: int, rank: int) -> int:
        """Thin products over an input of so many numbers a token, forward and backward."""
        thin = {rank, 2 * rank, 3 * rank}
        products = (shapes for name, shapes in self.found if name in {"aten::mm", "aten::mm.out", "aten::linear"})
        return sum(
            any(shape == (sum(packing(0)), width) for shape in shapes) and any(set(shape) & thin for shape in shapes)
            for shapes in products
        )

    def copied(self) -> int:
        """Sums of a matrix and a product that are not made in place."""
        return sum(name == "aten::addmm" and len(shapes[0]) > 1 for name, shapes in self.found)


def counted(root: CausalLM) -> Operations:
    with Operations() as operations:
        on_gpu(lambda: take(root, packing(0)))
    return operations


def test_an_input_is_read_once_and_nothing_is_copied(tmp_path: Path) -> None:
    rank = 5  # no side of anything else
    root = root_of(tmp_path, lora=replace(LORA, r=rank))
    layers = [layer for _, layer in lora_layers(root.model)]
    after = counted(root)
    with patch.object(Together, "is_plain", False):
        before = counted(root)
    assert (len(layers), before.copied(), after.copied()) == (14, 14, 0)
    # Forward and for A's gradient: q, k, v and o, gate and up; and what comes back to B of q, o and down.
    assert before.readings(32, rank) == 2 * (2 * (3 + 1 + 2) + 3)
    assert after.readings(32, rank) == 2 * (2 * (1 + 1 + 1) + 3)


def test_compiled_layers_leave_it_as_it_is(tmp_path: Path) -> None:
    """What the compiler gets has one operation for a group, forward and backward, and no sum that it would copy for."""
    graphs: list[Counter[str]] = []

    def note(module: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(Counter(str(node.target) for node in module.graph.nodes if node.op == "call_function"))
        sums = [node for node in module.graph.nodes if str(node.target) == "aten.addmm.default"]
        assert all(node.args[0].meta["val"].ndim == 1 for node in sums), "a matrix would be copied"
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    root = root_of(tmp_path)
    expected = on_gpu(lambda: take(root, packing(0)))
    with patch.object(compiling, "BACKEND", backend):
        compile_blocks(root, Padding(TOKENS, LONGEST))
    loss, found = on_gpu(lambda: take(root, packing(0)))
    assert loss == pytest.approx(expected[0], rel=1e-4) and relative(found, expected[1]) < 1e-3
    names = ("tuner.adapted_products.default", "tuner.adapted_products_backward.default", "aten.mm.default")
    counts = [tuple(graph[name] for name in names) for graph in graphs if graph[names[0]] or graph[names[1]]]
    assert sorted(counts) == 2 * [(0, 4, 0)] + 2 * [(4, 0, 4)], "of each of two layers, backward and forward"


class Crossed(nn.Module):
    """Keys are of another input than queries and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.q_proj(own) + self.k_proj(other).sin() * self.v_proj(own)
        return made


def test_layers_with_another_input_get_their_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(attention=Crossed()))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"]), model, ADAPTER)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    for _, layer in lora_layers(model):
        add_in_product(layer)
    take_together(model, ADAPTER)
    own, other = torch.randn(3, 8), torch.randn(3, 8)
    attention: Any = model.attention
    expected = attention(own, other)
    with traced_for("cuda"):
        torch.testing.assert_close(attention(own, other), expected)
        together, _ = getattr(attention.q_proj, TOGETHER)
        assert together._source is None and not together._made, "nothing is kept after a forward"
        with pytest.raises(RuntimeError), patch.object(nn.Linear, "forward", side_effect=RuntimeError):
            attention(own, torch.randn(3, 7))
        assert together._source is None
        again = copy.deepcopy(model)
        for parameter in again.parameters():
            parameter.data += 1
        torch.testing.assert_close(attention(own, other), expected)
        assert not torch.allclose(again.attention(own, other), expected)  # type: ignore[union-attr,operator]


def test_switched_off_it_computes_the_base(tmp_path: Path) -> None:
    root, plainly = root_of(tmp_path), root_of(tmp_path)
    for name, parameter in plainly.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    given_ = {"document_lengths": (TOKENS,), **packed_inputs(torch.arange(3, 3 + TOKENS) % VOCAB, (TOKENS,))}
    with torch.no_grad(), adapter_off(root.model, list(root.model.model.layers)):
        off = on_gpu(lambda: root(**given_))
    assert torch.equal(off, on_gpu(lambda: plainly(**given_)).detach())
