"""Liger's cross-entropy kernel gives the loss and gradients of plain torch, in Triton's interpreter without a GPU."""

import pytest
import torch

from tests.fixtures.commands import printed

COMPARE = """
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
    found = printed(COMPARE, "cpu", TRITON_INTERPRET="1")
    assert len(found) == 43
    assert max(found) < 1e-5, found


@pytest.mark.gpu
def test_the_kernel_equals_plain_torch_on_the_device() -> None:
    assert torch.cuda.is_available()
    assert max(printed(COMPARE, "cuda", fork=False)) < 1e-5
