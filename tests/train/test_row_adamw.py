"""Row-wise AdamW: the dense one where every row is touched, lazy elsewhere, and the same whoever holds a row; of
its gradients each row of the global batch once, wherever it lies, and once in the norm.
"""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import nn
from torch.distributed.tensor import DTensor

from tests.fixtures import tables
from tests.fixtures.processes import run_ranks
from tests.parallel.test_lookup import LENGTHS, TOKENS, WIDTH, Scaled, ids_of, module, values
from tests.train.synthetic import assembly_for, recipe_for, write_model
from tuner.cli.work.schedule import peaks
from tuner.config.load import load_recipe, recipe_dict
from tuner.config.optimizers import Optimizer
from tuner.errors import RecipeError
from tuner.model.touched_rows import ByRows, TouchedRows
from tuner.parallel.fsdp import squared_norm, sum_whole_gradients
from tuner.parallel.lookup import spread, sum_over_copies
from tuner.parallel.mesh import Mesh, MeshSpec
from tuner.runtime.dist import RankInfo
from tuner.runtime.warned import Warned, collected
from tuner.setup.build import Assembly, run_tensors
from tuner.setup.check_model import check_model
from tuner.setup.findings import Findings
from tuner.train.optimizer import OptimizerSet, build_optimizer
from tuner.train.row_adamw import RowGradients
from tuner.train.step import StepResult, optimizer_step

V, SIZE, NAME = 12, 6, "embed.weight"
SECTIONS: TypeAdapter[Any] = TypeAdapter(Optimizer)
ONE, CPU = RankInfo(), torch.device("cpu")
STATE = ("exp_avg", "exp_avg_sq", "row_updates")


class Table:
    """An embedding and a vector, and what updates them; of steps the rows and their gradients are given."""

    def __init__(self, held: range = range(V), **section: Any) -> None:
        self.embedding = nn.Embedding(V, SIZE)
        weight = torch.randn(V, SIZE, generator=torch.Generator().manual_seed(0))
        self.embedding.weight = nn.Parameter(weight[held.start : held.stop].clone())
        self.other = nn.Parameter(torch.ones(SIZE))
        self.touched = TouchedRows(self.embedding, V)
        self.touched.hold(held.start, len(held))
        values = {"kind": "adamw", "lr": 0.05, "rows": ["embed"], **section}
        parameters = {NAME: self.embedding.weight, "other.bias": self.other}
        built = SECTIONS.validate_python(values)
        self.updater: OptimizerSet = build_optimizer(built, parameters, touched={NAME: self.touched})
        self.held = held

    def step(self, rows: list[int], number: int, bad: bool = False, divisor: float = 2.0) -> None:
        present = torch.zeros(V, dtype=torch.uint8)
        present[rows] = 1
        self.touched.begin(present)
        ids = torch.tensor(rows, dtype=torch.int64)
        inside = (ids >= self.held.start) & (ids < self.held.stop)
        places = torch.where(inside, ids - self.held.start, len(self.held))
        self.touched.add(places, gradients(number)[ids])
        self.other.grad = torch.ones(SIZE)
        self.updater.set_factor(1 / (number + 1))
        self.updater.step(torch.tensor(bad), torch.tensor(divisor))
        self.updater.zero_grad()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        found = {key: self.updater.state_tensors()[f"optimizer/{key}/{NAME}"] for key in STATE}
        return {name: tensor.detach().clone() for name, tensor in {NAME: self.embedding.weight, **found}.items()}


