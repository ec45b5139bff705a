"""Reward models, held in float64 to a plain loop over transformers' own class on one answer at a time."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.tiny import VOCAB, family_model
from tests.train.synthetic import draw_lora_b
from tuner.config.methods import RewardMethod
from tuner.data.batches import Batch, StepBatches, collate, without_targets
from tuner.data.prepared import Row
from tuner.errors import DataError, RecipeError
from tuner.model.adapter import LoraSpec
from tuner.model.build import ModelSpec, build_model, model_config
from tuner.model.probe import require_isolation
from tuner.model.root import CausalLM, trained_parameters
from tuner.model.trainable import TrainableSpec
from tuner.train.methods.method import Terms, build_method
from tuner.train.methods.reward import Reward

FAMILIES = ("llama", "gemma3", "qwen3", "gpt2")
SECTION = RewardMethod(center=0.01, margin="rows")
ADAPTERS = {"full": TrainableSpec(), "lora": TrainableSpec(LoraSpec(4, 8.0, 0.0, "all-linear"))}
LENGTHS = [(9, 4), (3, 17), (12, 12), (5, 6)]
MARGINS = (0.5, 0.0, 1.25, -0.25)


def pair(number: int) -> Row:
    """One pair as a row of its own; its answers end with a token that the config may call padding."""
    rng = np.random.default_rng(number)
    ids = [rng.integers(3, VOCAB, length) for length in LENGTHS[number]]
    for answer in ids:
        answer[-1] = 0
    trained = [np.arange(len(answer)) >= len(answer) - 2 for answer in ids]
    return Row(
        np.concatenate(ids), np.concatenate(trained), np.array(LENGTHS[number], dtype=np.int32),
        np.array([2 * number, 2 * number + 1]), {"margin": np.full(2, MARGINS[number], dtype=np.float32)},
    )  # fmt: skip


def packed(rows: Sequence[Row]) -> Row:
    """Pairs in one row."""
    names = ("input_ids", "trained", "lengths", "documents")
    margins = np.concatenate([row.columns["margin"] for row in rows])
    return Row(*(np.concatenate([getattr(row, name) for row in rows]) for name in names), {"margin": margins})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Causal checkpoints of each family; none has a score."""
    found = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, path in found.items():
        family_model(family, tied=True).save_pretrained(path)
    return found


def reward_model(path: Path, adapter: str) -> CausalLM:
    model = build_model(ModelSpec(str(path), head="score"), torch.float32, seed=3)
    root = CausalLM(model)
    ADAPTERS[adapter].apply(root.model, seed=4)
    draw_lora_b(dict(root.model.named_parameters()))
    root.double()
    return root


def step(root: CausalLM, method: Reward, batches: Sequence[Batch]) -> tuple[Terms, dict[str, torch.Tensor], float]:
    """Sums, gradients and loss of a global batch, as a step takes them."""
    counts = method.counts(StepBatches(np.arange(1), 1, 1, list(batches), documents=2 * len(LENGTHS)))
    parameters, sums, total = trained_parameters(root), None, torch.zeros((), dtype=torch.float64)
    root.zero_grad()
    for batch in batches:
        at = method.positions(batch)
        columns = {name: torch.as_tensor(values) for name, values in method.columns(batch).items()}
        arrays = (batch.input_ids, batch.position_ids, at, batch.targets[at])
        ids, places, positions, targets = map(torch.as_tensor, arrays)
        objective = functools.partial(method.terms, columns=columns)
        terms: Terms = root(ids, places, batch.lengths, positions, targets, objective)
        loss = terms.loss(counts)
        loss.backward()
        sums, total = terms.plus(sums), total + loss.detach()
    assert sums is not None
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    return sums, gradients, float(total)


def plain_step(root: CausalLM) -> tuple[float, dict[str, torch.Tensor], list[tuple[float, float]]]:
    """The loss by the formula, from scores that the class gives to one answer at a time with stock attention."""
    model: Any = root.model
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    model.config.pad_token_id = None
    losses, rewards = [], []
    for number, margin in enumerate(MARGINS):
        row = pair(number)
        chosen, rejected = (
            model(input_ids=torch.as_tensor(ids)[None], use_cache=False).logits[0, 0]
            for ids in np.split(row.input_ids, [row.lengths[0]])
        )
        losses.append(torch.log1p(torch.exp(-(chosen - rejected - margin))) + 0.01 * (chosen + rejected) ** 2)
        rewards.append((chosen.item(), rejected.item()))
    loss = torch.stack(losses).mean()
    parameters = trained_parameters(root)
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    model.set_attn_implementation(ours)
    return loss.item(), {n: g for n, g in zip(parameters, gradients, strict=True) if g is not None}, rewards


