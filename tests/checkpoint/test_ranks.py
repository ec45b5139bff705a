"""Several gloo processes: saved at one world size, loaded at another; failing together."""

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpoint.states import blank, equal, full_state
from tests.fixtures.processes import run_ranks
from tests.fixtures.tensors import whole
from tuner.checkpoint.load import content_sha256, load_into, read_tensors
from tuner.checkpoint.open import newest, open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.checkpoint.staging import Staging
from tuner.errors import DataError, MachineError, TunerError
from tuner.run.background import Background
from tuner.runtime.process import Collective, another_gloo_group

pytestmark = pytest.mark.multi


def spread(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows over the ranks where there are rows (unevenly, some ranks empty), columns, replicas and plain tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placed = dict(state)
    for name in ("model/weight", "model/short", "model/empty", "optimizer/ids"):
        placed[name] = distribute_tensor(state[name], mesh, [Shard(0)])
    placed["model/transposed"] = distribute_tensor(state["model/transposed"].contiguous(), mesh, [Shard(1)])
    placed["optimizer/mask"] = distribute_tensor(state["optimizer/mask"], mesh, [Replicate()])
    return placed


def gathered(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: whole(value) for name, value in state.items()}


@pytest.mark.parametrize("saved_at", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_saved_at_one_world_size_loaded_at_others(tmp_path: Path, saved_at: int) -> None:
    state = full_state(5)
    expected = content_sha256(open_checkpoint(save(CheckpointDir(tmp_path / "one", "r"), 1, state, {}, {})))
    run = CheckpointDir(tmp_path / "several", "r")

    def save_rank(rank: int) -> None:
        final = save(run, 1, spread(state), {"from": rank}, {"from": rank})
        assert final.name == "step-1"
        assert save(run, 1, spread(state), {"from": rank}, {}) == final

    assert run_ranks(saved_at, tmp_path, save_rank) == [0] * saved_at
    info = open_checkpoint(run.path / "step-1")
    assert (info.manifest["world_size"], info.state, info.meta) == (saved_at, {"from": 0}, {"from": 0})
    assert len(list(info.path.glob("rank-*"))) == saved_at
    assert content_sha256(info) == expected
    assert equal(dict(read_tensors(info)), state)
    alone = blank(state)
    load_into(info, alone)
    assert equal(alone, state)

    def load_rank(rank: int) -> None:
        for path in (info.path, tmp_path / "one" / "step-1"):
            target = spread(blank(state))
            load_into(open_checkpoint(path), target)
            assert equal(gathered(target), state)

    for loaded_at in (2, 4):
        assert run_ranks(loaded_at, tmp_path, load_rank) == [0] * loaded_at


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, dtype=torch.bfloat16))


def test_a_fully_sharded_model_changes_its_world_size(tmp_path: Path) -> None:
    run = CheckpointDir(tmp_path / "c", "r")

    def sharded(seed: int) -> dict[str, torch.Tensor]:
        model = _model(seed)
        for layer in model:
            fully_shard(layer)
        return {f"model/{name}": parameter for name, parameter in fully_shard(model).named_parameters()}

    assert run_ranks(2, tmp_path, lambda rank: save(run, 1, sharded(1), {}, {}) and None) == [0, 0]
    wanted = {f"model/{name}": value.detach() for name, value in _model(1).named_parameters()}
    assert equal(dict(read_tensors(open_checkpoint(run.path / "step-1"))), wanted)

    def load_rank(rank: int) -> None:
        target = sharded(2)
        load_into(open_checkpoint(run.path / "step-1"), target)
        assert equal({name: value.detach() for name, value in gathered(target).items()}, wanted)

    assert run_ranks(4, tmp_path, load_rank) == [0] * 4


Save = Callable[[CheckpointDir, int, dict[str, torch.Tensor]], None]


def at_once(run: CheckpointDir, step: int, state: dict[str, torch.Tensor]) -> None:
    save(run, step, state, {}, {})


def beside(run: CheckpointDir, step: int, state: dict[str, torch.Tensor]) -> None:
    """Save a copy in a thread with a group of its own, while the tensors change and the ranks speak to each other."""
    staged, background = Staging().stage(state), Background[Path]("save")
    ranks = Collective(another_gloo_group(20.0))
    background.start(lambda: save(run, step, state, {}, {}, staged=staged, ranks=ranks))
    for tensor in state.values():
        tensor.zero_()
    for number in range(50):
        total = torch.tensor([number])
        dist.all_reduce(total)
        assert total.item() == number * dist.get_world_size()
    background.finish()