def gradients(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(V, SIZE, generator=generator) * torch.rand(V, SIZE, generator=generator) ** 6


def test_where_every_row_is_touched_it_is_the_dense_one() -> None:
    ours, dense = Table(weight_decay=0.3), nn.Parameter(Table().embedding.weight.detach().clone())
    theirs = torch.optim.AdamW([dense], lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3)
    for number in range(20):
        ours.step(list(range(V)), number)
        dense.grad, theirs.param_groups[0]["lr"] = gradients(number) / 2, 0.05 / (number + 1)
        theirs.step()
    found = ours.tensors
    assert (found[NAME] - dense).abs().max() < 1e-6
    for moment in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(found[moment], theirs.state[dense][moment], rtol=1e-6, atol=1e-7)
    assert found["row_updates"].tolist() == [20.0] * V


STEPS = st.lists(st.lists(st.integers(0, V - 1), max_size=V, unique=True), min_size=1, max_size=5)


@given(STEPS)
@settings(max_examples=30, deadline=None)
def test_it_is_its_formula_by_the_rows_own_updates(steps: list[list[int]]) -> None:
    ours = Table(rows=[{"match": "embed", "betas": [0.8, 0.9], "eps": 1e-3, "lr": 0.1, "weight_decay": 0.5}])
    weight = ours.embedding.weight.detach().double().clone()
    first, second, count = torch.zeros_like(weight), torch.zeros_like(weight), torch.zeros(V, dtype=torch.float64)
    for number, rows in enumerate(steps):
        before = ours.tensors
        ours.step(rows, number)
        lr, g = 0.1 / (number + 1), gradients(number).double()[rows] / 2
        count[rows] += 1
        first[rows] = 0.8 * first[rows] + (1 - 0.8) * g
        second[rows] = 0.9 * second[rows] + (1 - 0.9) * g * g
        k = count[rows].unsqueeze(1)
        size = (second[rows] / (1 - 0.9**k)).sqrt() + 1e-3
        weight[rows] = weight[rows] * (1 - lr * 0.5) - lr * first[rows] / (1 - 0.8**k) / size
        others = [row for row in range(V) if row not in rows]
        assert all(torch.equal(ours.tensors[name][others], tensor[others]) for name, tensor in before.items())
    torch.testing.assert_close(ours.tensors[NAME].double(), weight, rtol=1e-5, atol=1e-6)
    assert ours.tensors["row_updates"].tolist() == count.tolist()


def test_a_row_that_comes_late_takes_a_step_as_large_as_one_that_comes_early() -> None:
    ours = Table(betas=[0.9, 0.999], eps=1e-20)
    for _ in range(30):
        ours.step([0, 1], 0)
    before = ours.tensors[NAME]
    ours.step([0, 7], 0)
    moved = (ours.tensors[NAME] - before)[7].abs()
    assert moved == pytest.approx(torch.full((SIZE,), 0.05), rel=1e-3), "the learning rate; by the run's count 3 times"


def test_an_update_that_is_left_out_changes_nothing() -> None:
    ours = Table()
    ours.step([1, 2, 5], 0)
    before = ours.tensors
    ours.step([2, 3], 1, bad=True, divisor=float("nan"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.tensors.items())
    ours.step([2, 3], 1)
    assert ours.tensors["row_updates"].tolist()[:6] == [0.0, 1.0, 2.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("size", [1, 2 * SIZE, 5 * SIZE])
def test_bits_depend_neither_on_pieces_nor_on_who_holds_a_row(size: int) -> None:
    whole, parts = Table(), [Table(range(0, 5)), Table(range(5, 11)), Table(range(11, V)), Table(range(V, V))]
    with patch.dict("tuner.train.row_adamw.CHUNK", {"cpu": size}):
        for number, rows in enumerate(([0, 4, 5, 11], [5], [1, 2, 3, 6, 7, 8, 10], [11, 5, 0])):
            for one in parts:
                one.step(rows, number)
    for number, rows in enumerate(([0, 4, 5, 11], [5], [1, 2, 3, 6, 7, 8, 10], [11, 5, 0])):
        whole.step(rows, number)
    for name, tensor in whole.tensors.items():
        assert torch.equal(torch.cat([one.tensors[name] for one in parts]), tensor), name


def test_pieces_whose_slots_are_all_empty_leave_everything() -> None:
    """On a device nobody asks which ones they are."""
    plain, asked = Table(), Table()
    with patch.dict("tuner.train.row_adamw.CHUNK", {"cuda": 2 * SIZE, "cpu": 2 * SIZE}):
        for number, rows in enumerate(([0, 3, 11], [11], [])):
            asked.step(rows, number)
            with patch("tuner.train.row_adamw.target", lambda tensor: "cuda"):
                plain.step(rows, number)
    assert all(torch.equal(tensor, asked.tensors[name]) for name, tensor in plain.tensors.items())


def test_settings_that_are_left_open_are_those_of_the_group_or_the_optimizer() -> None:
    def settings_of(**section: Any) -> dict[str, Any]:
        updater = Table(**section).updater
        group = next(g for o in updater._optimizers for g in o.param_groups if NAME in g["names"])
        return {key: group[key] for key in ("peak_lr", "weight_decay", "betas", "eps")}

    usual = {"peak_lr": 0.05, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}
    assert settings_of(kind="sgd") == usual
    grouped = {"groups": [{"match": "embed", "lr": 0.5, "weight_decay": 0.1}], "betas": [0.5, 0.6], "eps": 1e-4}
    assert settings_of(**grouped) == {"peak_lr": 0.5, "weight_decay": 0.1, "betas": (0.5, 0.6), "eps": 1e-4}
    own = {"match": "embed", "lr": 0.7, "weight_decay": 0.0, "betas": [0, 0.9], "eps": 1e-6}
    found = {"peak_lr": 0.7, "weight_decay": 0.0, "betas": (0, 0.9), "eps": 1e-6}
    assert settings_of(**grouped, rows=[own]) == found
    with pytest.raises(RecipeError, match=r"optimizer\.rows\.1: earlier groups have all that it means"):
        Table(rows=["embed", own])


# Whole trainings: every token is in every global batch of 40 rows, but for those that no row has.
ROWS = [20] * 40
MODEL = "llama"
RATE = 1e-3  # of `recipe_for`
UNUSED = range(3)


def trained(directory: Path, steps: int, rows: bool, **sections: dict[str, Any]) -> tuple[Assembly, list[StepResult]]:
    train = {"global_batch_size": 40, "micro_batch_size": 20, "max_grad_norm": 0.1, **sections.pop("train", {})}
    optimizer = {"rows": ["embed_tokens"] if rows else [], **sections.pop("optimizer", {})}
    assembly = assembly_for(recipe_for(directory, train=train, optimizer=optimizer, **sections), ROWS, ONE)
    state, results = assembly.train_state, []
    for step in range(steps):
        results.append(optimizer_step(state, step, assembly.batches.step(0), 1.0).read())
        assert state.gradients() == {}
    return assembly, results


OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"weight_decay": 0.1}, {"kind": "muon", "weight_decay": 0.1}, {"state": "8bit"},
)


def assert_neighbouring_codes(dense: Assembly, ours: Assembly) -> None:
    """A moment between two codes is rounded by its last digit, which depends on the processor's instructions."""
    of_dense, of_ours = (one.train_state.optimizer.state_tensors() for one in (dense, ours))
    apart = [(of_dense[key].int() - of_ours[key].int()).abs().flatten() for key in of_dense if "_codes/" in key]
    assert torch.cat(apart).max() <= 1 and torch.cat(apart).sum() <= 10, "of 80,000 codes"


@pytest.mark.slow("muon", "8bit")
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "muon", "8bit"])
def test_a_training_in_which_every_row_is_touched_is_the_dense_one(optimizer: dict[str, Any], model: Path) -> None:
    """With micro-batches, clipping, the guard, and other optimizers for the rest, or with their states in 8 bits."""
    larger = {"init": "random", "config": {"hidden_size": 64, "intermediate_size": 90}}
    shape: dict[str, Any] = larger if "state" in optimizer else {}
    dense, wanted = trained(model, 3, False, optimizer=optimizer, model=shape)
    ours, found = trained(model, 3, True, optimizer=optimizer, model=shape)
    for a, b in zip(found, wanted, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-6) and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-6)
        assert b.grad_norm > 0.1, "clipped: a row counts once, however many tokens it has"
    name, far = "model.embed_tokens.weight", 0
    for key, parameter in dense.train_state.parameters.items():
        near = 1e-4 if optimizer.get("kind") == "muon" else 1e-6  # in bf16 it makes much of a last digit
        difference = (ours.train_state.parameters[key] - parameter).abs()[3 if key == name else 0 :]
        if "state" in optimizer:  # a number of which a code differs moves by another share of the rate
            far += int((difference > near).sum())
            near = RATE
        assert difference.max() < near, (key, difference.max())
    assert far <= 5, "of 53,000 numbers"
    if "state" in optimizer:
        assert_neighbouring_codes(dense, ours)
    state = ours.train_state.optimizer.state_tensors()
    counts = state[f"optimizer/row_updates/{name}"]
    assert counts.tolist() == [0.0] * len(UNUSED) + [3.0] * (len(counts) - len(UNUSED))
    start, _ = trained(model, 0, True, optimizer=optimizer, model=shape)
    before, after = (one.train_state.parameters[name][: len(UNUSED)] for one in (start, ours))
    assert torch.equal(before, after), "decay is of rows that are touched"


