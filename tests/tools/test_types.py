"""Types of transformers' models with something of their own: states, heads that do more than a product, numbers counted
from the padding token. And what is refused is so for a property of the model, in words, with the key that mends it.
"""

import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from tests.model.tiny import family_model
from tools.causal_cases import VOCAB, tiny_config
from tools.tables import beside
from tuner.errors import DataError, RecipeError
from tuner.model import attention
from tuner.model.attention import Unsupported, packed_attention
from tuner.model.build import ModelSpec, build_model, decoder_blocks, head_layer, meta_model, model_config
from tuner.model.decode import greedy
from tuner.model.probe import plain_twin, require_isolation
from tuner.model.refusal import in_words, require_positions, unbuildable
from tuner.model.root import CausalLM
from tuner.model.row_layout import from_padding
from tuner.model.transformers_private import takes_our_attention

PYTHON = re.compile(r"NoneType|\w+Error\b|object (?:has|is)|tuner_packed|\bbug\b")

TABLE = beside(__file__)


def root_of(model_type: str, directory: Path, **changes: object) -> CausalLM:
    """A tiny model of the type with random weights, as training builds it."""
    config = tiny_config(model_type)
    for key, value in changes.items():
        setattr(config, key, value)
    config.save_pretrained(directory)
    model = build_model(ModelSpec(str(directory), random_init=True), torch.float32, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    return CausalLM(model)


@pytest.mark.parametrize("model_type", TABLE["encoders"])
def test_an_encoder_is_refused_with_the_key_that_makes_it_causal(model_type: str, tmp_path: Path) -> None:
    changes, reason, hint = TABLE["encoders"][model_type]
    with pytest.raises(RecipeError, match=reason) as refusal:
        require_isolation(root_of(model_type, tmp_path, **changes), 97, packed=False)
    assert hint in str(refusal.value.hint)
    assert not PYTHON.search(refusal.value.message)


def test_the_part_that_is_not_computed_is_named(tmp_path: Path) -> None:
    root = root_of("roberta", tmp_path, is_decoder=True)
    require_isolation(root, 97, packed=False)
    head, root.before_output = root.before_output, None
    with pytest.raises(RecipeError, match="its logits are more than its output layer makes of its last hidden states"):
        require_isolation(root, 97, packed=False)
    root.before_output, root.layout.padding_number = head, None
    with pytest.raises(RecipeError, match="its layers are not computed as its class computes them: the logits"):
        require_isolation(root, 97, packed=False)


@pytest.mark.parametrize("option", ["indices", "block_indices"])
def test_keys_that_an_indexer_chooses_are_not_ignored(option: str) -> None:
    heads = torch.randn(1, 2, 5, 8)
    packed_attention(torch.nn.Module(), heads, heads, heads, **{option: None})
    with pytest.raises(Unsupported, match="of keys that an indexer chooses|: keys that an indexer chooses"):
        packed_attention(torch.nn.Module(), heads, heads, heads, **{option: torch.zeros(1)})


@pytest.mark.parametrize(("kind", "text", "said"), [*TABLE["words"], ["RuntimeError", "a" * 1000, r"a{160} \.\.\."]])
def test_what_a_models_code_raises_is_told_without_pythons_names(kind: str, text: str, said: str) -> None:
    found = in_words(getattr(builtins, kind)(text))
    assert re.search(said, found)
    assert not PYTHON.search(found)
    assert len(found) < 200


def test_numbers_before_the_first_token_are_no_positions() -> None:
    config = tiny_config("roberta")  # 128 numbers, of which the padding token's and one before it are not used
    require_positions(config, 1, 126)
    with pytest.raises(RecipeError, match="data.max_length: 127 is above the model's 126 positions") as refusal:
        require_positions(config, 1, 127)
    assert "at most 126" in str(refusal.value.hint)


def test_a_draft_for_another_model_is_refused_as_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma4_unified_assistant"}')
    with pytest.raises(RecipeError, match="drafts tokens for another model") as refusal:
        meta_model(model_config(ModelSpec(str(tmp_path))), torch.float32)
    assert refusal.value.hint == "choose the model that it drafts for"


def test_a_config_that_its_class_cannot_read_is_refused_without_pythons_names() -> None:
    found = unbuildable(tiny_config("llama"), AttributeError("'LlamaConfig' object has no attribute 'dropout'"))
    assert "this llama config: its class looks for a key that it does not have (dropout)" in found.message
    assert not PYTHON.search(found.message)
    assert "wrong sizes" in unbuildable(tiny_config("llama"), ValueError("wrong sizes")).message


def test_a_value_of_another_type_in_config_json_is_a_fault_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with pytest.raises(DataError, match="hidden_size"):
        model_config(ModelSpec(str(tmp_path)))


HEADS = ("bert", "electra", "modernbert-decoder", "xlm-roberta")


def decoder(model_type: str) -> PreTrainedModel:
    """A tiny model of the type, made causal, with weights that spread."""
    config = tiny_config(model_type)
    config.is_decoder = True
    torch.manual_seed(2)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("model_type", HEADS)
def test_logits_loss_and_gradients_go_through_the_models_own_head(model_type: str) -> None:
    model = decoder(model_type)
    root, head = CausalLM(model), head_layer(model)
    ids, n = torch.randint(3, 97, (11,), generator=torch.Generator().manual_seed(0)), 11
    row = (ids, torch.arange(n), (n,), torch.arange(n - 1))
    expected = model(input_ids=ids[None], use_cache=False).logits[0, : n - 1]
    assert torch.allclose(root.logits(*row), expected, atol=1e-5)
    cross_entropy(expected, ids[1:], reduction="sum").backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = root(*row, ids[1:])
    loss.backward()
    assert head_layer(model) is head
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-4), name


