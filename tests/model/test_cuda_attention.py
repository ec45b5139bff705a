"""The attention of CUDA devices on tensors of the CPU: stand-in kernels refuse what the real ones refuse."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.fixtures.packed import relative
from tests.model.cuda_branch import LORA, check, heads_in, root_for, take, triton_stand_in
from tests.model.test_compile import LONGEST, TOKENS, packing
from tests.model.varlen_stand_in import CALLS
from tuner.model import blocks as compiling
from tuner.model import cuda_attention, flash_attention, triton_attention
from tuner.model.blocked_attention import attend_documents, attend_with_sinks
from tuner.model.blocks import compile_blocks
from tuner.model.cuda_attention import attend, way_and_reason
from tuner.model.documents import Documents, Padding
from tuner.runtime.device import traced_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*context_fn"),
]
CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
ROWS = 8


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    CALLS.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "level", "lora"),
    [
        pytest.param("llama", "none", None, marks=pytest.mark.slow), ("llama", "selective", LORA),
        ("gemma3", "full", LORA), ("mistral", "selective", None), ("deepseek", "selective", None),
        pytest.param("deepseek", "full", None, marks=pytest.mark.slow), ("narrow", "none", None),
        pytest.param("gpt_oss", "none", None, marks=pytest.mark.slow), ("gpt_oss", "selective", LORA),
    ],
)
def test_gradients_are_those_of_the_blocks(kind: str, level: str, lora: Any, tmp_path: Path) -> None:
    """Heads of 16, of 12 (`narrow`), and of 12 for keys with 6 for values (`deepseek`), with windows and without."""
    # Flash attention has rounded its result to bf16 before the sink is in it, blocks round once.
    check(kind, tmp_path, level, lora, allowed=1e-2 if kind == "gpt_oss" else 1e-3)
    backwards = [call for call in CALLS if call.which == "backward"]
    assert len(backwards) == 4  # two layers and two rows
    assert len(CALLS) == (12 if level == "full" else 8), "selective recomputing keeps what attention gave"
    assert {call.width for call in CALLS} == {16}
    windows = {"gemma3": {0, 8}, "mistral": {8}, "gpt_oss": {0, 8}}
    assert {call.window for call in CALLS} == windows.get(kind, {0})
    assert all(call.bound == call.longest for call in CALLS)


def test_one_graph_for_every_packing_and_the_kernel_knows_the_longest_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the layers; another is the last norm's."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    plain, root = root_for("llama", tmp_path), root_for("llama", tmp_path, level="selective")
    counters.clear()
    compile_blocks(root, Padding(TOKENS, LONGEST))
    with traced_for("cuda"):
        found = [take(root, packing(number)) for number in range(ROWS)]
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    assert len(CALLS) == 4 * ROWS and all(call.bound == call.longest for call in CALLS)
    assert len({call.bound for call in CALLS}) >= ROWS - 2, "documents of many lengths"
    loss, expected = take(plain, packing(ROWS - 1))
    assert found[-1][0] == pytest.approx(loss, rel=1e-4) and relative(found[-1][1], expected) < 1e-3


@pytest.mark.parametrize("grouped", [True, False])
def test_a_torch_whose_parts_are_its_own_is_given_a_number(
    grouped: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compiled layers then see one number for all rows, and where torch takes no groups, keys are repeated."""
    monkeypatch.setattr(flash_attention, "_GROUPS", grouped)
    allowed = 1e-3 if grouped else 1e-2  # repeated, each head's gradient is rounded before they are added
    check("narrow", tmp_path / "a", allowed=allowed)
    monkeypatch.setattr(flash_attention, "TAKES_TENSOR", False)
    check("narrow", tmp_path / "b", allowed=allowed)
    assert all(call.bound == call.longest for call in CALLS)
    root = root_for("narrow", tmp_path / "c")
    root.parts.set_once(padding=Padding(TOKENS, LONGEST))
    with traced_for("cuda"):
        take(root, (5, 7))
    assert CALLS[-1].bound == LONGEST and CALLS[-1].longest < 2 * LONGEST


@pytest.mark.parametrize(
    ("types", "shapes", "problem"),
    [
        ((FP32,) * 3, ((4, 8), (2, 8), (2, 8)), "8 channels, torch.float32"),
        ((BF16, BF16, FP32), ((4, 8), (2, 8), (2, 8)), "bfloat16, torch.float32"),
        ((BF16,) * 3, ((4, 264), (2, 264), (2, 264)), "at most 256 channels"),
        ((BF16,) * 3, ((4, 8), (3, 8), (3, 8)), "do not go with"),
        ((BF16,) * 3, ((4, 8), (2, 16), (2, 8)), "do not go with"),
    ],
)
@pytest.mark.parametrize("is_fake", [False, True])
def test_what_the_kernel_does_not_take_is_refused_for_fakes_too(
    types: Any, shapes: Any, problem: str, is_fake: bool
) -> None:
    documents = Documents.of((3, 4), CPU)
    with FakeTensorMode(allow_non_fake_inputs=True) if is_fake else torch.no_grad():
        heads = [torch.zeros(n, 7, d, dtype=dtype) for dtype, (n, d) in zip(types, shapes, strict=True)]
        with pytest.raises(ValueError, match=problem):
            flash_attention.flash_attention(*heads, documents.device, documents.longest, 0, 1.0)


