"""On a GPU a layer's gradients are added to earlier ones by one kernel: the same bits, and a third of the kernels."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from tests.model.test_compile import LONGEST, TOKENS, root_for
from tests.profile.test_devices import SHAPES, tree_of
from tuner.config.load import load_recipe
from tuner.model import blocks
from tuner.model.blocks import compile_blocks
from tuner.model.documents import Padding
from tuner.parallel import assemble
from tuner.profile.allocations import AllocationTracker
from tuner.profile.devices import find_device, steps_of
from tuner.profile.predict import Target, predict
from tuner.runtime import torch_private
from tuner.runtime.device import compiler_problem
from tuner.runtime.dist import RankInfo
from tuner.train import grouped_gradients
from tuner.train.grouped_gradients import GroupedGradients
from tuner.train.step_parts import StepPart


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.sometimes = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, rows: torch.Tensor, all_of_it: bool) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(rows).tanh())
        return made + self.sometimes(rows) if all_of_it else made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Linear(4, 4), nn.ModuleList(Layer() for _ in range(3))
        self.layers[1].first.requires_grad_(False)

    def forward(self, rows: torch.Tensor, all_of_it: bool) -> torch.Tensor:
        rows = self.embedding(rows)
        for layer in self.layers:
            rows = layer(rows, all_of_it)
        return rows


def trained() -> tuple[Model, dict[str, nn.Parameter]]:
    torch.manual_seed(0)
    model = Model()
    return model, {name: one for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("which", [(True,), (True, True, True), (False, True, False), (True, False), (False, False)])
def test_sums_are_autograds_to_the_bit(which: tuple[bool, ...]) -> None:
    (plain, wanted), (model, found) = trained(), trained()
    part = GroupedGradients(found)
    for step in range(2):
        part.before_forward(None)  # type: ignore[arg-type]
        part.terms(None, None)  # type: ignore[arg-type]
        model(torch.ones(2, 4), True).sum().backward()  # of a step that fails, which leaves nothing
        model.zero_grad()
        part.before_forward(None)  # type: ignore[arg-type]
        for number, all_of_it in enumerate(which):
            rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(7 * step + number))
            plain(rows, all_of_it).square().sum().backward()
            loss = model(rows, all_of_it).square().sum()
            part.terms(None, None)  # type: ignore[arg-type]
            loss.backward()
        part.after_backward()
        for name, parameter in found.items():
            other = wanted[name].grad
            assert (parameter.grad is None) is (other is None)
            assert other is None or torch.equal(parameter.grad, other)  # type: ignore[arg-type]
        for one in (*wanted.values(), *found.values()):
            one.grad = None


NO_KERNELS = {"prim::device", "aten::slice_backward", "aten::promote_types", "aten::lift_fresh", "aten::is_pinned"}
NO_KERNELS |= {"aten::_local_scalar_dense", "aten::detach"}


class Kernels:
    """What a traced step asks for outside of its decoder layers in its last micro-batch, forward and backward."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.before = "build"

    def note(self, tracker: AllocationTracker, func: Any) -> None:
        if (self.before, tracker.phase) == ("backward", "forward"):
            self.found.clear()
        self.before = tracker.phase
        node = torch_private.current_autograd_node() if tracker.phase == "backward" else None
        added = node is not None and "AccumulateGrad" in node.name()
        views = func.is_view or "empty" in func.name() or func.name() in NO_KERNELS
        if tracker.phase in {"forward", "backward"} and not views and (added or ".layers." not in tracker.module):
            self.found["norm" if tracker.module.endswith(".norm") and not added else func.name()] += 1


def kernels(place: Path, layers: int) -> Counter[str]:
    """Those of Qwen3 0.6B in full, of so many layers, two rows of 4,096 at a time; liger has no part in them."""
    steps = (one for one in steps_of("NVIDIA H200") if str(one).startswith("Qwen3 0.6B full bf16"))
    step = next(one for one in steps if one.micro_rows == 2)  # noqa: PLR2004
    with patch.dict(SHAPES, {step.model: (SHAPES[step.model][0], layers, *SHAPES[step.model][2:])}):
        tree: Mapping[str, Any] = tree_of(step, place)
    tree["train"]["global_batch_size"] = 4
    counted, plain, device = Kernels(), AllocationTracker.__torch_dispatch__, find_device("h200-141g")

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch_private.custom_body(func) is None:
            counted.note(self, func)
        return plain(self, func, types, args, kwargs)

    with patch.object(AllocationTracker, "__torch_dispatch__", dispatch), patch.object(assemble, "apply_liger"):
        predict(load_recipe(tree).recipe, Target(device, RankInfo(), device.memory_bytes))
    return counted.found


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        pytest.param(2, (151, 115), id="two layers"),
        pytest.param(28, (437, 141), id="all of them", marks=pytest.mark.slow),
    ],
)
def test_a_micro_batch_has_a_third_of_the_kernels(layers: int, wanted: tuple[int, int], tmp_path: Path) -> None:
    """Outside of compiled layers; the last norm is a program, too: one kernel forward, and three backward."""
    left = kernels(tmp_path / "grouped", layers)
    with patch.object(grouped_gradients, "GroupedGradients", lambda *given: StepPart()):
        added = kernels(tmp_path / "plain", layers)
    norm = added.pop("norm")
    left["norm"] = min(left["norm"], 4)
    assert norm == 20
    assert (added.total() + norm, left.total()) == wanted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamo_pgo")
@pytest.mark.skipif(compiler_problem("cpu") is not None, reason="no compiler")
def test_the_last_norm_is_one_program(tmp_path: Path) -> None:
    """One kernel forward, and one backward, of which a GPU makes three where rows are many."""
    root = root_for("qwen3", tmp_path)
    norm = root.model.model.norm

    def run() -> None:
        norm(torch.randn(1, TOKENS, 32, requires_grad=True)).sum().backward()

    with patch.object(blocks, "decoder_blocks", lambda *given: []):
        compile_blocks(root, Padding(TOKENS, LONGEST))
    with torch._inductor.config.patch(force_disable_caches=True):
        _, programs = run_and_get_code(run)
    assert [len(re.findall(r"^\w+_fused_\w+ = async_compile", each, re.MULTILINE)) for each in programs] == [1, 1]
