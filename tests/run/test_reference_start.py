"""A run begins as its reference where rounding alone sets them apart, and no other model passes for the reference."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures import paired
from tests.fixtures.processes import fork, wait
from tests.fixtures.trainings import launch, lines, loaded
from tests.model.test_compile import otherwise_without_gradients
from tests.runtime.test_process import free_port
from tuner.data.building.columns import Columns
from tuner.errors import VerificationError
from tuner.model.adapter import lora_layers
from tuner.parallel.fsdp import local
from tuner.parallel.mesh import Mesh
from tuner.run import columns, reference
from tuner.run.columns import key_of
from tuner.run.main import train
from tuner.run.options import LaunchOptions
from tuner.run.reference import UNIT, Rounding, allowed, require_start
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.setup.build import Assembly

__all__ = ["otherwise_without_gradients"]
LAST_UP = "model.layers.1.mlp.down_proj.lora_B.default.weight"
ONE_STEP = 1e-4
"""By how much a step of AdamW at that rate moves a weight."""
ROUTES = {
    "columns": {"train__precision": "bf16"},
    "lora": {"adapter__kind": "lora", "train__precision": "bf16"},
    "dora": {"adapter__kind": "dora"},
    "lora and columns": {"adapter__kind": "lora", "method__reference": "columns", "train__precision": "bf16"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paired.prepare(tmp_path_factory.mktemp("made"), pairs=24)


class _Asked(Exception):
    """In the place of a check: what would be checked."""


@pytest.fixture(scope="module")
def begun(made: Path) -> Mapping[str, Assembly]:
    """What a launch of each route has before its first step."""
    found: dict[str, Assembly] = {}

    def keep(assembly: Assembly, console: Console, name: str) -> None:
        found[name] = assembly
        raise _Asked

    for name, flags in ROUTES.items():
        with pytest.MonkeyPatch.context() as patch, pytest.raises(_Asked):
            patch.setattr(reference, "require_start", partial(keep, name=name))
            launch(made, name=name.replace(" ", "-"), **flags)
    return found


@contextmanager
def moved(parameter: torch.Tensor, by: float) -> Iterator[None]:
    """A weight, each number of it so far to one side or the other."""
    kept = parameter.detach().clone()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        parameter.add_(by * (2 * torch.randint(0, 2, parameter.shape, generator=generator) - 1))
    try:
        yield
    finally:
        with torch.no_grad():
            parameter.copy_(kept)


def columns_of(assembly: Assembly) -> dict[str, Columns]:
    """The columns that the model as it is gives all rows."""
    values = reference.values_of(assembly)
    splits = {"train": assembly.prepared.train, "eval": assembly.prepared.eval}
    found: dict[str, Columns] = {}
    for split, rows in splits.items():
        assert rows is not None
        parts = [values(rows, rows.row(i))["reference"] for i in range(len(rows))]
        found[split] = {"reference": np.concatenate(parts)}
    return found


def of_moved(weight: Callable[[Assembly], torch.Tensor], by: float, assembly: Assembly) -> Assembly:
    """With the columns of a model one weight of which is another."""
    with moved(weight(assembly), by):
        return columns.attached(assembly, columns_of(assembly), reference.with_row_columns)


def with_columns(change: Callable[[Any], Any], assembly: Assembly) -> Assembly:
    """With changed columns."""
    found = columns_of(assembly)
    changed = {split: {"reference": change(part["reference"])} for split, part in found.items()}
    return columns.attached(assembly, changed, reference.with_row_columns)


def up_of(assembly: Assembly) -> torch.Tensor:
    """B of the adapter on the last layer's first linear layer."""
    found: torch.Tensor = lora_layers(assembly.train_state.root.model)[7][1].lora_B["default"].weight
    return found


def lengths_of(assembly: Assembly) -> torch.Tensor:
    found: torch.Tensor = lora_layers(assembly.train_state.root.model)[7][1].lora_magnitude_vector["default"].weight
    return found


