"""Flash attention 4 as tuner calls it: a stand-in refuses what the package refuses, on every generation of devices."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures.packed import relative
from tests.model.cuda_branch import LORA, check, heads_in
from tests.model.flash4_stand_in import flash4_stand_in
from tests.model.varlen_stand_in import CALLS
from tuner.model import flash4_attention
from tuner.model.blocked_attention import attend_with_sinks
from tuner.model.cuda_attention import attend, way_on
from tuner.model.documents import Documents
from tuner.model.flash4_attention import problem, widths
from tuner.runtime.deterministic import deterministic
from tuner.runtime.device import traced_for

CPU, BF16 = torch.device("cpu"), torch.bfloat16
LENGTHS = (5, 40, 23)


@pytest.mark.parametrize(
    ("kind", "level", "lora"),
    [
        ("llama", "selective", LORA), ("gemma2", "none", None), ("gpt_oss", "selective", LORA),
        ("deepseek", "selective", None), ("narrow", "full", None),
    ],
)  # fmt: skip
def test_gradients_are_those_of_the_blocks(kind: str, level: str, lora: Any, tmp_path: Path) -> None:
    """Windows, caps, sinks, widths of 12 and 6: the same calls, at every level of recomputing."""
    CALLS.clear()
    with flash4_stand_in() as package:
        check(kind, tmp_path, level, lora)
    assert not CALLS, "nothing of torch's"
    forwards = [one for one in package.launches if one.which == "forward"]
    assert len(package.launches) - len(forwards) == 4, "two layers and two rows"
    assert len(forwards) == (8 if level == "full" else 4), "selective recomputing keeps what attention gave"
    assert {one.widths for one in package.launches} == {(16, 16)}
    assert {one.cap for one in package.launches} == ({50.0} if kind == "gemma2" else {0.0})
    assert {one.has_sink for one in forwards} == {kind == "gpt_oss"}
    assert all(one.bound == 256 >= one.longest for one in package.launches), "no kernel for short documents besides"


@pytest.mark.parametrize("major", [9, 10, 12])
@pytest.mark.parametrize("sizes", [(64, 64), (20, 36), (192, 128), (256, 256), (160, 160)])
@pytest.mark.parametrize("n", [(4, 4), (4, 2)])
@pytest.mark.parametrize(("window", "cap", "has_sink"), [(0, 0.0, False), (9, 3.0, True), (9, 0.0, False)])
def test_what_it_takes_is_computed_and_the_rest_goes_elsewhere(
    major: int, sizes: tuple[int, int], n: tuple[int, int], window: int, cap: float, has_sink: bool
) -> None:
    documents, leaves = Documents.of(LENGTHS, CPU), list(heads_in(BF16, n, sizes, sum(LENGTHS)))
    sink = torch.linspace(-1, 1, n[0]).requires_grad_() if has_sink else None
    is_taken = problem(major, *sizes, n[0] != n[1], cap > 0, window > 0) is None
    with traced_for("cuda", generation=major), flash4_stand_in() as package:
        assert (way_on(None, BF16, sizes, n[0] != n[1], cap > 0, has_sink, window > 0) == "flash4") == is_taken
        if not is_taken:
            return
        found = attend(*leaves, documents, window, 0.1, cap, sink)
        upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(BF16)
        leaves += [] if sink is None else [sink]
        grads = torch.autograd.grad(found, leaves, upstream)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    none = exact[0].new_full((n[0],), -torch.inf)
    of = exact[3] if has_sink else none
    expected, _ = attend_with_sinks(*exact[:3], documents.host, window, 0.1, cap, of)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    pairs = [(found, expected), *zip(grads, wanted, strict=True)]
    assert max(relative(a.double(), b) for a, b in pairs) < 2e-2
    assert [one.which for one in package.launches] == ["forward", "backward"]


@pytest.mark.parametrize(
    ("major", "width", "value_width", "is_grouped", "given"),
    [
        (9, 128, 128, True, (128, 128)), (9, 12, 6, True, (16, 16)), (9, 192, 128, False, (192, 128)),
        (9, 192, 128, True, (192, 192)), (9, 256, 256, True, (256, 256)), (9, 264, 264, True, None),
        (10, 192, 128, False, (192, 128)), (10, 192, 128, True, (256, 256)), (10, 80, 80, True, (80, 80)),
        (10, 160, 160, False, (256, 256)), (10, 320, 320, True, None), (11, 128, 64, True, (128, 128)),
        (12, 128, 128, True, (128, 128)), (12, 192, 128, False, None), (12, 256, 256, True, None),
        (8, 64, 64, True, None), (13, 64, 64, True, None),
    ],
)  # fmt: skip
def test_widths_that_the_kernel_is_given(
    major: int, width: int, value_width: int, is_grouped: bool, given: tuple[int, int] | None
) -> None:
    assert widths(major, width, value_width, is_grouped) == given
    assert (problem(major, width, value_width, is_grouped, False) is None) == (given is not None)


def test_what_is_refused_says_why() -> None:
    assert problem(8, 64, 64, True, False) == "it is for compute capability 9.x to 12.x"
    assert problem(12, 256, 256, True, False) == "it takes no heads of 256 channels here"
    assert problem(10, 256, 256, True, True) == "it takes no soft cap with heads of 256 channels here"
    assert problem(10, 256, 256, True, False, True) == "it takes no window with heads of 256 channels here"
    assert problem(9, 256, 256, True, True, True) is None and problem(10, 192, 128, False, True, True) is None
    with deterministic(True):
        assert problem(12, 64, 64, True, False) == "its backward pass is not deterministic here"
        assert problem(9, 64, 64, True, False) is None
    heads, documents = heads_in(BF16, (4, 2), (256, 256), 4), Documents.of((4,), CPU)
    with traced_for("cuda", generation=12), flash4_stand_in(), pytest.raises(ValueError, match="takes no heads of"):
        flash4_attention.flash_attention_4(*heads, documents.device, documents.longest, 0, 1.0, 0.0)


def test_a_deterministic_training_asks_for_sums_in_one_order() -> None:
    documents, leaves = Documents.of(LENGTHS, CPU), heads_in(BF16, (4, 2), (16, 16), sum(LENGTHS))
    with traced_for("cuda"), flash4_stand_in() as package:
        for wanted in (False, True):
            with deterministic(wanted):
                output = attend(*leaves, documents, 0, 0.3, 0.0)
                torch.autograd.grad(output, leaves, torch.ones_like(output))
    assert [one.deterministic for one in package.launches if one.which == "backward"] == [False, True]


def test_what_a_compiler_is_told_of_results_holds() -> None:
    tests = ("test_schema", "test_faketensor")
    for n, sizes in (((4, 2), (16, 16)), ((2, 2), (12, 6))):
        documents, leaves = Documents.of(LENGTHS, CPU), heads_in(BF16, n, sizes, sum(LENGTHS))
        where = (documents.device, documents.longest)
        with traced_for("cuda"), flash4_stand_in():
            torch.library.opcheck(flash4_attention.flash_attention_4, (*leaves, *where, 8, 0.3, 2.0), test_utils=tests)
            output, normaliser = flash4_attention.flash_attention_4(*leaves, *where, 8, 0.3, 2.0)
            bare = [tensor.detach() for tensor in (*leaves, output, normaliser)]
            given = (torch.randn(output.shape).to(BF16), *bare, *where, 8, 0.3, 2.0)
            torch.library.opcheck(flash4_attention._backward, given, test_utils=tests)


def test_compiled_kernels_are_kept_unless_the_user_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    flash4_attention.keep_kernels(tmp_path)
    flash4_attention.keep_kernels(tmp_path / "other")
    named = "FLASH_ATTENTION_CUTE_DSL_CACHE"
    assert os.environ == {f"{named}_ENABLED": "1", f"{named}_DIR": str(tmp_path)}
