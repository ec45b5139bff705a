"""The Triton kernels give plain attention and its gradients, in Triton's interpreter without a GPU."""

import json

import pytest

from tests.fixtures.commands import printed

# Heads of queries and of keys, channels of keys and of values, documents, window, cap. Documents end inside a block and
# at its end; windows are shorter than a block, as long as one, and longer than a document.
CASES = [(4, 2, 8, 6, (5, 40, 1, 23), 0, 0.0), (2, 1, 24, 24, (5, 130, 1), 8, 3.0), (1, 1, 80, 16, (64, 3), 40, 5.0)]
COMPARE = """
import json, sys, torch
from tuner.model.blocked_attention import attend_documents
from tuner.model.documents import Documents
from tuner.model.triton_attention import triton_attention
device, names, cases = sys.argv[1], sys.argv[2].split(","), json.loads(sys.argv[3])
torch.set_num_threads(1)
found = {}
for name in names:
    dtype = getattr(torch, name)
    for heads, keys, width, value_width, lengths, window, cap in cases if name == names[0] else cases[:1]:
        generator, tokens = torch.Generator().manual_seed(0), sum(lengths)
        shapes = ((heads, width), (keys, width), (keys, value_width))
        made = [torch.randn(tokens, *shape, generator=generator).to(device, dtype) for shape in shapes]
        before = [one.clone() for one in made]
        leaves = [one.transpose(0, 1).requires_grad_() for one in made]
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        documents = Documents.of(lengths, torch.device(device))
        output, _ = triton_attention(*leaves, documents.device, documents.longest, window, 0.7, cap)
        expected = attend_documents(*exact, documents.host, window, 0.7, cap)
        upstream = torch.randn(output.shape, generator=generator).to(device, dtype)
        pairs = [(output, expected)]
        pairs += zip(
            torch.autograd.grad(output, leaves, upstream),
            torch.autograd.grad(expected, exact, upstream.double()),
            strict=True,
        )
        kept = [torch.equal(one, leaf.transpose(0, 1)) for one, leaf in zip(before, leaves, strict=True)]
        assert all(kept), "a kernel wrote into what it was given, which recomputing may keep"
        least = 1e-3 * upstream.double().norm()  # a query that sees one token alone has no gradient
        far = [float((a.double() - b).norm() / b.norm().clamp_min(least)) for a, b in pairs]
        found[f"{name} {lengths} {window} {cap}"] = max(far)
print(json.dumps(found))
"""


def test_the_kernels_equal_the_blocks_in_the_interpreter() -> None:
    """In fp16 for what is 16 bits wide: the interpreter has no products of bf16."""
    pytest.importorskip("triton")
    found = printed(COMPARE, "cpu", "float32,float16", json.dumps(CASES), TRITON_INTERPRET="1")
    assert len(found) == len(CASES) + 1
    for case, far in found.items():
        assert far < (2e-6 if case.startswith("float32") else 2e-3), found


@pytest.mark.gpu
def test_the_kernels_equal_the_blocks_on_a_gpu() -> None:
    for name, allowed in (("float32", 2e-6), ("float16", 2e-3), ("bfloat16", 2e-2)):
        assert max(printed(COMPARE, "cuda", name, json.dumps(CASES), fork=False).values()) < allowed
