"""Every optimizer on weights that two axes split takes the steps of one process, and saves what one process saves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from tests.fixtures.processes import run_ranks
from tests.parallel.meshes import STRIDED, cut, mesh_of, placed
from tuner.checkpoint.load import content_sha256, load_into, read_tensors
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.checkpoint.staging import Staging
from tuner.config.optimizers import Optimizer
from tuner.errors import RecipeError
from tuner.parallel.layouts import whole
from tuner.train.ema import Ema
from tuner.train.optimizer import OptimizerSet, build_optimizer

SECTIONS: TypeAdapter[Any] = TypeAdapter(Optimizer)
SHAPES = {
    "up.weight": (12, 512), "down.weight": (10, 512), "fused.weight": (16, 512), "embed.weight": (7, 512),
    "experts.up": (4, 6, 256), "bias": (12,), "norm.weight": (5,), "alone": (3,),
}
OUTER = frozenset({"embed.weight"})
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"kind": "adamw"}, "host": {"kind": "adamw", "offload": "host"}, "sgd": {"kind": "sgd", "nesterov": True},
    "8bit": {"kind": "adamw", "state": "8bit"}, "chance": {"kind": "adamw", "rounding": "stochastic"},
    "both": {"kind": "adamw", "rounding": "stochastic", "state": "8bit"}, "adafactor": {"kind": "adafactor"},
    "adafactor-scaled": {"kind": "adafactor", "scale_parameter": True}, "muon": {"kind": "muon", "adamw_lr": 1e-3},
}
EXACT = {"chance", "both"}
"""Those of which every bit is the same: elsewhere torch's kernel may round the last few numbers of a part otherwise."""
SUMMED = {"adafactor", "adafactor-scaled"}
"""Those whose updates are made of sums over what other processes have."""
GATHERED = {"adamw", "both"}
"""Those whose states are put together from what processes have, too; of all that is done from what they save."""
State = dict[str, torch.Tensor]


def drawn(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    return torch.randn(SHAPES[name], generator=generator) ** 3


def ways() -> dict[str, tuple[tuple[int, ...], tuple[Any, ...]]]:
    """How each weight lies over 2 x 2 processes: as tensor parallelism and FSDP2 place them."""
    from torch.distributed.tensor import Shard

    rows, columns, fused = (STRIDED(0, 2), Shard(0)), (Shard(0), Shard(1)), (Shard(1), STRIDED(0, 2))
    named = {"up.weight": rows, "down.weight": columns, "fused.weight": fused, "embed.weight": rows}
    return {name: ((2, 2), way) for name, way in (named | {"experts.up": rows, "bias": rows}).items()}


def of_shards(one: torch.Tensor) -> torch.Tensor:
    """A norm, which FSDP2 alone shards."""
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(one, mesh_of((2, 2))["shard"], [Shard(0)], src_data_rank=None)


def laid_out(name: str, one: torch.Tensor, several: bool) -> torch.Tensor:
    if not several or name == "alone":
        return one.clone()
    return of_shards(one) if name == "norm.weight" else placed(one, *ways()[name])


def trained(
    kind: str, several: bool, steps: range, source: Path | None = None, seen: dict[int, State] | None = None
) -> tuple[State, OptimizerSet]:
    """Weights, moments and averages after steps with drawn gradients, from a checkpoint where one is given.

    ``seen`` gets a copy of them after each step.
    """
    section = SECTIONS.validate_python({"lr": 0.01, "weight_decay": 0.3, **KINDS[kind]})
    dtype = torch.bfloat16 if KINDS[kind].get("rounding") else torch.float32
    own = {name: nn.Parameter(laid_out(name, drawn(name, 0).to(dtype), several)) for name in SHAPES}
    optimizer = build_optimizer(section, own, OUTER, OUTER, seed=3)
    average = Ema(nn.Module(), own, 0.9, "ema/", evaluated=False)

    def state() -> State:
        weights = {f"model/{name}": parameter.data for name, parameter in own.items()}
        averages = average.tensors()
        return weights | optimizer.state_tensors() | averages

    if source is not None:
        load_into(open_checkpoint(source), state())
        optimizer.set_step_count(steps.start)
    for step in steps:
        for name, parameter in own.items():
            parameter.grad = laid_out(name, drawn(name, step + 1).to(dtype), several)
        optimizer.set_factor(1 / (step + 1))
        optimizer.step(torch.tensor(False), torch.tensor(2.0))
        optimizer.zero_grad()
        average.after_update(torch.tensor(False))
        if seen is not None:
            seen[step + 1] = {name: one.detach().clone() for name, one in state().items()}
    return state(), optimizer


def near(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], kind: str) -> None:
    """The bits of whole vectors of numbers are the same where nothing is a sum; others are near."""
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert found[name].shape == one.shape and found[name].dtype == one.dtype, name
        if kind in EXACT or (kind not in SUMMED and len(SHAPES[name.rpartition("/")[2]]) > 1):
            assert torch.equal(found[name], one), (kind, name)
        else:
            difference = torch.linalg.vector_norm(found[name].double() - one.double())
            assert difference <= 2e-6 * torch.linalg.vector_norm(one.double()), (kind, name, float(difference))


