"""Liger's layers and its cross-entropy give the plain model's loss and gradients, in Triton's interpreter without a
GPU.
"""

import logging
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from tests.fixtures.commands import printed
from tests.model.tiny import tiny_config
from tuner.model.kernels import apply_liger, has_liger

KINDS = ("llama", "phi3", "gemma3")
"""Queries and keys are a product's result in the first, a view of one in the second; the third normalises them."""
COMPARE = """
import json, sys, tempfile
from functools import partial
import numpy, torch, triton.language as tl, triton.runtime.interpreter as interpreter

# What the interpreter lacks: floats become tensors, device functions are of `math`, CPU tensors are used in place.
convert = interpreter._implicit_cvt
def converted(argument):
    if isinstance(argument, float):
        return tl.tensor(interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32), tl.float32)
    return convert(argument)
interpreter._implicit_cvt = converted
interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
interpreter.GridExecutor._restore_args_dev = lambda self, *args: None
import triton.language.extra.libdevice as libdevice
libdevice.rsqrt = partial(tl.math.rsqrt, _semantic=interpreter.interpreter_semantic)
libdevice.tanh = lambda x: 1 - 2 / (tl.math.exp(2 * x, _semantic=interpreter.interpreter_semantic) + 1)
class Properties:
    major, minor, multi_processor_count, name = 9, 0, 4, "stand-in"
torch.cuda.get_device_properties = lambda device=None: Properties
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.set_num_threads(1)

from tests.fixtures.packed import gradient, packed_inputs, random_ids
from tests.model.tiny import tiny_config
from tuner.model.build import ModelSpec, build_model
from tuner.model.trainable import TrainableSpec
from tuner.parallel.assemble import AssemblySpec, assemble

lengths = (3, 4)

class Products(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.made = []
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.name() in ("aten::mm", "aten::addmm"):
            self.made.append((result, result.clone()))
        return result

def gradients(kind, level, liger, rope=False):
    with tempfile.TemporaryDirectory() as directory:
        tiny_config(kind).save_pretrained(directory)
        model = build_model(ModelSpec(directory, random_init=True), torch.float32, seed=1)
    root = assemble(AssemblySpec(TrainableSpec(), 0, "liger" if liger else "torch", level), model).train()
    for parameter in root.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15, generator=torch.Generator().manual_seed(parameter.numel()))
    if rope:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        others = dict(cross_entropy=False, fused_linear_cross_entropy=False, rms_norm=False, swiglu=False)
        _apply_liger_kernel_to_instance(model=root.model, rope=True, **others)
    with Products() as products:
        loss = root(document_lengths=lengths, **packed_inputs(random_ids(97)[: sum(lengths)], lengths))
    written.append(sum(not torch.equal(tensor, before) for tensor, before in products.made))
    assert len(products.made) >= 8
    loss.backward()
    return float(loss), gradient(root)

found, written = {}, []
for kind in sys.argv[1:]:
    loss, expected = gradients(kind, "none", False)
    for level in ("none", "selective", "full"):
        other, actual = gradients(kind, level, True)
        differences = abs(other - loss) / loss, float((actual - expected).norm() / expected.norm())
        found[f"{kind} {level}"] = max(differences)
found["written"] = sum(written)
gradients("llama", "selective", True, rope=True)
found["written by rope"] = written[-1]
print(json.dumps(found))
"""


def whole() -> None:
    from json import loads  # noqa: F401

    if len(sys.argv) > 1000:
        from json import nothing_such  # noqa: F401


def broken() -> None:
    from json import nothing_such  # noqa: F401