def test_a_step_with_a_bad_gradient_is_left_out(model: Path) -> None:
    assembly, _ = trained(model, 1, True, train={"nonfinite": {"skip": 1}})
    state = assembly.train_state
    before = {name: tensor.clone() for name, tensor in run_tensors(state).items()}
    head = state.parameters["lm_head.weight"]
    hook = head.register_hook(lambda gradient: gradient * float("nan"))
    assert optimizer_step(state, 1, assembly.batches.step(0), 1.0).read().skipped
    hook.remove()
    assert all(torch.equal(tensor, before[name]) for name, tensor in run_tensors(state).items())


def test_a_step_has_room_for_the_tokens_of_its_global_batch() -> None:
    rows = RowGradients({NAME: TouchedRows(nn.Embedding(V, SIZE), 5)}, Mesh(), CPU)
    rows.begin([np.array([1, 1, 2]), np.array([7, 8])])
    with pytest.raises(ValueError, match="6 tokens are looked up in a step, and there is room for 5"):
        rows.begin([np.array([1, 1, 2]), np.array([7, 8, 9])])


@pytest.mark.parametrize(("sections", "said"), tables.cases(__file__, "what_does_not_go_together_is_refused"))
def test_what_does_not_go_together_is_refused(sections: dict[str, dict[str, Any]], said: str) -> None:
    tree: dict[str, Any] = {"model": {"name_or_path": "x"}, "data": {"train": "x"}, "optimizer": {"rows": ["embed"]}}
    for section, keys in sections.items():
        tree[section] = {**tree.get(section, {}), **keys}
    with pytest.raises(RecipeError, match=re.escape(said)):
        load_recipe(tree)