def require_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], relative: float) -> None:
    assert found.keys() == wanted.keys()
    whole = torch.cat([wanted[name].flatten() for name in wanted]).norm()
    difference = torch.cat([(found[name] - wanted[name]).flatten() for name in wanted]).norm()
    assert whole > 1e-3
    assert difference <= relative * whole


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_a_plain_loop(models: dict[str, Path], family: str, adapter: str) -> None:
    root = reward_model(models[family], adapter)
    loss, wanted, rewards = plain_step(root)
    assert "score.weight" in wanted
    terms, found, total = step(root, Reward(SECTION), [collate([packed([pair(i) for i in range(4)])])])
    assert total == pytest.approx(loss, rel=1e-6)
    require_equal(found, wanted, 1e-6)
    figures = {name: float(each.mean({"pairs": 4})) for name, each in terms.figures.items()}
    chosen, rejected = (np.mean([one[which] for one in rewards]) for which in (0, 1))
    assert figures["reward_chosen"] == pytest.approx(chosen)
    assert figures["reward_rejected"] == pytest.approx(rejected)
    assert figures["margin"] == pytest.approx(chosen - rejected, abs=1e-7)
    assert figures["accuracy"] == np.mean([one > other for one, other in rewards])


def test_no_packing_order_or_accumulation_changes_anything(models: dict[str, Path]) -> None:
    root, method = reward_model(models["llama"], "full"), Reward(SECTION)
    _, wanted, loss = step(root, method, [collate([packed([pair(i) for i in range(4)])])])
    layouts = [
        [[pair(3), pair(1)], [pair(0), pair(2)]],
        [[pair(i)] for i in range(4)],
        [[packed([pair(2), pair(0), pair(3)]), pair(1)]],
    ]
    for layout in layouts:
        batches = [*map(collate, layout), without_targets(collate([pair(0)]))]
        _, found, total = step(root, method, batches)
        assert total == pytest.approx(loss, rel=1e-12)
        require_equal(found, wanted, 1e-10)


def test_rewards_are_float32_under_autocast(models: dict[str, Path]) -> None:
    root, seen = reward_model(models["llama"], "full").float(), []
    method, batch = Reward(RewardMethod()), collate([pair(0)])

    def objective(hidden: torch.Tensor, head: Any, targets: torch.Tensor) -> Terms:
        seen.append((hidden, head.scores(hidden)))
        return method.terms(hidden, head, targets, {})

    at = torch.as_tensor(method.positions(batch))
    with torch.autocast("cpu", torch.bfloat16):
        terms = root(
            torch.as_tensor(batch.input_ids), torch.as_tensor(batch.position_ids), batch.lengths, at, at, objective
        )
    ((hidden, scores),) = seen
    exact = hidden.double() @ root.model.score.weight.double()[0]
    assert scores.dtype == terms.losses["loss"].value.dtype == torch.float32
    assert torch.allclose(scores.double(), exact, rtol=1e-5)


def test_the_score_is_drawn_from_the_seed_and_loaded_where_it_is_there(models: dict[str, Path], tmp_path: Path) -> None:
    def score(path: Path, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        model: Any = build_model(ModelSpec(str(path), head="score"), dtype, seed)
        return model.score.weight.detach()

    first = score(models["llama"], 3)
    assert torch.equal(first, score(models["llama"], 3)) and not torch.equal(first, score(models["llama"], 4))
    assert torch.equal(first, score(models["llama"], 3, torch.bfloat16))  # a frozen model's is float32 too
    assert 0.01 < float(first.std()) < 0.03
    build_model(ModelSpec(str(models["llama"]), head="score"), torch.float32, 3).save_pretrained(tmp_path)
    assert torch.equal(score(tmp_path, 7), first)


def test_documents_of_a_row_do_not_see_each_other(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = CausalLM(build_model(ModelSpec(str(models["llama"]), head="score"), torch.float32, seed=3))
    assert require_isolation(root, VOCAB).is_clean
    monkeypatch.setattr(root.layout, "takes_documents", False)  # attention then sees the whole row
    with pytest.raises(RecipeError, match="documents see each other"):
        require_isolation(root, VOCAB)


def test_a_class_that_scores_another_token_is_refused(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = CausalLM(build_model(ModelSpec(str(models["llama"]), head="score"), torch.float32, seed=3))
    kind = type(root.model)
    real = kind.forward

    def first(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = real(self, *args, **kwargs)
        output.logits = self.model(kwargs["input_ids"]).last_hidden_state[:, 0] @ self.score.weight.T
        return output

    monkeypatch.setattr(kind, "forward", first)
    with pytest.raises(RecipeError, match="scores another token than the last"):
        require_isolation(root, VOCAB)


def test_models_that_cannot_score_are_refused_with_the_reason(models: dict[str, Path], tmp_path: Path) -> None:
    config = model_config(ModelSpec(str(models["llama"]), head="score"))
    assert (config.num_labels, config.id2label) == (1, {0: "reward"})
    config.num_labels = 3
    config.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="has 3 labels"):
        model_config(ModelSpec(str(tmp_path), head="score"))
    from transformers import CohereConfig

    CohereConfig(vocab_size=97, hidden_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2).save_pretrained(
        tmp_path
    )
    with pytest.raises(RecipeError, match="no sequence-classification class for cohere models"):
        model_config(ModelSpec(str(tmp_path), head="score"))


def test_margins_that_the_rows_lack_are_an_error() -> None:
    row = pair(0)
    bare = collate([Row(row.input_ids, row.trained, row.lengths, row.documents)])
    assert build_method(RewardMethod()).columns(bare) == {}
    with pytest.raises(DataError, match="neither a margin nor scores"):
        build_method(SECTION).columns(bare)
