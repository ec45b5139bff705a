"""The loss that keeps experts busy: transformers' own over the global batch, however that is cut up."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.utils import counters

from tests.fixtures.processes import run_ranks
from tests.model.test_compile import traced_alone
from tests.model.tiny import SHAPE, family_config, family_model
from tests.train.synthetic import SyntheticRows, assembly_for, draw_lora_b, recipe_for
from tuner.data.batches import IGNORED, collate
from tuner.errors import RecipeError
from tuner.model.build import meta_model
from tuner.model.router_loss import RouterLoss, router_loss, unasked_term
from tuner.runtime.dist import RankInfo
from tuner.setup.build import Assembly
from tuner.train.evaluate import evaluate, held_out
from tuner.train.step import forward_backward, optimizer_step

TRAINED = [1, 25, 3, 15, 20]
ONE = RankInfo()
WEIGHT = 0.5


__all__ = ["traced_alone"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose config asks for the term, with a weight at which it matters."""
    directory = tmp_path_factory.mktemp("mixture")
    made = family_model("qwen3-moe", tied=False)
    made.config.output_router_logits, made.config.router_aux_loss_coef = True, WEIGHT  # type: ignore[attr-defined]
    made.save_pretrained(directory)
    return directory


class Found(dict[str, torch.Tensor]):
    """Gradients by name, and the loss with the term that is in it."""

    def __init__(self, gradients: dict[str, torch.Tensor], loss: float, term: float) -> None:
        super().__init__(gradients)
        self.loss, self.term = loss, term

    def off(self, other: Found) -> float:
        """How far the other is away: the largest of the differences, relative to the whole."""
        norm = sum(float(one.norm()) ** 2 for one in self.values()) ** 0.5
        apart = sum(float((self[name] - other[name]).norm()) ** 2 for name in self.keys() | other.keys()) ** 0.5
        term = abs(self.term - other.term) / abs(self.term)
        return max(apart / norm, abs(self.loss - other.loss) / abs(self.loss), term)


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.double() for name, p in module.named_parameters() if p.grad is not None}


def padded(rows: list[int]) -> dict[str, torch.Tensor]:
    """The documents of some rows as transformers takes them: filled up on the right, and masked there."""
    batches = [collate([SyntheticRows(TRAINED).row(i)]) for i in rows]
    parts = [
        (batch.input_ids[start:end], batch.targets[start:end])
        for batch in batches
        for start, end in pairwise(accumulate(batch.lengths, initial=0))
    ]
    longest = max(len(ids) for ids, _ in parts)
    ids, mask, labels = (np.full((len(parts), longest), fill) for fill in (0, 0, IGNORED))
    for i, (tokens, targets) in enumerate(parts):
        ids[i, : len(tokens)], mask[i, : len(tokens)], labels[i, 1 : len(tokens)] = tokens, 1, targets[:-1]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}


@pytest.fixture(scope="module")
def wanted(model: Path) -> Found:
    """By transformers alone: one forward of all documents."""
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    out = plain(**padded(list(range(len(TRAINED)))), use_cache=False)
    out.loss.backward()
    return Found(gradients_of(plain), out.loss.item(), WEIGHT * out.aux_loss.item())


@pytest.mark.parametrize("micro", [1, 5])
def test_by_micro_batch_it_is_the_mean_of_what_transformers_has_for_each(micro: int, model: Path) -> None:
    """And no forward comes before those that are trained."""
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    terms = []
    for first in range(0, 5, micro):
        given = padded(list(range(first, first + micro)))
        made = plain(**given, use_cache=False)
        counted = int((given["labels"][:, 1:] != IGNORED).sum())
        terms.append(made.aux_loss)
        ((made.loss - WEIGHT * made.aux_loss) * counted / sum(TRAINED)).backward(retain_graph=True)
    term = WEIGHT * torch.stack(terms).mean()
    term.backward()
    rows = {"global_batch_size": 5, "micro_batch_size": micro}
    assembly = assembled(model, True, train=rows, model={"router_balance": "micro_batch"})
    forwards: list[int] = []
    assembly.train_state.root.model.model.layers[0].register_forward_hook(lambda *_: forwards.append(1))
    ours = found(assembly)
    assert len(forwards) == 5 // micro
    assert ours.term == pytest.approx(float(term.detach()), rel=1e-5)
    assert Found(gradients_of(plain), ours.loss, ours.term).off(ours) < 1e-5


def assembled(base: Path, packed: bool, rank: RankInfo = ONE, **sections: Any) -> Assembly:
    sections = {"train": {"global_batch_size": 5 if packed else 10, "micro_batch_size": 5}, **sections}
    sections["data"] = {"packing": packed, **sections.get("data", {})}
    return assembly_for(recipe_for(base, **sections), TRAINED, rank, packed=packed)


def found(assembly: Assembly) -> Found:
    state, batches = assembly.train_state, assembly.batches.step(0)
    sums, counts = forward_backward(state, 0, batches)
    return Found(gradients_of(state.root.model), float(sums.loss(counts)), float(sums.losses["router_aux"].value))