def norm_of(assembly: Assembly) -> torch.Tensor:
    found: torch.Tensor = assembly.train_state.root.model.get_parameter("model.layers.1.input_layernorm.weight")
    return found


def one_ulp(values: Any) -> Any:
    return np.nextafter(values, np.float32(0))


WRONG_COLUMNS: dict[str, tuple[str, Callable[[Assembly], Assembly]]] = {
    "another model by one weight after a step": ("columns", partial(of_moved, norm_of, ONE_STEP)),
    "another model by one weight after fifty": ("columns", partial(of_moved, norm_of, 50 * ONE_STEP)),
    "an adapter on one layer after a step": ("lora and columns", partial(of_moved, up_of, ONE_STEP)),
    "an adapter on one layer after fifty": ("lora and columns", partial(of_moved, up_of, 50 * ONE_STEP)),
    "each by the last bit": ("columns", partial(with_columns, one_ulp)),
    "those of other documents": ("columns", partial(with_columns, partial(np.roll, shift=2))),
    "not numbers": ("columns", partial(with_columns, lambda values: values * np.nan)),
    "means in the place of sums": ("columns", partial(with_columns, lambda values: values / 7)),
}
WRONG_ADAPTERS: dict[str, tuple[str, Callable[[Assembly], torch.Tensor], float]] = {
    "lora on one layer after a step": ("lora", up_of, ONE_STEP),
    "lora on one layer after fifty": ("lora", up_of, 50 * ONE_STEP),
    "dora on one layer after a step": ("dora", up_of, ONE_STEP),
    "one length after a step": ("dora", lengths_of, ONE_STEP),
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_model_that_is_its_reference_begins(begun: Mapping[str, Assembly], route: str) -> None:
    require_start(begun[route], Console(main=False))


@pytest.mark.slow(
    "another model by one weight after a step",
    "an adapter on one layer after fifty",
    "those of other documents",
    "means in the place of sums",
)
@pytest.mark.parametrize("case", WRONG_COLUMNS)
def test_columns_of_another_model_are_refused(begun: Mapping[str, Assembly], case: str) -> None:
    route, plant = WRONG_COLUMNS[case]
    with pytest.raises(VerificationError, match="not its reference: document") as caught:
        require_start(plant(begun[route]), Console(main=False))
    assert "it is computed again" in str(caught.value.hint)


@pytest.mark.slow("lora on one layer after fifty")
@pytest.mark.parametrize("case", WRONG_ADAPTERS)
def test_an_adapter_that_adds_something_is_refused(begun: Mapping[str, Assembly], case: str) -> None:
    route, weight, by = WRONG_ADAPTERS[case]
    with moved(weight(begun[route]), by), pytest.raises(VerificationError, match="not its reference") as caught:
        require_start(begun[route], Console(main=False))
    assert "method.reference: columns" in str(caught.value.hint)


@pytest.mark.slow("another")
@pytest.mark.parametrize(
    ("rounds_by", "begins"), [(0.01, True), (5.0, False), (float("nan"), False)], ids=["rounding", "another", "nan"]
)
def test_kernels_that_do_not_repeat_their_bits(
    begun: Mapping[str, Assembly],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rounds_by: float,
    begins: bool,
) -> None:
    real, numbers = reference.reference_values, iter(range(1, 1000))

    def otherwise(*given: Any) -> dict[str, torch.Tensor]:
        return {name: values + rounds_by / next(numbers) for name, values in real(*given).items()}

    monkeypatch.setattr(reference, "reference_values", otherwise)
    if begins:
        require_start(begun["columns"], Console())
        assert "log-ratios begin within 0.00" in capsys.readouterr().err
    else:
        with pytest.raises(VerificationError, match="not its reference"):
            require_start(begun["columns"], Console())


def _next_to_another(directory: Path, rank: int, port: int) -> None:
    """Begin as one of two processes, whose second one has another part of the adapter, and note what it comes to."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    real = reference.require_start

    def planted(assembly: Assembly, console: Console) -> None:
        part = local(assembly.train_state.parameters[LAST_UP])
        with moved(part, ONE_STEP) if rank == 1 else nullcontext():
            real(assembly, console)

    reference.require_start = planted
    flags = {"name": f"two-{port}", "adapter.kind": "lora", "parallel.shard": "full", "parallel.timeout": "20s"}
    try:
        train(loaded(directory, **flags), LaunchOptions(), RankInfo(rank, 2, rank, 2), Console(main=False))
    except VerificationError as error:
        (directory / f"said-{rank}").write_text(error.message)


@pytest.mark.multi
def test_a_model_that_is_another_on_one_process_alone_is_refused_on_all(made: Path) -> None:
    port = free_port()
    children = [fork(partial(_next_to_another, made, rank, port)) for rank in range(2)]
    assert [wait(child) for child in children] == [0, 0]
    said = [(made / f"said-{rank}").read_text() for rank in range(2)]
    assert said[0] == said[1] and "the model is not its reference" in said[0]


def test_what_rounding_explains_follows_from_type_length_and_processes() -> None:
    assert allowed(Rounding(UNIT["bf16"], 1), 64, -100.0) == pytest.approx(1.0, rel=1e-3)
    assert allowed(Rounding(UNIT["fp32"], 1), 64, 0.0) == 2.0**-16
    for more in (Rounding(UNIT["fp16"], 4), Rounding(UNIT["fp16"] * 2, 1)):
        assert allowed(more, 64, 0.0) == 2 * allowed(Rounding(UNIT["fp16"], 1), 64, 0.0)
    # What was seen: lengths of DoRA over two processes, columns of one process on two, compiled layers on a GPU.
    assert allowed(Rounding(UNIT["fp32"], 2), 20, -60.0) > 1.53e-5
    assert allowed(Rounding(UNIT["fp32"], 2), 60, -300.0) > 6.1e-5
    assert allowed(Rounding(UNIT["bf16"], 1), 60, -300.0) > 0.18


def test_the_type_of_products_is_what_rounds(begun: Mapping[str, Assembly]) -> None:
    numerics = begun["dora"].resolved.numerics
    assert Rounding.of(numerics, Mesh()).unit == UNIT["fp32"]
    assert Rounding.of(replace(numerics, tf32=True), Mesh()).unit == UNIT["tf32"]
    assert Rounding.of(begun["lora"].resolved.numerics, Mesh(sequence=2)) == Rounding(UNIT["bf16"], 2)


def test_columns_are_of_the_processes_that_compute_a_layer_together(begun: Mapping[str, Assembly]) -> None:
    assembly = begun["columns"]
    key = key_of(reference.key_facts(assembly))
    others = [Mesh({"tensor": 2}), Mesh({"shard": 2}, sequence=2), Mesh({"shard": 2}, expert=2)]
    keys = {key_of(reference.key_facts(replace(assembly, mesh=mesh))) for mesh in others}
    assert len(keys) == 3 and key not in keys
    same = [Mesh({"shard": 2}), Mesh({"replicate": 2})]
    assert {key_of(reference.key_facts(replace(assembly, mesh=mesh))) for mesh in same} == {key}


@pytest.mark.slow("lora")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.usefixtures("otherwise_without_gradients")
@pytest.mark.parametrize("kind", ["none", "lora"])
def test_compiled_layers_round_alike_with_and_without_gradients(made: Path, kind: str) -> None:
    run = launch(made, name=f"c-{kind}", train__duration="2 steps", train__compile="true", adapter__kind=kind).run_dir
    assert [lines(run)[0][name] for name in ("reward_chosen", "reward_rejected", "margin")] == [0.0] * 3
    assert lines(run)[1]["margin"] != 0.0