@pytest.mark.multi
def test_four_processes_take_the_steps_of_one_and_one_takes_over(tmp_path: Path) -> None:
    by_one: dict[str, dict[int, State]] = {kind: {} for kind in KINDS}
    for kind, seen in by_one.items():
        trained(kind, False, range(5), seen=seen)
        save(CheckpointDir(tmp_path / kind / "one", "r"), 2, seen[2], {}, {})  # for those that take over

    def work(rank: int) -> None:
        for kind in KINDS:
            state, optimizer = trained(kind, True, range(2, 4), tmp_path / kind / "one" / "step-2")
            if kind in GATHERED:
                near({name: whole(one).detach() for name, one in state.items()}, by_one[kind][4], kind)
            run = CheckpointDir(tmp_path / kind / "four", "r")
            in_place = optimizer.host_names()
            assert bool(in_place) == (kind == "host")
            staged = Staging().stage(state, in_place)
            save(run, 4, state, {}, {}, staged=staged)

    assert run_ranks(4, tmp_path, work) == [0] * 4
    for kind in KINDS:
        saved = open_checkpoint(tmp_path / kind / "four" / "step-4")
        assert len(saved.index()["model/fused.weight"].chunks) == 8, "two parts on each of four processes"
        near(dict(read_tensors(saved)), by_one[kind][4], kind)
        if kind in EXACT:
            whole_run = save(CheckpointDir(tmp_path / kind / "whole", "r"), 4, by_one[kind][4], {}, {})
            assert content_sha256(saved) == content_sha256(open_checkpoint(whole_run))
        alone, _ = trained(kind, False, range(4, 5), saved.path)
        near(alone, by_one[kind][5], kind)


@pytest.mark.multi
def test_rows_that_are_split_within_a_block_are_refused(tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard

    def work(rank: int) -> None:
        for width, section, said in (
            (500, {"state": "8bit"}, "down.weight: its rows of 500 numbers are split where the blocks of 8-bit states"),
            (510, {"rounding": "stochastic"}, "split where the random numbers of optimizer.rounding: stochastic"),
        ):
            weight = placed(torch.zeros(10, width, dtype=torch.bfloat16), (2, 2), (Shard(0), Shard(1)))
            chosen = SECTIONS.validate_python({"kind": "adamw", "lr": 0.01, **section})
            with pytest.raises(RecipeError, match=said):
                build_optimizer(chosen, {"down.weight": nn.Parameter(weight)})
        assert cut(torch.arange(4.0), placed(torch.zeros(4), (4,), (Shard(0),))).tolist() == [rank]

    assert run_ranks(4, tmp_path, work) == [0] * 4