@pytest.mark.parametrize(
    ("packed", "micro", "level"),
    [(True, 5, "none"), (True, 1, "none"), (True, 1, "full"), (False, 10, "none"), (False, 2, "none")],
    ids=str,
)
def test_it_is_transformers_own_however_a_global_batch_is_cut_up(
    packed: bool, micro: int, level: str, model: Path, wanted: Found
) -> None:
    """And where layers are computed again."""
    sizes = {"global_batch_size": 5 if packed else 10, "micro_batch_size": micro}
    rows = {**sizes, "gradient_checkpointing": level}
    assert wanted.off(found(assembled(model, packed, train=rows))) < 1e-6


@pytest.mark.parametrize("layout", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_processes_share_it_and_log_its_part(layout: str, model: Path, wanted: Found, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        rows = {"global_batch_size": 6, "micro_batch_size": 1}  # a row less than that: one process has a filler
        info = RankInfo(rank=rank, local_rank=rank, world_size=2, local_world_size=2)
        state = assembled(model, True, info, train=rows, parallel={"processes": 2, "shard": layout})
        result = optimizer_step(state.train_state, 0, state.batches.step(0), 1.0).read()
        norm = sum(float(one.norm()) ** 2 for one in wanted.values()) ** 0.5
        assert result.loss == pytest.approx(wanted.loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(norm, rel=1e-6)
        assert list(result.figures) == ["router_aux", "router_balance"]
        assert result.figures["router_aux"] == pytest.approx(wanted.term, rel=1e-6)

    assert run_ranks(2, tmp_path, work) == [0, 0]


def z_wanted(base: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """The plain formula in float64: its value, and the gradients that it adds by transformers' own forward."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    plain = load(base, dtype=torch.float64, experts_implementation="eager")
    given = padded(list(range(len(TRAINED))))
    del given["labels"]
    logits = torch.stack(plain(**given, use_cache=False, output_router_logits=True).router_logits)
    sums = torch.log(torch.exp(logits).sum(-1)) ** 2
    value = WEIGHT * sums[:, given["attention_mask"].flatten().bool()].mean()
    value.backward()
    return float(value.detach()), gradients_of(plain)


Z_ALONE = {"router_aux_loss_coef": 0.0, "router_z_loss_coef": WEIGHT}


@pytest.mark.parametrize(
    ("packed", "micro", "aux"), [(True, 5, 0.0), (True, 1, 0.0), (False, 2, 0.0), (True, 1, WEIGHT)], ids=str
)
def test_the_z_loss_is_the_plain_formula_however_a_global_batch_is_cut_up(
    packed: bool, micro: int, aux: float, model: Path
) -> None:
    value, gradients = z_wanted(model)
    rows = {"train": {"global_batch_size": 5 if packed else 10, "micro_batch_size": micro}}
    forwards, steps = list[int](), list[dict[str, torch.Tensor]]()
    for weight in (WEIGHT, 0.0):
        weights = {"router_aux_loss_coef": aux, "router_z_loss_coef": weight}
        made = assembled(model, packed, **rows, model=weights)
        made.train_state.root.model.model.layers[0].register_forward_hook(lambda *_: forwards.append(1))
        sums, counts = forward_backward(made.train_state, 0, made.batches.step(0))
        steps.append(gradients_of(made.train_state.root.model))
        if weight:
            assert float(sums.losses["router_z"].mean(counts)) == pytest.approx(value, rel=1e-6)
            assert len(forwards) == (2 if aux and micro < 5 else 1) * -(-rows["train"]["global_batch_size"] // micro)
    for name, gradient in gradients.items():
        added = steps[0][name] - steps[1].get(name, torch.zeros(()))
        assert float((added - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-8, name


def test_processes_share_the_z_loss_and_an_evaluation_has_it(model: Path, tmp_path: Path) -> None:
    value, _ = z_wanted(model)

    def work(rank: int) -> None:
        rows = {"global_batch_size": 6, "micro_batch_size": 1}  # a row less than that: one process has a filler
        info = RankInfo(rank=rank, local_rank=rank, world_size=2, local_world_size=2)
        state = assembled(model, True, info, train=rows, parallel={"processes": 2, "shard": "full"}, model=Z_ALONE)
        held = held_out(SyntheticRows(TRAINED), [10], ["a.jsonl"])  # type: ignore[arg-type]
        line = evaluate(state.train_state.root, state.train_state.step_config, held, 1, None).line()
        assert line["router_z"] == pytest.approx(value, rel=1e-6) and "router_aux" not in line
        result = optimizer_step(state.train_state, 0, state.batches.step(0), 1.0).read()
        assert result.figures == pytest.approx({"router_z": value}, rel=1e-6)

    assert run_ranks(2, tmp_path, work) == [0, 0]


def test_the_counted_forward_chooses_as_the_one_that_is_trained(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, torch.Tensor]] = []  # with gradients or without
    add = RouterLoss.add

    def noted(router: RouterLoss, *given: Any) -> None:
        add(router, *given)
        seen.append((torch.is_grad_enabled(), router.sums.chosen))

    monkeypatch.setattr(RouterLoss, "add", noted)
    rows = {"global_batch_size": 4, "micro_batch_size": 2}
    lora = {"kind": "lora", "r": 2, "dropout": 0.5}
    state = assembled(model, True, train=rows, adapter=lora)
    draw_lora_b(state.train_state.parameters, 1.0)
    seen.clear()
    forward_backward(state.train_state, 0, state.batches.step(0))
    first, second = ([chosen for grad, chosen in seen if grad == trained] for trained in (False, True))
    assert len(first) == len(second) == 2
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_an_evaluation_measures_it_over_all_that_is_held_out(model: Path, wanted: Found) -> None:
    state = assembled(model, True).train_state
    rows: Any = SyntheticRows(TRAINED)
    for micro in (1, 5):
        result = evaluate(state.root, state.step_config, held_out(rows, [10], ["a.jsonl"]), micro, None)
        assert result.line()["router_aux"] == pytest.approx(wanted.term, rel=1e-6)
        assert result.line()["router_balance"] == pytest.approx(wanted.term / WEIGHT / 2, rel=1e-6)
        assert result.loss == pytest.approx(wanted.loss - wanted.term, rel=1e-5)


EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}


def chosen(config: transformers.PretrainedConfig, weight: float | None) -> float | None:
    made = router_loss(meta_model(config, torch.float32), weight)
    return None if made is None else made.weight


def test_the_config_decides_unless_the_recipe_does() -> None:
    silent = transformers.MixtralConfig(**SHAPE, **EXPERTS, router_aux_loss_coef=0.02)
    asking = transformers.MixtralConfig(**SHAPE, **EXPERTS, router_aux_loss_coef=0.02, output_router_logits=True)
    assert [chosen(silent, weight) for weight in (None, 0.0, 0.3)] == [None, None, 0.3]
    assert [chosen(asking, weight) for weight in (None, 0.0, 0.3)] == [0.02, None, 0.3]
    assert "model.router_aux_loss_coef: 0.02" in str(unasked_term(silent))
    assert unasked_term(asking) is None
    assert unasked_term(transformers.LlamaConfig()) is None
    assert "moe_loss_weight: 0.01" in str(unasked_term(transformers.DbrxConfig()))


def test_what_a_class_does_not_compute_is_refused() -> None:
    groups = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    deepseek = transformers.DeepseekV3Config(**SHAPE, **groups)
    assert chosen(deepseek, None) is None
    with pytest.raises(RecipeError, match="DeepseekV3ForCausalLM of transformers has no such term"):
        chosen(deepseek, 0.1)
    routed = {"num_experts": 16, "num_experts_per_tok": 2, "output_router_logits": True}
    doge = transformers.DogeConfig(**SHAPE, **routed, is_moe=True)
    with pytest.raises(RecipeError, match="doge model has a form of its own"):
        chosen(doge, None)
    with pytest.raises(RecipeError, match=r"router_z_loss_coef: DeepseekV3ForCausalLM .* gives no logits of theirs"):
        router_loss(meta_model(deepseek, torch.float32), 0.0, z_weight=0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_alone")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.*context_fn")
@pytest.mark.parametrize(
    ("weight", "level"), [(0, "none"), (0.1, "none"), (0.1, "full")], ids=["without", "with", "computed again"]
)
def test_layers_are_compiled_with_the_term_and_without(weight: float, level: str, model: Path) -> None:
    """What routers say leaves the compiled layers as a result, where they are computed again, too."""
    train = {"global_batch_size": 5, "micro_batch_size": 5, "compile": True, "gradient_checkpointing": level}
    steps = []
    counters.clear()
    for compiled in (True, False):
        recipe = recipe_for(model, model={"router_aux_loss_coef": weight}, train={**train, "compile": compiled})
        assembly = assembly_for(recipe, TRAINED, ONE)
        assert assembly.resolved.config.output_router_logits
        assert (assembly.train_state.root.parts.router_loss is None) == (weight == 0)
        steps.append(optimizer_step(assembly.train_state, 0, assembly.batches.step(0), 1.0).read())
    assert steps[0].loss == pytest.approx(steps[1].loss, rel=1e-6)
    assert steps[0].grad_norm == pytest.approx(steps[1].grad_norm, rel=1e-5)
    assert not counters["graph_break"]


def test_it_is_not_asked_of_other_models(tmp_path: Path) -> None:
    family_config("llama", tied=False).save_pretrained(tmp_path)
    recipe = recipe_for(tmp_path, model={"init": "random", "router_aux_loss_coef": 0.1})
    with pytest.raises(RecipeError, match="LlamaForCausalLM of transformers has no such term"):
        assembly_for(recipe, [3], ONE)
