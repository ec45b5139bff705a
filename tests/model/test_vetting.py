"""A config that asks for code, or for weights that are no plain numbers, is refused, and an index, config or
adapter that leads to a pickle, to code, or to a header that takes all memory; what hub models ship is not. The
licence is what a card's front matter says.
"""

import json
import re
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fixtures import tables
from tests.model.tiny import SHAPE
from tuner.data.encoding.tokenizer_files import tokenizer_directory
from tuner.errors import DataError, RecipeError
from tuner.export.write import write_config
from tuner.generate import load_generator
from tuner.init_from.sources import open_source
from tuner.model import vetting
from tuner.model.build import ModelSpec, build_model, model_config
from tuner.model.stored import index_names, stored_in
from tuner.model.vetting import licence_of, vet_adapter, vet_config, vet_patterns, vet_weights
from tuner.runtime.safetensors_header import read_header

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
    assert "auto_map" in (vetting.ignored_code(config) or "")
    assert vetting.ignored_code(model_config(ModelSpec(str(base)))) is None
    (tmp_path / "out").mkdir()
    write_config(tmp_path / "out", config, "LlamaForCausalLM", torch.float32)
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_indexers_that_learn_nothing_are_named() -> None:
    assert "(indexed_attention)" in str(vetting.untrained_indexer(transformers.DeepseekV32Config(num_hidden_layers=2)))
    assert "(compressed_sparse_attention)" in str(vetting.untrained_indexer(transformers.DeepseekV4Config()))
    two = {"num_hidden_layers": 2}
    plain = transformers.MiniMaxM3VLTextConfig(**two)  # as its layers come, all see all
    sparse = transformers.MiniMaxM3VLTextConfig(layer_types=["full_attention", "minimax_m3_sparse"], **two)
    assert "(minimax_m3_sparse)" in str(vetting.untrained_indexer(sparse))
    for config in (transformers.LlamaConfig(), plain):
        assert vetting.untrained_indexer(config) is None


def test_a_loss_of_the_output_layer_that_is_not_computed_is_refused() -> None:
    with pytest.raises(RecipeError, match="z_loss_coefficient: 0.001 of the model's config"):
        vetting.require_known_losses(transformers.BambaConfig(z_loss_coefficient=0.001))
    vetting.require_known_losses(transformers.BambaConfig())
    vetting.require_known_losses(transformers.LlamaConfig())


def test_an_adapter_beside_the_weights_is_refused(base: Path, tmp_path: Path) -> None:
    directory = changed(base, tmp_path)
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    with pytest.raises(DataError, match=r"adapter_config\.json"):
        build_model(ModelSpec(str(directory)), torch.float32, 0)


INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    return tmp_path


def indexed(model: Path, file: str) -> None:
    """Have the weights come from a file, which is a pickle, by an index."""
    names = list(read_header(model / "model.safetensors")[0])
    (model / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, model / Path(file).name)
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)}))


def explicit(model: Path, file: str) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "transformers_weights": file}))
    torch.save({"a": torch.zeros(1)}, model / file)


