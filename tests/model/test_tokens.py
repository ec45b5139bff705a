"""Rows of new tokens: where they come from, that they alone are trained, and that nothing else changes."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.fixtures.hashes import frozen_hash
from tests.model.tiny import FAMILIES, VOCAB, family_model
from tuner.errors import RecipeError
from tuner.model.adapter import LoraSpec
from tuner.model.build import ModelSpec, build_model, meta_model, model_config
from tuner.model.root import CausalLM, outer_parameters, trained_parameters
from tuner.model.tokens import TrainableTokens
from tuner.model.trainable import TrainableSpec

GROWN, ROOM = range(VOCAB, VOCAB + 3), range(VOCAB - 3, VOCAB)
ENDS = [("llama", False, GROWN), ("gemma3", True, GROWN), ("phi", False, GROWN), ("gpt2", True, GROWN)]
ENDS += [("llama", True, GROWN), ("llama", True, ROOM), ("gpt2", False, ROOM)]
"""Families whose embeddings or output layers have a scale, a bias or names of their own; all others' are Llama's."""
OTHERS = [(family, tied, GROWN) for family in FAMILIES for tied in (True, False)]
OTHERS += [(family, tied, ROOM) for family in ("llama", "gpt2") for tied in (True, False)]
CASES = [*ENDS, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS if case not in ENDS)]
LORA = LoraSpec(4, 8.0, 0.0, "all-linear")
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:`is_gradient_check")


def built(directory: Path, kind: tuple[str, bool], new_ids: range, choice: TrainableSpec) -> PreTrainedModel:
    family_model(*kind).save_pretrained(directory)
    model = build_model(ModelSpec(str(directory), new_ids=new_ids), torch.float32, seed=0)
    choice.apply(model, seed=0)
    return model


def hidden_and_logits(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    model.set_attn_implementation("eager")
    out = model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    return out.hidden_states[0][0], out.logits[0]


def ends(model: PreTrainedModel) -> list[torch.Tensor]:
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


@pytest.mark.parametrize(("family", "tied", "new_ids"), CASES)
def test_full_training_begins_with_the_mean(tmp_path: Path, family: str, tied: bool, new_ids: range) -> None:
    base = family_model(family, tied)
    model = built(tmp_path, (family, tied), new_ids, TrainableSpec(new_ids=new_ids))
    for before, after in zip(ends(base), ends(model), strict=True):
        assert after.shape[0] == max(VOCAB, new_ids.stop) == model.config.vocab_size
        assert torch.equal(after[: new_ids.start], before[: new_ids.start])
        mean = before[: new_ids.start].double().mean(0).float()
        assert all(torch.equal(after[i], mean) for i in new_ids)
    assert (ends(model)[0] is ends(model)[1]) == tied
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        old = base.get_output_embeddings().bias[: new_ids.start]
        assert torch.equal(bias[new_ids.start :], old.double().mean().float().expand(3))
    ids = torch.arange(5, 15)
    (hidden, logits), (wanted, expected) = (hidden_and_logits(one, ids) for one in (model, base))
    assert torch.equal(hidden, wanted)
    torch.testing.assert_close(logits[:, : new_ids.start], expected[:, : new_ids.start], rtol=1e-5, atol=1e-6)
    on_meta = meta_model(model_config(ModelSpec(str(tmp_path), new_ids=new_ids)), torch.float32)
    assert {n: p.shape for n, p in on_meta.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert len(trained_parameters(CausalLM(model))) == len(list(model.parameters()))


@pytest.mark.parametrize(("family", "tied", "new_ids"), CASES)
def test_rows_alone_are_trained_as_in_the_whole_weight(tmp_path: Path, family: str, tied: bool, new_ids: range) -> None:
    """Beside an adapter: the same values and gradients as with the rows inside weights that are trained whole."""
    whole = built(tmp_path, (family, tied), new_ids, TrainableSpec(new_ids=new_ids))
    model = built(tmp_path, (family, tied), new_ids, TrainableSpec(LORA, new_ids=new_ids))
    rows = {name: p for name, p in trained_parameters(CausalLM(model)).items() if "lora_" not in name}
    assert [name.rpartition(".")[2] for name in rows] == ["new_rows"] * (1 if tied else 2)
    assert set(rows) <= outer_parameters(CausalLM(model))
    parts = [model.get_input_embeddings(), model.get_output_embeddings()]
    assert all(isinstance(part, TrainableTokens) for part in parts)
    with torch.no_grad():
        for part, weight in zip(parts, ends(whole), strict=True):
            assert torch.equal(part.new_rows, weight[new_ids.start : new_ids.stop])
            part.new_rows.add_(torch.randn(part.new_rows.shape, generator=torch.Generator().manual_seed(1)))
            weight[new_ids.start : new_ids.stop] = part.new_rows
        bias = getattr(whole.get_output_embeddings(), "bias", None)
        if bias is not None:  # it is frozen beside an adapter, and zero where it grew
            bias[new_ids.start :] = parts[1].bias[new_ids.start :]
    ids = torch.tensor([5, new_ids[0], 7, new_ids[2], new_ids[2], 20])
    found = []
    for one in (model, whole):
        hidden, logits = hidden_and_logits(one, ids)
        (logits.logsumexp(-1).sum() + logits[:, new_ids[1]].sum()).backward()
        found.append((hidden, logits))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-5)
    for part, weight in zip(parts, ends(whole), strict=True):
        assert weight.grad is not None and part.new_rows.grad is not None
        torch.testing.assert_close(part.new_rows.grad, weight.grad[new_ids.start : new_ids.stop], rtol=1e-4, atol=1e-5)


def test_the_hash_of_a_frozen_base_does_not_depend_on_them(tmp_path: Path) -> None:
    model = built(tmp_path, ("llama", True), ROOM, TrainableSpec(LORA, new_ids=ROOM))
    assert frozen_hash(model) == frozen_hash(built(tmp_path, ("llama", True), range(0), TrainableSpec(LORA)))
    grown = built(tmp_path, ("llama", True), GROWN, TrainableSpec(LORA, new_ids=GROWN))
    assert not grown.get_input_embeddings().base_layer.weight[VOCAB:].any()


@pytest.mark.parametrize("tied", [True, False])
def test_modules_trained_in_full_hold_them(tmp_path: Path, tied: bool) -> None:
    lora = LoraSpec(4, 8.0, 0.0, "all-linear", modules_to_save=("lm_head",))
    model = built(tmp_path, ("llama", tied), GROWN, TrainableSpec(lora, new_ids=GROWN))
    assert not isinstance(model.get_output_embeddings(), TrainableTokens)
    assert isinstance(model.get_input_embeddings(), TrainableTokens) == (not tied)
    weight = model.get_output_embeddings().weight
    assert torch.equal(weight[VOCAB], weight[:VOCAB].double().mean(0).float())


def test_embeddings_left_out_of_full_training_are_but_for_the_new_rows(tmp_path: Path) -> None:
    model = built(tmp_path, ("llama", False), GROWN, TrainableSpec(frozen=("embed_tokens",), new_ids=GROWN))
    names = set(trained_parameters(CausalLM(model)))
    assert "model.embed_tokens.new_rows" in names and "lm_head.weight" in names
    assert "model.embed_tokens.base_layer.weight" not in names


def test_random_weights_stay_as_they_were_drawn(tmp_path: Path) -> None:
    family_model("llama", False).save_pretrained(tmp_path)
    spec = ModelSpec(str(tmp_path), random_init=True, new_ids=GROWN)
    models = [build_model(spec, torch.float32, seed=3) for _ in range(2)]
    TrainableSpec(new_ids=GROWN, drawn=True).apply(models[0], seed=3)
    assert ends(models[0])[0].shape[0] == GROWN.stop
    assert torch.equal(ends(models[0])[0], ends(models[1])[0])


def test_an_adapted_output_layer_is_refused(tmp_path: Path) -> None:
    lora = LoraSpec(4, 8.0, 0.0, ("q_proj", "lm_head"))
    with pytest.raises(RecipeError, match="which no adapter can train"):
        built(tmp_path, ("llama", False), GROWN, TrainableSpec(lora, new_ids=GROWN))


def test_an_embedding_of_its_own_kind_is_refused() -> None:
    class Odd(torch.nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    model = family_model("llama", False)
    model.set_input_embeddings(Odd(VOCAB, 32))
    with pytest.raises(RecipeError, match="rows of a Odd cannot be trained alone"):
        TrainableSpec(frozen=("embed_tokens",), new_ids=ROOM).apply(model, seed=0)


def test_a_vocabulary_with_a_gap_is_left_for_the_check_of_sizes(tmp_path: Path) -> None:
    family_model("llama", False).save_pretrained(tmp_path)
    assert model_config(ModelSpec(str(tmp_path), new_ids=range(VOCAB + 1, VOCAB + 2))).vocab_size == VOCAB
