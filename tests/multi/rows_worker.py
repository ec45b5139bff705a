"""Takes real steps with row-wise embeddings at this world size, from a checkpoint of any other, and saves one."""

import sys
from pathlib import Path

from torch.distributed.tensor import DTensor

from tests.train.synthetic import assembly_for, recipe_for
from tuner.checkpoint.load import load_into
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import process_group
from tuner.setup.build import run_tensors
from tuner.train.step import optimizer_step

ROWS = [5, 20, 3, 15, 20, 7, 9, 1]
NAME = "model.embed_tokens.weight"


def trained(model: Path, shard: str, rank_info: RankInfo, source: Path | None, steps: range, target: Path) -> Path:
    """Steps of these numbers, from a checkpoint unless they are the first ones; the one that is saved. Collective."""
    recipe = recipe_for(
        model,
        train={"global_batch_size": 4, "micro_batch_size": 1, "max_grad_norm": 0.5},
        optimizer={"rows": ["embed_tokens"], "weight_decay": 0.1},
        parallel={"shard": shard},
    )
    assembly = assembly_for(recipe, ROWS, rank_info)
    state = assembly.train_state
    assert isinstance(state.parameters[NAME], DTensor) == (rank_info.world_size > 1 and shard == "full")
    if source is not None:
        load_into(open_checkpoint(source), run_tensors(state))
        state.optimizer.set_step_count(steps.start)
    for step in steps:
        optimizer_step(state, step, assembly.batches.step(step), 1.0 if step % 2 else 0.5).read()
        assert state.parameters[NAME].grad is None
    return save(CheckpointDir(target, "run"), steps.stop, run_tensors(state), {"step": steps.stop}, {})


def main() -> None:
    model, shard, source, first, last, target = sys.argv[1:]
    rank_info = RankInfo.from_environment()
    with process_group(rank_info, "cpu", 120):
        place = None if source == "-" else Path(source)
        made = trained(Path(model), shard, rank_info, place, range(int(first), int(last)), Path(target))
    if rank_info.is_main:
        print(made)


if __name__ == "__main__":
    main()