WAYS: dict[str, Callable[[Path], object]] = {
    "train, eval, export-hf, teacher": lambda path: build_model(ModelSpec(str(path), None), torch.float32, 0),
    "generate": lambda path: load_generator(str(path)),
    "init_from": lambda path: open_source(path, hashes=False),
}
PLANTED: dict[str, tuple[Callable[[Path, str], None], str, str]] = {
    "a name of a pickle": (indexed, "x.bin", "x.bin"),
    "a pickle by a right name": (indexed, "x.safetensors", "x.safetensors: not a safetensors file"),
    "a pickle elsewhere": (indexed, "../x.safetensors", "unsafe file name"),
    "a pickle that a config names": (explicit, "adapter_model.bin", "transformers_weights: 'adapter_model.bin'"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("planted", PLANTED)
def test_a_pickle_is_refused_by_name_before_it_is_opened(
    model: Path, way: str, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, file, said = PLANTED[planted]
    if way == "init_from" and plant is explicit:
        pytest.skip("it reads model.safetensors, whatever a config names")
    plant(model, file)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was opened"))
    with pytest.raises(DataError, match=re.escape(said)):
        WAYS[way](model)


def test_what_is_published_passes(model: Path) -> None:
    """With an index, with a pickle beside it, and a pickle's index beside it."""
    names = list(read_header(model / "model.safetensors")[0])
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    (model / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")})
    )
    (model / "pytorch_model.bin").write_bytes(b"")
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    vet_weights(str(model))
    assert index_names(model / INDEX) == {"model-00001-of-00001.safetensors"}
    assert build_model(ModelSpec(str(model), None), torch.float32, 0)


def header(text: bytes, more: int = 0) -> bytes:
    return struct.pack("<Q", len(text)) + text + bytes(more)


def test_a_header_that_takes_all_memory_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    many = b"{" + b",".join(empty % i for i in range(40_000)) + b"}"
    monkeypatch.setattr("json.loads", lambda *_, **__: pytest.fail("it was parsed"))
    for bomb in (
        header(many), header(b"[" * 1000), header(b"{" + b'"a":[],' * 100_000 + b"}", 64 << 20),
        struct.pack("<Q", 1 << 62) + b"{}", struct.pack("<Q", 1 << 20) + b"{}", b"",
    ):
        (tmp_path / "a.safetensors").write_bytes(bomb)
        with pytest.raises(DataError, match=r"a\.safetensors: not a safetensors file"):
            read_header(tmp_path / "a.safetensors")


def test_a_deep_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(header(b'{"a": ' * 100_000 + b"1" + b"}" * 100_000))
    with pytest.raises(DataError, match=r"a\.safetensors: its header cannot be read"):
        read_header(tmp_path / "a.safetensors")


@pytest.mark.parametrize(("tensor", "said"), tables.cases(__file__, "a_tensor_that_its_bytes_cannot_be_is_refused"))
def test_a_tensor_that_its_bytes_cannot_be_is_refused(tmp_path: Path, tensor: str, said: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(header(b'{"a":{"dtype":"F32",%s}}' % tensor.encode(), 4))
    with pytest.raises(DataError, match=rf"a\.safetensors: its header cannot be read: .*{said}"):
        stored_in(tmp_path / "a.safetensors")


def test_headers_of_many_short_names_are_read(tmp_path: Path) -> None:
    save_file({f"{i}": torch.zeros(1, 1, 1, 1) for i in range(2000)}, tmp_path / "a.safetensors")
    assert len(read_header(tmp_path / "a.safetensors")[0]) == 2000


ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "code of megatron": ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "megatron_config"),
    "a module": ({"megatron_core": "evil"}, "megatron_core: 'evil' is code"),
    "other adapters": ({"peft_type": "XLORA", "adapters": {"1": "someone/evil"}}, "peft_type: 'XLORA'"),
    "prompts": ({"peft_type": "PROMPT_TUNING", "tokenizer_kwargs": {"trust_remote_code": True}}, "PROMPT_TUNING"),
    "layers without end": ({"layer_replication": [[0, 2]] * 10**5}, "layer_replication"),
    "more layers": ({"layer_replication": [[0, 2]] * 10**6}, "such a file has at most 4,194,304"),
    "tokens without end": ({"trainable_token_indices": list(range(10**6))}, "such a file has at most 4,194,304"),
    "a long name": ({"modules_to_save": ["", "a" * 10**6]}, "modules_to_save: a name of more than 65,536 characters"),
    "a huge rank": ({"r": 10**9}, "a rank of 1000000000, and the weights have ranks up to 4"),
    "a huge rank of one": ({"rank_pattern": {"q_proj": 10**9}}, "a rank of 1000000000"),
    "no number": ({"r": "evil"}, "a rank of 'evil'"),
    "true": ({"r": True}, "a rank of True"),
    "below zero": ({"r": -4}, "a rank of -4"),
    "an alpha of NaN": ({"lora_alpha": float("nan")}, "lora_alpha: nan is no number"),
    "an alpha of a layer": ({"alpha_pattern": {"q_proj": "1"}}, "lora_alpha: '1' is no number"),
    "no name of a base": ({"base_model_name_or_path": {"a": 1}}, "base_model_name_or_path: {'a': 1} is no name"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_made_to_do_harm_are_refused(tmp_path: Path, name: str) -> None:
    keys, said = ADAPTERS[name]
    plain = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "megatron_core": "megatron.core"}
    save_file({"base_model.model.a.q_proj.lora_A.weight": torch.zeros(4, 8)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(plain))
    vet_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**plain, **keys}))
    with pytest.raises(DataError, match=re.escape(said)):
        vet_adapter(tmp_path)


def test_an_adapter_that_is_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    torch.save({}, tmp_path / "adapter_model.bin")
    with pytest.raises(DataError, match="holds no adapter_model.safetensors"):
        vet_adapter(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "tokenizer.json"])
def test_a_config_of_half_a_gigabyte_is_not_read(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 29)  # a hole
    readers: tuple[Callable[[], object], ...] = (
        lambda: vet_config(str(tmp_path)),
        lambda: vet_adapter(tmp_path),
        lambda: tokenizer_directory(str(tmp_path), None),
    )
    for reader in readers:
        with pytest.raises(DataError, match=f"{tmp_path / name}: 536,870,912 bytes; such a file has at most"):
            reader()


@pytest.mark.parametrize(("keys", "said"), tables.cases(__file__, "regular_expressions_of_an_adapter_end"))
def test_regular_expressions_of_an_adapter_end(
    tmp_path: Path, keys: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.model.vetting._MATCH_S", 1)
    (tmp_path / "adapter_config.json").write_text(json.dumps(keys))
    with pytest.raises(DataError, match=re.escape(said)) if said else nullcontext():
        vet_patterns(tmp_path, ["layers.0.q_proj", "a" * 40 + "b"])


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\ntags: [x]\n---\n# Model\n", "apache-2.0"),
        ("---\nlicense: other\nlicense_name: gemma\n---\n", "gemma"),
        ("---\nlicense: [a, b]\n---\n", None),
        ("---\nlicense: |\n  a\n  b\n---\n", None),
        ("---\nlicense: {\n---\n", None),
        ("---\n- license\n---\n", None),
        ("# Model\n---\nlicense: mit\n---\n", None),
        ("license: mit\n", None),
        (None, None),
    ],
)
def test_licence_of_a_directory(tmp_path: Path, card: str | None, licence: str | None) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert licence_of(str(tmp_path), None) == licence


def test_a_hub_that_cannot_be_reached_leaves_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr("tuner.model.vetting.hf_hub_download", offline)
    assert licence_of("owner/name", None) is None