def test_a_head_that_fails_puts_the_output_layer_back() -> None:
    model = decoder("bert")
    root, head = CausalLM(model), head_layer(model)
    assert root.before_output is not None
    with pytest.raises(RuntimeError):
        root.before_output(torch.zeros(3, 5))
    assert head_layer(model) is head


def test_the_layers_of_an_encoder_do_not_hold_its_embedding() -> None:
    model = decoder("xlm-roberta")  # transformers names the class of its embeddings for sharding too
    embedding = model.get_input_embeddings()
    assert len(decoder_blocks(model)) == model.config.num_hidden_layers
    assert not any(part is embedding for block in decoder_blocks(model) for part in block.modules())


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_most_models_compute_nothing_there(family: str) -> None:
    root = CausalLM(family_model(family, tied=True))
    assert root.before_output is None
    assert root.layout.padding_number is None


def test_numbers_from_padding_are_those_of_each_document_alone() -> None:
    documents = [torch.tensor(ids) for ids in ([5, 6, 1, 7], [1, 1, 8], [9], [4, 1])]
    ids = torch.cat(documents)
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    alone = [RobertaEmbeddings.create_position_ids_from_input_ids(document[None], 1)[0] for document in documents]
    assert torch.equal(from_padding(ids, positions, 1), torch.cat(alone))
    # Tokens that continue documents in a cache: each the 8th, the 3rd and the 4th of its own.
    assert from_padding(torch.tensor([5, 6, 7]), torch.tensor([7, 2, 3]), 1).tolist() == [9, 4, 5]


FAMILIES = {
    "bamba": 2, "falcon_h1": 2, "granitemoehybrid": 2, "jamba": 2, "kimi_linear": 2, "lfm2_moe": 1, "mamba": 2,
    "mamba2": 2, "minimax": 2, "nemotron_h": 1, "olmo_hybrid": 2, "qwen3_next": 2, "recurrent_gemma": 4, "rwkv": 4,
    "xlstm": 2, "zamba": 4, "zamba2": 3, "zaya": 2,
}  # fmt: skip
"""How many layers of the tiny model mix tokens by a state of their own."""
OTHERS_STAND_FOR_THEM = {"bamba", "granitemoehybrid", "mamba2", "nemotron_h", "olmo_hybrid", "zamba2"}
"""Types whose state is of the kind of another one's here."""
PROMPTS = [[5, 9, 3], [7, 7, 11, 30, 4, 8, 60, 61, 62, 12, 13], [40, 41]]
LIMITS = [8, 5, 6]


def drawn(kind: str) -> PreTrainedModel:
    """A model whose weights are large enough for its states to matter."""
    attention.register()
    config = tiny_config(kind)
    chosen = {"attn_implementation": attention.PACKED} if takes_our_attention(config) else {}
    torch.manual_seed(2)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **chosen)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "conv" not in name:
                parameter.normal_(std=0.2)
    return model.train(False)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in sorted(OTHERS_STAND_FOR_THEM)]


@pytest.fixture(scope="module", params=[*sorted(FAMILIES.keys() - OTHERS_STAND_FOR_THEM), *SLOW])
def root(request: pytest.FixtureRequest) -> Iterator[CausalLM]:
    yield CausalLM(drawn(request.param))


@pytest.mark.slow("kimi_linear", "zamba")
def test_documents_of_a_row_do_not_see_each_other(root: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert root.layout.mixers is not None and len(root.layout.mixers.names) == FAMILIES[root.model.config.model_type]
    assert require_isolation(root, VOCAB).is_clean
    expect = root.layout.mixers.expect
    monkeypatch.setattr(root.layout.mixers, "expect", lambda lengths, device, **_: expect((), device))
    with pytest.raises(RecipeError, match="cannot be trained on packed rows: its documents see each other"):
        require_isolation(root, VOCAB)


@pytest.mark.slow("kimi_linear", "qwen3_next", "recurrent_gemma", "minimax")
@pytest.mark.slow("zaya")
@pytest.mark.parametrize("root", sorted(FAMILIES.keys() - OTHERS_STAND_FOR_THEM), indirect=True)
def test_answers_are_those_of_generate(root: CausalLM) -> None:
    plain = plain_twin(root.model)
    plain.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    for prompt, answer in zip(PROMPTS, greedy(root, PROMPTS, (), LIMITS, root.model.device), strict=True):
        ids = torch.tensor(prompt)[None]
        whole = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(answer), use_cache=True)
        assert whole[0, len(prompt) :].tolist() == answer