@pytest.mark.parametrize("widths", [(16, 16), (12, 6), (4, 8)])
@pytest.mark.parametrize("n", [(4, 2), (2, 2)])
def test_what_a_compiler_is_told_of_results_holds(n: tuple[int, int], widths: tuple[int, int]) -> None:
    documents, leaves = Documents.of((5, 40, 23), CPU), heads_in(BF16, n, widths, 68)
    where, tests = (documents.device, documents.longest), ("test_schema", "test_faketensor")
    torch.library.opcheck(flash_attention.flash_attention, (*leaves, *where, 8, 0.3), test_utils=tests)
    output, normaliser = flash_attention.flash_attention(*leaves, *where, 8, 0.3)
    arguments = (torch.randn_like(output), *leaves, output, normaliser, *where, 8, 0.3)
    torch.library.opcheck(flash_attention._backward, [_bare(one) for one in arguments], test_utils=tests)
    with triton_stand_in():
        torch.library.opcheck(triton_attention.triton_attention, (*leaves, *where, 8, 0.3, 2.0), test_utils=tests)
        arguments = (*arguments[:-2], 8, 0.3, 2.0)
        torch.library.opcheck(triton_attention._backward, [_bare(one) for one in arguments], test_utils=tests)


def _bare(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    ("generation", "dtype", "widest", "is_capped", "way", "words"),
    [
        (8, BF16, 256, False, "flash", "flash attention"),
        (12, torch.float16, 12, False, "flash", "flash attention"),
        (8, BF16, 256, True, "triton", "tuner's Triton kernel: scores have a soft cap"),
        (9, BF16, 512, False, "triton", "tuner's Triton kernel: heads have 512 channels"),
        (9, FP32, 64, False, "triton", "tuner's Triton kernel: heads are float32"),
        (9, FP32, 512, False, "blocks", "heads are float32, and tuner's Triton kernel takes 256 channels"),
        (9, BF16, 576, False, "blocks", "heads have 576 channels, and tuner's Triton kernel takes 512 channels"),
        (9, torch.float64, 64, False, "blocks", "heads are float64"),
        (7, BF16, 64, False, "blocks", "this device is below compute capability 8.0"),
    ],
)
def test_each_kernel_has_its_models(  # noqa: PLR0917 - a table
    generation: int, dtype: torch.dtype, widest: int, is_capped: bool, way: str, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(cuda_attention, "_triton_problem", lambda: None)
    found = way_and_reason(generation, dtype, widest, is_capped)
    assert found[0] == way and words in found[1]
    with traced_for("cuda", generation=generation):
        assert cuda_attention.way_on(None, dtype, (widest, widest), True, is_capped) == way


def test_without_a_compiler_capped_scores_take_the_slow_way_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "_triton_problem", lambda: "triton is not installed")
    found = way_and_reason(9, BF16, 256, True)
    why = "blocked matrix products, several times slower: scores have a soft cap, and triton is not installed"
    assert found == ("blocks", why)
    assert way_and_reason(9, BF16, 256, False)[0] == "flash"
    assert way_and_reason(9, BF16, 256, True, is_here=False)[0] == "triton"


@pytest.mark.parametrize(("generation", "dtype"), [(7, BF16), (9, FP32), (9, BF16)])
def test_attention_is_the_same_by_every_way(generation: int, dtype: torch.dtype) -> None:
    lengths = (5, 40, 23)
    documents, leaves = Documents.of(lengths, CPU), heads_in(dtype, (4, 2), (12, 6), sum(lengths))
    expected = attend_documents(*leaves, documents.host, 8, 0.3)
    with traced_for("cuda", generation=generation), triton_stand_in() as launches:
        found = attend(*leaves, documents, 8, 0.3, 0.0)
    torch.testing.assert_close(found, expected)
    assert (len(CALLS), len(launches)) == {7: (0, 0), 9: (0, 1) if dtype == FP32 else (1, 0)}[generation]


@pytest.mark.parametrize(("level", "lora"), [("none", None), ("selective", LORA), ("full", None)])
def test_capped_scores_go_through_triton_at_every_level(level: str, lora: Any, tmp_path: Path) -> None:
    with triton_stand_in() as launches:
        check("gemma2", tmp_path, level, lora)
    assert not CALLS
    assert [launch.name for launch in launches].count("launch_forward") == (8 if level == "full" else 4)
    assert {launch.window for launch in launches} == {0, 8} and {launch.cap for launch in launches} == {50.0}
    assert all(launch.bound == launch.longest for launch in launches)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (12, 12), (20, 36), (256, 256)])
@pytest.mark.parametrize("n", [(4, 4), (8, 2)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_flash_attention_is_that_of_the_blocks_on_a_gpu(
    n: tuple[int, int], widths: tuple[int, int], has_sinks: bool
) -> None:
    lengths, device = (1, 300, 17, 128, 64), torch.device("cuda")
    documents = Documents.of(lengths, device)
    leaves = [leaf.detach().to(device).requires_grad_() for leaf in heads_in(BF16, n, widths, sum(lengths))]
    sink = torch.randn(n[0], device=device).requires_grad_() if has_sinks else None
    leaves += [] if sink is None else [sink]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    for window in (0, 50):
        found = attend(*leaves[:3], documents, window, 0.1, 0.0, sink)
        none = exact[0].new_full((n[0],), -torch.inf)
        expected, _ = attend_with_sinks(*exact[:3], documents.host, window, 0.1, 0.0, exact[3] if has_sinks else none)
        upstream = torch.randn_like(found)
        grads = torch.autograd.grad(found, leaves, upstream)
        pairs = [(found, expected), *zip(grads, torch.autograd.grad(expected, exact, upstream.double()), strict=True)]
        assert max(relative(a.double(), b) for a, b in pairs) < 2e-2