def test_a_tied_embedding_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    write_model(tmp_path)
    recipe = recipe_for(tmp_path, optimizer={"rows": ["embed_tokens"]})
    found = Findings(load_recipe(recipe_dict(recipe)))
    check_model(recipe, tmp_path, found)
    assert [(problem.key, "tie_word_embeddings" in str(problem)) for problem in found.problems] == [
        ("optimizer.rows", True)
    ]
    with pytest.raises(RecipeError, match="tie_word_embeddings"):
        assembly_for(recipe, ROWS, ONE)


def test_where_a_step_may_touch_every_row_that_is_said(model: Path) -> None:
    warned = Warned()
    with collected(warned, lambda text: None):
        trained(model, 0, True)
    assert any("optimizer.rows saves little here: a global batch has up to 1,280 tokens" in w for w in warned.texts)


def test_rates_of_rows_are_drawn_with_the_others(model: Path) -> None:
    rows = [{"match": "embed_tokens", "lr": 0.5}, "embed_tokens"]
    assert peaks(recipe_for(model, optimizer={"rows": rows}))[-1] == ("rows.0.lr", 0.5)
    assert len(peaks(recipe_for(model, optimizer={"rows": rows}))) == 2


ROUNDS = 2


def laid_out(weight: torch.Tensor, mesh: Mesh, rank: int, most: int) -> tuple[nn.Module, TouchedRows]:
    """The embedding, in shards where the mesh has them, and its touched rows."""
    device_mesh = mesh.device_meshes("cpu").weights
    if device_mesh is None:
        embedding = module(Scaled, len(weight), 3)
        embedding.weight.data.copy_(weight)
        touched = TouchedRows(embedding, most)
        vars(embedding)["forward"] = ByRows(touched)
        return nn.ModuleList([embedding]), touched
    with torch.device("meta"):
        embedding = module(Scaled, len(weight), 3)
    touched = TouchedRows(embedding, most)
    assert spread(embedding, device_mesh, TOKENS, touched), "whether it pays or not"
    root = nn.ModuleList([embedding]).to_empty(device="cpu")
    local = device_mesh.size(device_mesh.ndim - 1)
    if own := weight.chunk(local)[rank % local : rank % local + 1]:
        shard = embedding.weight
        assert isinstance(shard, DTensor)
        shard.to_local().detach().copy_(own[0])
    return root, touched


