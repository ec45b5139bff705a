"""Trainings of adapters on routed experts: what is trained, steps in parts, and a run that is resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.tiny import family_config
from tests.train.synthetic import assembly_for, recipe_for, resume, taken
from tuner.checkpoint.save import CheckpointDir, save
from tuner.config.load import load_recipe
from tuner.config.other_keys import experts
from tuner.errors import RecipeError
from tuner.model.build import ModelSpec, build_model
from tuner.runtime.dist import RankInfo
from tuner.setup.build import Assembly, run_tensors
from tuner.setup.specs import trained_count

ADAPTER = {"kind": "lora", "r": 3, "dropout": 0.1, "experts": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    family_config("qwen3-moe", tied=False).save_pretrained(directory)
    build_model(ModelSpec(str(directory), random_init=True), torch.float32, seed=5).save_pretrained(directory)
    return directory


def assembled(model: Path, micro: int = 2, adapter: dict[str, Any] = ADAPTER, **train: Any) -> Assembly:
    sizes = {"global_batch_size": 4, "micro_batch_size": micro, **train}
    recipe = recipe_for(model, train=sizes, adapter=adapter, optimizer={"lr": 0.02})
    return assembly_for(recipe, [9, 30, 14, 21, 7, 18, 25, 11], RankInfo(0, 1, 0, 1))


def weights(assembly: Assembly) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in assembly.train_state.parameters.items()}


def test_all_of_them_learn_nothing_else_does_and_a_resumed_run_is_the_same_to_the_bit(
    model: Path, tmp_path: Path
) -> None:
    whole = assembled(model)
    before = weights(whole)
    of_experts = [name for name in before if ".experts." in name]
    assert len(of_experts) == 8 and all("lora_" in name for name in before)
    assert trained_count(whole.resolved) == sum(one.numel() for one in before.values())
    run = CheckpointDir(tmp_path, "id")
    losses = taken(whole, range(2))
    save(run, 2, run_tensors(whole.train_state), {"step": 2}, {})
    losses += taken(whole, range(2, 4))
    after = weights(whole)
    assert all(not torch.equal(before[name], after[name]) for name in of_experts)
    again = assembled(model)
    again.train_state.optimizer.allocate()
    resume(again, tmp_path / "step-2", 2)
    assert taken(again, range(2, 4)) == losses[2:]
    assert all(torch.equal(one, after[name]) for name, one in weights(again).items())


def test_steps_in_parts_are_whole_ones(model: Path) -> None:
    plain = {**ADAPTER, "dropout": 0.0}
    found = [assembled(model, micro, plain) for micro in (1, 4)]
    losses = [taken(assembly, range(2)) for assembly in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    parts, whole = map(weights, found)
    assert all(float((one - whole[name]).norm() / whole[name].norm()) < 1e-4 for name, one in parts.items())


def test_tiles_of_rows_compute_what_rows_do(model: Path) -> None:
    plain = {**ADAPTER, "dropout": 0.0}
    rows, tiles = (taken(assembled(model, 2, plain, tiled_mlp=tiled), range(2)) for tiled in (False, True))
    assert tiles == pytest.approx(rows, rel=1e-6)


def test_the_adapter_is_off_where_a_reference_is_computed(model: Path) -> None:
    from tuner.model.adapter import adapter_off

    assembly = assembled(model)
    root, ids = assembly.train_state.root, torch.arange(3, 20)

    @torch.no_grad()
    def logits() -> torch.Tensor:
        return root.eval().logits(ids, torch.arange(17), (17,), torch.arange(17))

    before = logits()
    taken(assembly, range(2))
    with adapter_off(root.model):
        assert torch.equal(logits(), before)
    assert not torch.equal(logits(), before)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"adapter": {"kind": "dora", "experts": True}}, "DoRA has lengths .* set adapter.kind: lora"),
        ({"adapter": ADAPTER, "parallel": {"tensor": 2}}, "parallel.tensor splits no experts with adapters"),
        ({"adapter": {"kind": "none", "experts": True}}, "not with kind none; write adapter.kind: lora"),
    ],
)
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], reason: str) -> None:
    plain = {"model": {"name_or_path": "m"}, "data": {"train": "a.jsonl"}, **sections}
    with pytest.raises(RecipeError, match=rf"adapter\.experts.*{reason}"):
        load_recipe(plain)


def test_what_others_call_it() -> None:
    both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert experts(both, {}) == experts(",".join(both), {}) == {"adapter.experts": True}
    for part in (both[:1], ["7.mlp.experts.gate_up_proj", "7.mlp.experts.down_proj"]):
        assert "both weights of the routed experts of all layers" in str(experts(part, {}))
    assert experts(["q_proj.weight"], {}) is None and experts(7, {}) is None