def test_kernels_whose_parts_are_missing_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger imports what an architecture needs when it is asked for it; of some a part has gone."""
    patching = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    assert has_liger("llama") and not has_liger("no_such_type")
    monkeypatch.setattr(patching, "MODEL_TYPE_TO_APPLY_LIGER_FN", {"whole": whole, "broken": broken})
    assert has_liger("whole") and not has_liger("broken")


def test_norms_are_liger_s_and_the_rotation_stays_the_architecture_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's own writes into queries and keys, which selective recomputing keeps; it would be that of every model."""
    pytest.importorskip("liger_kernel")
    own = modeling_llama.apply_rotary_pos_emb
    for name, value in list(vars(modeling_llama).items()):  # what takes the place of any is not for other tests
        monkeypatch.setattr(modeling_llama, name, value)
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32)
    apply_liger(model)
    assert "liger" in repr(model.model.norm.forward).lower()
    assert modeling_llama.apply_rotary_pos_emb is own


def test_liger_s_back_ends_that_are_not_installed_are_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel")
    back_ends = logging.getLogger("liger_kernel.backends")
    monkeypatch.setattr(back_ends, "level", logging.NOTSET)
    monkeypatch.setattr(back_ends, "_cache", {})
    assert has_liger("llama")
    assert not back_ends.isEnabledFor(logging.WARNING) and back_ends.isEnabledFor(logging.ERROR)


@pytest.mark.slow
def test_gradients_are_the_plain_models_at_every_level_of_recomputing() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    found = printed(COMPARE, *KINDS, fork=False, TRITON_INTERPRET="1")
    assert found.pop("written") == 0 and found.pop("written by rope") == 4  # queries and keys of two layers
    assert len(found) == 3 * len(KINDS)
    assert max(found.values()) < 1e-4, found


COMPARE_LOSSES = """
import json, sys, torch
from tuner.model.output_layer import OutputLayer, softmax_into_gradient
from tuner.model.kernels import liger_into_gradient
device = sys.argv[1]
found = []
for n, d, v, with_bias in [(5, 8, 300, False), (3, 16, 70000, False), (4, 8, 11, True), (0, 8, 11, False)]:
    torch.manual_seed(n)
    leaves = [torch.randn(n, d, device=device), torch.randn(v, d, device=device)]
    leaves += [torch.randn(v, device=device)] if with_bias else []
    targets = torch.randint(0, v, (n,), device=device)
    results = []
    for weights in (None, torch.rand(n, device=device)):
        for kernel in (softmax_into_gradient, liger_into_gradient):
            copies = [leaf.clone().requires_grad_() for leaf in leaves]
            bias = copies[2] if with_bias else None
            loss = OutputLayer(copies[1], bias, kernel=kernel).cross_entropy(copies[0], targets, weights)
            results.append([loss, *torch.autograd.grad(3 * loss, copies)])
        for a, b in zip(*results[-2:], strict=True):
            found.append(float((a - b).norm() / b.norm().clamp_min(1e-9)))
    shares, gradients = torch.randn(n, device=device), []
    for kernel in (softmax_into_gradient, liger_into_gradient):
        for trained in (False, True):
            copies = [leaf.clone().requires_grad_(trained or i == 0) for i, leaf in enumerate(leaves)]
            losses = OutputLayer(copies[1], copies[2] if with_bias else None, kernel=kernel).losses(copies[0], targets)
            gradients.append(torch.autograd.grad((losses * shares).sum(), copies if trained else copies[:1]))
    for plain, other in zip(gradients[:2], gradients[2:], strict=True):
        found.extend(float((a - b).norm() / b.norm().clamp_min(1e-9)) for a, b in zip(other, plain, strict=True))
    with torch.no_grad():
        head = OutputLayer(leaves[1], leaves[2] if with_bias else None, kernel=liger_into_gradient)
        alone = head.cross_entropy(leaves[0], targets)
    found.append(float((alone - results[0][0]).abs() / results[0][0].abs().clamp_min(1e-9)))
print(json.dumps(found))
"""


def test_the_kernel_equals_plain_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    found = printed(COMPARE_LOSSES, "cpu", TRITON_INTERPRET="1")
    assert len(found) == 43
    assert max(found) < 1e-5, found


@pytest.mark.gpu
def test_the_kernel_equals_plain_torch_on_the_device() -> None:
    assert torch.cuda.is_available()
    assert max(printed(COMPARE_LOSSES, "cuda", fork=False)) < 1e-5
