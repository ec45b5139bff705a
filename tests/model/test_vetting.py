"""A config that asks for code, or for weights that are no plain numbers, is refused; what hub models ship is not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.model.tiny import SHAPE
from tuner.errors import DataError, RecipeError
from tuner.export.write import write_config
from tuner.generate import load_generator
from tuner.model.build import ModelSpec, build_model, model_config
from tuner.model.vetting import ignored_code, require_known_losses, untrained_indexer

REFUSED: list[dict[str, Any]] = [
    {"_attn_implementation": "kernels-community/flash-attn2"}, {"attn_implementation": {"": "someone/evil:attention"}},
    {"text_config": {"_attn_implementation_internal": "a/b"}}, {"experts_implementation": "a/b"},
    {"kernel_config": {"RMSNorm": "a/b:Norm"}}, {"quantization_config": {}},
    {"quantization_config": {"quant_method": "fp8"}}, {"torch_dtype": "__import__('os').getcwd()"}, {"dtype": "load"},
    {"auto_map": {"AutoConfig": "c.C"}, "model_type": "evil"},
]
BENIGN: list[dict[str, Any]] = [
    {"_attn_implementation": "flash_attention_2"}, {"torch_dtype": "bfloat16"}, {"dtype": {"": "float16"}},
    {"quantization_config": None},
    {"auto_map": {"AutoConfig": "configuration_llama.LlamaConfig", "AutoModelForCausalLM": "modeling_llama.Llama"}},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(directory)
    return directory


def changed(base: Path, tmp_path: Path, **keys: Any) -> Path:
    for path in base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
    return tmp_path


@pytest.mark.parametrize("keys", REFUSED, ids=str)
def test_code_and_quantised_weights_are_refused(base: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    directory = changed(base, tmp_path, **keys)
    key = next(iter(keys.get("text_config", keys)))
    for load in (lambda: model_config(ModelSpec(str(directory))), lambda: load_generator(str(directory))):
        with pytest.raises(DataError, match=f"config.json: {key}: "):
            load()


@pytest.mark.parametrize("keys", BENIGN, ids=str)
def test_what_hub_models_ship_is_loaded(base: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    model = build_model(ModelSpec(str(changed(base, tmp_path, **keys))), torch.float32, 0)
    plain = build_model(ModelSpec(str(base)), torch.float32, 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_ignored_code_is_told_and_not_exported(base: Path, tmp_path: Path) -> None:
    config = model_config(ModelSpec(str(changed(base, tmp_path, **BENIGN[-1]))))
    assert "auto_map" in (ignored_code(config) or "")
    assert ignored_code(model_config(ModelSpec(str(base)))) is None
    (tmp_path / "out").mkdir()
    write_config(tmp_path / "out", config, "LlamaForCausalLM", torch.float32)
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_indexers_that_learn_nothing_are_named() -> None:
    assert "(indexed_attention)" in str(untrained_indexer(transformers.DeepseekV32Config(num_hidden_layers=2)))
    assert "(compressed_sparse_attention)" in str(untrained_indexer(transformers.DeepseekV4Config()))
    two = {"num_hidden_layers": 2}
    plain = transformers.MiniMaxM3VLTextConfig(**two)  # as its layers come, all see all
    sparse = transformers.MiniMaxM3VLTextConfig(layer_types=["full_attention", "minimax_m3_sparse"], **two)
    assert "(minimax_m3_sparse)" in str(untrained_indexer(sparse))
    for config in (transformers.LlamaConfig(), plain):
        assert untrained_indexer(config) is None


def test_a_loss_of_the_output_layer_that_is_not_computed_is_refused() -> None:
    with pytest.raises(RecipeError, match="z_loss_coefficient: 0.001 of the model's config"):
        require_known_losses(transformers.BambaConfig(z_loss_coefficient=0.001))
    require_known_losses(transformers.BambaConfig())
    require_known_losses(transformers.LlamaConfig())


def test_an_adapter_beside_the_weights_is_refused(base: Path, tmp_path: Path) -> None:
    directory = changed(base, tmp_path)
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    with pytest.raises(DataError, match=r"adapter_config\.json"):
        build_model(ModelSpec(str(directory)), torch.float32, 0)