def test_ranks_save_beside_each_other_what_they_save_at_once(tmp_path: Path) -> None:
    def save_rank(rank: int) -> None:
        for way in (at_once, beside):
            for step in (1, 2):
                way(CheckpointDir(tmp_path / way.__name__, "r"), step, spread(full_state(step)))

    assert run_ranks(2, tmp_path, save_rank) == [0, 0]
    for step in ("step-1", "step-2"):
        one, other = tmp_path / "at_once" / step, tmp_path / "beside" / step
        assert open_checkpoint(one).manifest == open_checkpoint(other).manifest


def failing_save(
    run: CheckpointDir, sabotage: Callable[[int], None], heard: Path, way: Save = at_once
) -> Callable[[int], None]:
    """A rank's work: save step 1 whole, then step 2 under sabotage, and note the exception's class and words."""

    def work(rank: int) -> None:
        save(run, 1, spread(full_state(1)), {}, {})
        state = spread(full_state(2))
        sabotage(rank)
        try:
            way(run, 2, state)
            answer = ["", ""]
        except (TunerError, RuntimeError) as error:
            answer = [type(error).__name__, str(error)]
        (heard / f"heard-{rank}").write_text(json.dumps(answer))

    return work


def _no_space_on_rank_1(rank: int) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        os.write = full  # type: ignore[assignment]


def _rename_fails_on_rank_0(rank: int) -> None:
    real = os.rename

    def broken(source: Path, target: Path) -> None:
        if Path(target).name == "step-2":
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    if rank == 0:
        os.rename = broken  # type: ignore[assignment]


def _bug_on_rank_1(rank: int) -> None:
    if rank == 1:
        torch.Tensor.reshape = None  # type: ignore[assignment]


@pytest.mark.parametrize("way", [at_once, beside])
@pytest.mark.parametrize(
    ("sabotage", "culprit", "kind"),
    [
        (_no_space_on_rank_1, "rank 1", MachineError.__name__),
        (_rename_fails_on_rank_0, "rank 0", MachineError.__name__),
        (_bug_on_rank_1, "rank 1", "RuntimeError"),
    ],
)
def test_one_ranks_failure_is_raised_on_all(
    tmp_path: Path, sabotage: Callable[[int], None], culprit: str, kind: str, way: Save
) -> None:
    run = CheckpointDir(tmp_path / "c", "r")
    assert run_ranks(2, tmp_path, failing_save(run, sabotage, tmp_path, way)) == [0, 0]
    for rank in range(2):
        name, words = json.loads((tmp_path / f"heard-{rank}").read_text())
        assert name == kind
        assert words.startswith(f"{culprit}: ")
        assert words.count("rank 0:") + words.count("rank 1:") == 1
    assert os.listdir(run.path) == ["step-1"]
    assert newest(run.path, pytest.fail) is not None


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_and_the_previous_stays(tmp_path: Path, call: str, victim: int) -> None:
    run = CheckpointDir(tmp_path / "c", "r")

    def kill(rank: int) -> None:
        if rank == victim:
            setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    codes = run_ranks(2, tmp_path, failing_save(run, kill, tmp_path))
    assert codes[victim] == -signal.SIGKILL
    assert json.loads((tmp_path / f"heard-{1 - victim}").read_text())[0] == "RuntimeError"
    info = newest(run.path, pytest.fail)
    assert info is not None
    assert info.step == 1


def test_a_corrupt_shard_is_named_on_every_rank(tmp_path: Path) -> None:
    run = CheckpointDir(tmp_path / "c", "r")
    state = full_state(1)
    assert run_ranks(2, tmp_path, lambda rank: save(run, 1, spread(state), {}, {}) and None) == [0, 0]
    info = open_checkpoint(run.path / "step-1")
    (info.path / "rank-0001-of-0002.safetensors").unlink()

    def load_rank(rank: int) -> None:
        with pytest.raises(DataError, match=r"rank-0001-of-0002\.safetensors"):
            load_into(info, spread(blank(state)))

    assert run_ranks(2, tmp_path, load_rank) == [0, 0]