@pytest.mark.multi
@pytest.mark.parametrize(("shape", "way"), [((1, 2), "full"), ((2, 2), "hybrid"), ((1, 2), "none")])
def test_each_row_of_the_global_batch_is_there_once(shape: tuple[int, int], way: str, tmp_path: Path) -> None:
    """Of tables with more rows than a step has tokens, and with fewer, of which no shard pays."""
    size = shape[0] * shape[1]

    def work(rank: int) -> None:
        for rows in (41, 9):
            check(rank, rows)

    def check(rank: int, rows: int) -> None:
        mesh = Mesh.of(RankInfo(rank, size, rank % shape[1], shape[1]), MeshSpec(way))
        weight = values(rows, torch.float32).nan_to_num(0, 0, 0)
        whole = module(Scaled, rows, 3)
        whole.weight.data.copy_(weight)
        root, touched = laid_out(weight, mesh, rank, ROUNDS * max(LENGTHS[:size]) * size)
        of_step = RowGradients({NAME: touched}, mesh, torch.device("cpu"))
        of_step.begin(ids_of(rank, rows, step).numpy() for step in range(ROUNDS))
        looked_up = set[int]()
        for step in range(ROUNDS):
            for other in range(size):
                ids = ids_of(other, rows, step)
                looked_up |= set(ids.flatten().tolist())
                (whole(ids) ** 3).sum().backward()
            (root[0](ids_of(rank, rows, step)) ** 3).sum().backward()
        if way == "none":
            sum_whole_gradients(p for name, p in root.named_parameters() if not of_step.owns(name))
        else:
            sum_over_copies(root)
        of_step.after_backward()
        gradient, wanted = of_step.gradients()[NAME], whole.weight.grad
        assert root[0].weight.grad is None and wanted is not None and touched.rows is not None
        own = [row for row in touched.rows.tolist() if row < touched.count]
        held = range(touched.first, touched.first + touched.count)
        assert [row + touched.first for row in own] == [row for row in sorted(looked_up - {3}) if row in held]
        values_of = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        assert isinstance(gradient, DTensor) == (way != "none") and values_of.shape == (touched.room, WIDTH)
        expected = wanted[held.start : held.stop][own]
        torch.testing.assert_close(values_of[: len(own)], expected, rtol=1e-6, atol=1e-7)
        assert not values_of[len(own) :].any()
        square = squared_norm([gradient], mesh)
        dist.all_reduce(square)
        torch.testing.assert_close(square, wanted.double().square().sum(), rtol=1e-6, atol=0)

    assert run_ranks(size, tmp_path, work) == [0] * size


@pytest.mark.multi
def test_a_process_whose_backward_pass_does_not_get_there_counts_as_zeros(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        mesh = Mesh.of(RankInfo(rank, 2, rank, 2), MeshSpec("none"))
        root, touched = laid_out(torch.ones(7, WIDTH), mesh, rank, 4)
        of_step = RowGradients({NAME: touched}, mesh, torch.device("cpu"))
        ids = torch.tensor([[1, 5]])
        of_step.begin([ids.numpy()])
        if rank:
            root[0](ids).sum().backward()
        of_step.after_backward()
        gradient = of_step.gradients()[NAME]
        torch.testing.assert_close(gradient[:2], torch.full((2, WIDTH), Scaled.embed_scale))

    assert run_ranks(2, tmp_path, work) == [0, 0]
