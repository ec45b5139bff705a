"""What is refused is refused for a property of the model, in words, and with the key that mends it where one does."""

import builtins
import re
from pathlib import Path

import pytest
import torch

from tools.causal_cases import tiny_config
from tools.tables import beside
from tuner.errors import DataError, RecipeError
from tuner.model.attention import Unsupported, packed_attention
from tuner.model.build import ModelSpec, build_model, meta_model, model_config
from tuner.model.probe import require_isolation
from tuner.model.refusal import in_words, require_positions, unbuildable
from tuner.model.root import CausalLM

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
