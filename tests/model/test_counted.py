"""Models whose attention counts tokens or has sinks: packed rows and answers are those of each document alone."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, InklingTextConfig, Llama4TextConfig, PretrainedConfig

from tests.fixtures.packed import LENGTHS, gradient, packed_inputs, random_ids, relative
from tests.model.tiny import SHAPE, VOCAB
from tuner.errors import RecipeError
from tuner.model import attention
from tuner.model.attention import withdrawn
from tuner.model.blocks import apply_recompute
from tuner.model.build import ModelSpec, build_model
from tuner.model.counted import _Without, count_by_class
from tuner.model.decode import greedy
from tuner.model.probe import require_isolation
from tuner.model.root import CausalLM

EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama4": (
        Llama4TextConfig,
        {
            "architectures": ["Llama4ForCausalLM"], "head_dim": 8, "attention_chunk_size": 6, "no_rope_layers": [1, 0],
            "floor_scale": 4, "attn_scale": 0.6, "intermediate_size_mlp": 48,
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "architectures": ["GptOssForCausalLM"], "head_dim": 8, "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}  # fmt: skip


def saved(kind: str, directory: Path, **others: Any) -> Path:
    """A model with weights and sinks of some size."""
    config, values = CONFIGS[kind]
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config(**SHAPE | EXPERTS | values | others), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape) * 0.15)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.randn(parameter.shape) + 1)
    model.save_pretrained(directory)
    return directory


def root_of(directory: Path) -> CausalLM:
    return CausalLM(build_model(ModelSpec(str(directory)), torch.float32, seed=0))


def alone(directory: Path, ids: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by transformers, each document by itself."""
    with withdrawn():
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
        total = 0.0
        for document in ids.split(list(LENGTHS)):
            logits = model(input_ids=document[None], use_cache=False).logits[0]
            loss = nn.functional.cross_entropy(logits[:-1].double(), document[1:], reduction="sum")
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "level"), [("llama4", None), ("gpt_oss", None), ("gpt_oss", "selective")])
@pytest.mark.parametrize("way", [attention.PACKED, attention.NATIVE])
def test_packed_rows_are_each_document_alone(kind: str, level: Any, way: str, tmp_path: Path) -> None:
    directory, ids = saved(kind, tmp_path), random_ids(VOCAB)
    loss, wanted = alone(directory, ids)
    root = root_of(directory)
    root.model.set_attn_implementation(way)
    if level is not None:
        apply_recompute(root, level)
    found = root.train()(document_lengths=LENGTHS, **packed_inputs(ids, LENGTHS))
    found.backward()
    assert float(found.detach()) == pytest.approx(loss, rel=1e-6)
    grads = {name: p.grad for name, p in root.model.named_parameters() if p.grad is not None}
    assert grads.keys() == wanted.keys()
    whole = sum(float(g.norm()) ** 2 for g in wanted.values()) ** 0.5
    for name, grad in grads.items():
        assert float((grad - wanted[name]).norm()) < 2e-6 * max(float(wanted[name].norm()), whole / 100), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_answers_are_those_of_plain_generate(kind: str, tmp_path: Path) -> None:
    directory = saved(kind, tmp_path)
    with withdrawn():
        plain: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        prompts = [[5, 6, 7, 8], [9, 10], list(range(11, 30))]
        wanted = [
            plain.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None)[0].tolist()
            for prompt in prompts
        ]
    answers = greedy(root_of(directory), prompts, (), [9] * 3, torch.device("cpu"))
    assert [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)] == wanted


def test_chunks_of_any_length_are_no_reason_and_a_layer_without_them_is(tmp_path: Path) -> None:
    root = root_of(saved("llama4", tmp_path, attention_chunk_size=12))
    assert root.layout.chunk == 12
    for longest in (12, 25, 100):
        require_isolation(root, VOCAB, longest=longest)
    root.model.model.layers[0].self_attn.tuner_chunk = 0
    with pytest.raises(RecipeError, match="its layer 0 sees 1 of them by a mask of its own, and all 25"):
        require_isolation(root, VOCAB, longest=25)


def test_a_wrong_sink_is_refused(tmp_path: Path) -> None:
    root = root_of(saved("gpt_oss", tmp_path))
    require_isolation(root, VOCAB, longest=100)
    own = attention._sinks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_sinks", lambda options: own(options) * 1.1)
        with pytest.raises(RecipeError, match="differ from the model's own"):
            require_isolation(root, VOCAB)


def test_a_copy_of_what_a_layer_sees_is_the_same() -> None:
    view = copy.deepcopy(_Without(Llama4TextConfig(**SHAPE), "floor_scale"))
    assert view.floor_scale is None and view.hidden_size == 32


def test_rows_differ_where_sinks_do(tmp_path: Path) -> None:
    """The comparisons above see sinks: half of each changes all."""
    root, ids = root_of(saved("gpt_oss", tmp_path)), random_ids(VOCAB)
    losses = []
    for factor in (1.0, 0.5):
        with torch.no_grad():
            for name, parameter in root.named_parameters():
                if name.endswith("sinks"):
                    parameter.mul_(factor)
        root.zero_grad()
        root(document_lengths=LENGTHS, **packed_inputs(ids, LENGTHS)).backward()
        losses.append(gradient(root))
    assert relative(losses[1], losses[0]) > 1e-2


def test_layers_count_by_themselves_again_where_the_class_attends(tmp_path: Path) -> None:
    """What is marked for our attention is undone for that of the class: Llama 4 and Inkling give their own logits."""
    for name, directory in (("llama4", saved("llama4", tmp_path / "a")), ("inkling", inkling(tmp_path / "b"))):
        with withdrawn():
            plain: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager"
            )
        ids = random_ids(VOCAB)[None, :40]
        root = root_of(directory)
        require_isolation(root, VOCAB, packed=False)
        decoder = root.model.get_decoder()
        assert any(hasattr(module, "tuner_temperature") for module in decoder.modules()), name
        root.model.set_attn_implementation("eager")
        count_by_class(decoder)
        assert not any("tuner" in key for module in decoder.modules() for key in vars(module))
        with torch.no_grad():
            wanted = plain(input_ids=ids, use_cache=False).logits
            assert relative(root.model(input_ids=ids, use_cache=False).logits, wanted) < 1e-6, name


def inkling(directory: Path) -> Path:
    """Layers with a position bias, the second one with a temperature by the logarithm of a token's number."""
    sizes = {"head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "d_rel": 4}
    sizes |= {"rel_extent": 10, "log_scaling_n_floor": 4, "moe_intermediate_size": 16, "n_routed_experts": 4}
    config = InklingTextConfig(
        **SHAPE | sizes, num_experts_per_tok=2, sliding_window_size=8, layer_types=["hybrid_sliding", "hybrid"]
    )
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape) * 0.15)
    config.architectures = [type(model).__name__]
    model.save_pretrained(directory)
    return directory
