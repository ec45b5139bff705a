"""Compiled layers over processes: the losses and gradients of one process without the compiler."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.utils import counters

from tests.fixtures.processes import run_ranks
from tests.model.test_compile import traced_alone
from tests.model.tiny import family_model
from tests.train.synthetic import MAX_LENGTH, assembly_for, recipe_for
from tuner.config.recipe import Recipe
from tuner.errors import RecipeError
from tuner.runtime.dist import RankInfo
from tuner.setup import resolve as resolving
from tuner.setup.resolve import resolve
from tuner.train.step import optimizer_step

TRAINED, STEPS = [1, 25, 3, 15, 20, 7, 30, 2], 2
AXES: dict[str, dict[str, Any]] = {
    "shards": {"shard": "full"}, **{axis: {axis: 2, "shard": "full"} for axis in ("tensor", "sequence", "expert")}
}
OUTSIDE = {"expert": 4}
"""Places that are left to the interpreter: before and after tokens are sent, of the first layer and of the others."""
LORA = {"adapter": {"kind": "lora", "r": 4, "alpha": 8}}
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "shards": ("mixtral", "shards", "selective", {}), "tensor": ("mixtral", "tensor", "full", {}),
    "tensor, dense": ("llama", "tensor", "none", {}), "tensor, adapter": ("llama", "tensor", "full", LORA),
    "sequence": ("mixtral", "sequence", "full", {}), "sequence, dense": ("llama", "sequence", "none", LORA),
    "expert": ("mixtral", "expert", "none", {}),
}
CHEAP = {"tensor"}

__all__ = ["traced_alone"]


@pytest.mark.usefixtures("traced_alone")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.*context_fn")
@pytest.mark.slow(*(name for name in CASES if name not in CHEAP))
@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_compiled_with_what_its_processes_exchange(name: str, tmp_path: Path) -> None:
    family, axis, level, sections = CASES[name]
    model, said = tmp_path / "model", tmp_path / "said.json"
    written = family_model(family, tied=False)
    if family == "mixtral":
        written.config.output_router_logits, written.config.router_aux_loss_coef = True, 0.1
    written.save_pretrained(model)

    def steps(rank_info: RankInfo, parallel: dict[str, Any], compiled: bool) -> list[list[float]]:
        train = {"global_batch_size": 4, "micro_batch_size": 1, "compile": compiled, "gradient_checkpointing": level}
        recipe = recipe_for(model, train=train, parallel=parallel, **sections)
        assembly = assembly_for(recipe, TRAINED, rank_info)
        found = [
            optimizer_step(assembly.train_state, step, assembly.batches.step(step), 1.0).read() for step in range(STEPS)
        ]
        return [[float(each.loss), float(each.grad_norm)] for each in found]

    def work(rank: int) -> None:
        counters.clear()
        found = steps(RankInfo(rank, 2, rank, 2), AXES[axis], True)
        if rank == 0:
            graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"].total()
            said.write_text(json.dumps([found, graphs, breaks]))

    assert run_ranks(2, tmp_path, work) == [0, 0]
    found, graphs, breaks = json.loads(said.read_text())
    for one, wanted in zip(found, steps(RankInfo(), {}, False), strict=True):
        assert one == pytest.approx(wanted, rel=1e-5)
    assert breaks == OUTSIDE.get(axis, 0)
    assert 1 < graphs <= 3 + breaks  # one is the last norm's


@pytest.fixture
def sending(tmp_path: Path) -> Recipe:
    """Experts on two processes, in layers that are computed again."""
    family_model("mixtral", tied=False).save_pretrained(tmp_path)
    return recipe_for(tmp_path, train={"gradient_checkpointing": "full"}, parallel={"expert": 2, "shard": "full"})


def test_layers_that_send_tokens_again_are_left_as_they_are(sending: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_info, facts = RankInfo(0, 2, 0, 2), resolving.device_facts
    for name in ("compiler_problem", "triton_problem"):
        monkeypatch.setattr(resolving, name, lambda *given: None)
    monkeypatch.setattr(resolving, "device_facts", lambda *given: replace(facts(*given), kind="cuda"))
    why = "layers send tokens to their experts (parallel.expert), and are computed again (gradient_checkpointing)"
    assert resolve(sending, MAX_LENGTH, rank_info).reasons["train.compile"] == why
    asked = sending.model_copy(update={"train": sending.train.model_copy(update={"compile": True})})
    with pytest.raises(RecipeError, match="train.compile: layers send tokens") as refused:
        resolve(asked, MAX_LENGTH, rank_info)
    assert refused.value.hint == "write train.compile: false"
