"""Adapters by peft's own configs: two processes, with shards and with replicas, take the steps of one."""

from pathlib import Path

import pytest

from tests.fixtures.peft_kinds import KINDS
from tests.multi.parity import steps_of_two, take_steps
from tests.train.synthetic import assembly_for, recipe_for, write_model
from tuner.errors import RecipeError
from tuner.runtime.dist import RankInfo
from tuner.train.rank_allocation import RankAllocation

SPREAD = [name for name in KINDS if name != "adalora"]


@pytest.mark.slow
@pytest.mark.multi
def test_one_process_and_two_agree(tmp_path: Path) -> None:
    write_model(tmp_path)
    wishes = [{"model": str(tmp_path), "adapter": {"kind": "peft", "config": KINDS[name]}} for name in SPREAD]
    recomputed = {"gradient_checkpointing": "full"}
    two = steps_of_two([{**wish, "train": recomputed} for wish in wishes], tmp_path)
    for name, wish, there in zip(SPREAD, wishes, two, strict=True):
        here = take_steps(wish, RankInfo())
        assert here["trained"] == there["trained"]
        for figure in ("loss", "grad_norm"):
            assert here[figure] == pytest.approx(there[figure], rel=1e-6), name


def test_ranks_are_allocated_in_one_process(tmp_path: Path) -> None:
    write_model(tmp_path)
    recipe = recipe_for(tmp_path, adapter={"kind": "peft", "config": KINDS["adalora"]})
    model = assembly_for(recipe, [9, 30], RankInfo()).train_state.root.model
    with pytest.raises(RecipeError, match="ADALORA allocates ranks by whole gradients, in one process"):
        RankAllocation(model, 2)
