"""Steps of a run at one number of processes after another, each part from the checkpoint of the one before."""

from collections.abc import Callable
from pathlib import Path

from tests.fixtures.processes import run_ranks
from tests.train.synthetic import resume
from tuner.checkpoint.open import newest
from tuner.checkpoint.save import CheckpointDir, save
from tuner.runtime.dist import RankInfo
from tuner.setup.build import Assembly, run_tensors

Make = Callable[[RankInfo], Assembly]
Take = Callable[[Assembly, int], None]


def trained(assembly: Assembly, take: Take, source: Path | None, steps: range, target: Path) -> Path:
    """Steps of these numbers, from a checkpoint unless they are the first ones; the one that is saved. Collective."""
    state = assembly.train_state
    if source is not None:
        resume(assembly, source, steps.start)
    for step in steps:
        take(assembly, step)
    return save(CheckpointDir(target, "run"), steps.stop, run_tensors(state), {"step": steps.stop}, {})


def trained_by(world: int, make: Make, take: Take, source: Path | None, steps: range, target: Path) -> Path:
    """As `trained`, of a group of this many processes."""
    target.mkdir()

    def work(rank: int) -> None:
        trained(make(RankInfo(rank, world, rank, world)), take, source, steps, target)

    assert run_ranks(world, target.parent, work) == [0] * world
    saved = newest(target)
    assert saved is not None
    return saved.path
