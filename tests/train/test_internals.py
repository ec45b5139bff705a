"""Figures by layer are root mean squares of whole tensors, however many processes hold them; the rule by which a
layer that diverges is named.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from tests.fixtures.processes import run_ranks
from tests.model.tiny import SHAPE
from tests.train.synthetic import SyntheticRows, assembly_for, recipe_for
from tuner.data.batches import collate
from tuner.model.observe import Observation
from tuner.parallel.mesh import Mesh
from tuner.runtime.dist import RankInfo
from tuner.train.internals import FACTOR, LEAST, Divergence, Inside, InternalsWatch, added_up, layers_of
from tuner.train.step import forward_backward, optimizer_step

ROWS = [9, 21, 3, 15]
ADAPTERS = {"full": {"kind": "none"}, "lora": {"kind": "lora", "r": 4}}


def figures(
    model: Path, rank_info: RankInfo, shard: str = "none", adapter: str = "full", rows: int = 1, **parallel: int
) -> dict[str, float]:
    """The figures of a step of the tiny model, which observes so many ``rows``."""
    train = {"global_batch_size": 4, "micro_batch_size": rows, "precision": "fp32"}
    sections = {"parallel": {"shard": shard, **parallel}, "model": {"kernels": "torch"}, "adapter": ADAPTERS[adapter]}
    assembly = assembly_for(recipe_for(model, train=train, **sections), ROWS, rank_info)
    state, batches = assembly.train_state, assembly.batches.step(0)
    watch = InternalsWatch(state)
    with watch.around_update():
        optimizer_step(state, 0, batches, 1.0)
    inside = Inside.of(state.root, batches.micro[0], state.step_config, 1)
    of_step, of_forward = added_up([watch.sums(), inside.sums()])
    return watch.figures(of_step) | inside.figures(of_forward)


def rms(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors]).square().mean().sqrt())


def test_they_are_those_of_the_tensors_themselves(model: Path) -> None:
    found = figures(model, RankInfo())
    train = {"global_batch_size": 4, "micro_batch_size": 1, "precision": "fp32"}
    assembly = assembly_for(recipe_for(model, train=train, model={"kernels": "torch"}), ROWS, RankInfo())
    state, batches = assembly.train_state, assembly.batches.step(0)
    before = {name: parameter.detach().clone() for name, parameter in state.parameters.items()}
    forward_backward(state, 0, batches)
    gradients = {name: parameter.grad.clone() for name, parameter in state.parameters.items()}  # type: ignore[union-attr]
    for parameter in state.parameters.values():
        parameter.grad = None
    optimizer_step(state, 0, batches, 1.0)
    groups = layers_of(state.root, state.parameters)
    assert list(groups) == ["embedding", "layers.0", "layers.1", "rest"]
    for layer, names in groups.items():
        now = [state.parameters[name].detach() for name in names]
        changed = [state.parameters[name].detach() - before[name] for name in names]
        expected = {"weight": rms(now), "grad": rms([gradients[name] for name in names]), "update": rms(changed)}
        for figure, value in expected.items():
            assert found[f"{figure}_rms/{layer}"] == pytest.approx(value, rel=1e-6), (figure, layer)
    assert {name.partition("/")[0] for name in found} >= {"activation_rms", "attention_logit_max", "dead_share"}


@pytest.mark.multi
@pytest.mark.parametrize(
    ("shard", "adapter"),
    [
        pytest.param("full", "full", marks=pytest.mark.slow),
        pytest.param("none", "lora", marks=pytest.mark.slow),
        ("hybrid", "full"),  # each process has a part, of which there are two copies
    ],
)
def test_two_processes_find_those_of_one(shard: str, adapter: str, model: Path, tmp_path: Path) -> None:
    size = 4 if shard == "hybrid" else 2

    def work(rank: int) -> None:
        found = figures(model, RankInfo(rank, size, rank % 2, 2), shard, adapter)
        (tmp_path / f"{rank}.json").write_text(json.dumps(found))

    assert run_ranks(size, tmp_path, work) == [0] * size
    one = figures(model, RankInfo(), adapter=adapter)
    each = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    assert all(found == each[0] for found in each) and each[0].keys() == one.keys()
    alike: Callable[[str], bool] = lambda name: name.startswith(("weight_rms", "grad_rms", "update_rms"))  # noqa: E731
    for name in filter(alike, one):
        assert each[0][name] == pytest.approx(one[name], rel=2e-3 if "update" in name else 1e-5), name
    for name in one.keys() - set(filter(alike, one)):  # of more rows: each process observes one of its own
        assert each[0][name] == pytest.approx(one[name], rel=0.5, abs=0.2), name


@pytest.mark.multi
def test_processes_that_share_rows_give_the_figures_of_one(model: Path, tmp_path: Path) -> None:
    """Each has some heads and hidden units of the layers, or some positions of the rows."""
    axes = ("tensor", "sequence")

    def work(rank: int) -> None:
        found = {axis: figures(model, RankInfo(rank, 2, rank, 2), "full", rows=4, **{axis: 2}) for axis in axes}
        (tmp_path / f"{rank}.json").write_text(json.dumps(found))

    assert run_ranks(2, tmp_path, work) == [0, 0]
    one = figures(model, RankInfo(), rows=4)
    for rank in range(2):
        for axis, found in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            assert found.keys() == one.keys(), axis
            for name, expected in one.items():
                assert found[name] == pytest.approx(expected, rel=2e-3 if "update" in name else 1e-5), (axis, name)


def test_units_of_a_layer_that_processes_compute_together_are_counted_apart() -> None:
    """Three of four are dead: the first is alive on one process and dead on the other, where it is another one."""
    alive = [torch.tensor([True, False]), torch.tensor([False, False])]
    seen = [Observation(alive={0: one}) for one in alive]
    insides = [Inside(one, Mesh({"tensor": 2}, rank), True) for rank, one in enumerate(seen)]
    sums = {name: tensor + insides[1].sums()[name] for name, tensor in insides[0].sums().items()}
    assert insides[0].figures(sums)["dead_share/layers.0"] == 0.75


@pytest.mark.multi
def test_routers_logits_and_the_weights_of_states_are_those_of_the_model_itself(tmp_path: Path) -> None:
    """A gated delta layer and one with attention, both with experts: on one process and with shards on two."""
    torch.manual_seed(3)
    sizes = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    kinds = ["linear_attention", "full_attention"]
    shape = {**SHAPE, "layer_types": kinds, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16}
    plain = AutoModelForCausalLM.from_config(Qwen3NextConfig(**shape, **sizes, **experts), dtype=torch.float32)
    mixer = plain.model.layers[0].linear_attn
    with torch.no_grad():
        mixer.norm.weight.uniform_(-0.5, 3.0)
    plain.save_pretrained(tmp_path)
    said: list[list[torch.Tensor]] = [[], []]
    for row in range(len(ROWS)):
        batch = collate([SyntheticRows(ROWS).row(row)])
        for ids in torch.tensor(batch.input_ids).split(batch.lengths):
            logits = plain(ids[None], use_cache=False, output_router_logits=True).router_logits
            for layer, own in zip(said, logits, strict=True):
                layer.append(own.detach())
    wanted = {
        f"{name}_{end}/layers.0": float(getattr(weight.detach(), end)())
        for name, weight in (("state_norm", mixer.norm.weight), ("decay_log", mixer.A_log))
        for end in ("min", "max")
    }
    for index, layer in enumerate(said):
        wanted[f"router_logit_max/layers.{index}"] = float(torch.cat(layer).max())
        wanted[f"router_logit_mean/layers.{index}"] = float(torch.cat(layer).mean())

    def found(info: RankInfo) -> dict[str, float]:
        size = {"global_batch_size": 4, "micro_batch_size": 4 // info.world_size}
        assembly = assembly_for(recipe_for(tmp_path, train=size, parallel={"shard": "full"}), ROWS, info)
        state, batches = assembly.train_state, assembly.batches.step(0)
        inside = Inside.of(state.root, batches.micro[0], state.step_config, 1)
        return inside.figures(added_up([inside.sums()])[0])

    def work(rank: int) -> None:
        (tmp_path / f"{rank}.json").write_text(json.dumps(found(RankInfo(rank, 2, rank, 2))))

    assert run_ranks(2, tmp_path, work) == [0, 0]
    for one in (found(RankInfo()), *(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))):
        assert {name: one[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert not [name for name in one if name not in wanted and name.startswith(("state", "decay", "router_logit"))]


def measured(*values: float | None, figure: str = "grad_rms") -> dict[str, float | None]:
    return {f"{figure}/layers.{i}": value for i, value in enumerate(values)} | {f"{figure}/embedding": 1.0}


def noted(rows: list[dict[str, float | None]]) -> list[str]:
    """What is named, measurement by measurement."""
    divergence = Divergence()
    return [",".join(f"{one.layer} {one.figure}" for one in divergence.note(row)) for row in rows]


def test_a_layer_that_leaves_the_others_is_named_once_until_it_is_calm() -> None:
    calm = [measured(1.0, 1.1, 0.9)] * LEAST
    loud = measured(1.0, 5.0, 0.9)
    found = noted([*calm, loud, loud, calm[0], loud])
    assert found == ["", "", "", "layers.1 grad_rms", "", "", "layers.1 grad_rms"]


@pytest.mark.parametrize(
    ("last", "named"),
    [
        (measured(FACTOR * 1.01, FACTOR * 1.02, FACTOR * 1.01), ""),  # as all of them grow
        (measured(FACTOR * 0.99, 1.0, 1.0), ""),
        (measured(2.0, 2.0, 2.0 * FACTOR), "layers.2 grad_rms"),
        (measured(1.0, None, 1.0), "layers.1 grad_rms"),
        (measured(None, None, None), ""),  # the guard's affair
        (measured(1.0, 1.0, 1.0, figure="dead_share"), ""),
        (measured(-1.0, -9.0, 1.0), "layers.1 grad_rms"),
    ],
)
def test_what_counts_as_leaving_the_others(last: dict[str, float | None], named: str) -> None:
    assert noted([*[measured(1.0, 1.0, 1.0)] * LEAST, last])[-1] == named


def test_outputs_of_later_layers_have_grown_with_it() -> None:
    figure = "activation_rms"
    rows = [measured(1.0, 1.0, 1.0, 1.0, 1.0, figure=figure)] * LEAST
    assert noted([*rows, measured(1.0, 1.0, 1.0, 9.0, 8.0, figure=figure)])[-1] == f"layers.3 {figure}"


def test_too_few_measurements_say_nothing() -> None:
    assert noted([measured(1.0, 1.0)] * (LEAST - 1) + [measured(1.0, 99.0)]) == [""] * LEAST


def test_what_was_always_zero_has_not_grown() -> None:
    assert noted([*[measured(0.0, 0.0)] * LEAST, measured(1e-4, 1e-4)])[-1] == ""


def test_the_only_layer_is_held_to_itself() -> None:
    assert noted([*[measured(1.0)] * LEAST, measured(FACTOR)])[-1] == "layers.0 grad_rms"


def test_the_sentence_names_layer_figure_and_growth() -> None:
    divergence = Divergence()
    for _ in range(LEAST):
        divergence.note(measured(0.5, 0.5))
    (growth,) = divergence.note(measured(0.5, 6.0))
    said = "layers.1 diverges: its grad_rms is 6, 12.0 times what it was; that of the other layers 1.0 times"
    assert str(growth) == said
