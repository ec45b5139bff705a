"""What is trained is the model that transformers loads, causal and one document at a time, also where a class tells
by a mask alone where documents lie, or how far back a token sees; anything else is refused.
"""

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PhimoeConfig, PretrainedConfig, PreTrainedModel, Qwen2MoeConfig

from tests.fixtures.packed import LENGTHS, alone, drawn_root, packed_inputs, random_ids, relative
from tests.model.tiny import SHAPE, TOKENS, VOCAB, family_model, tiny_config
from tuner.errors import RecipeError
from tuner.model import attention, build
from tuner.model.adapter import LoraSpec, add_lora
from tuner.model.build import ModelSpec, build_model
from tuner.model.decode import greedy
from tuner.model.probe import plain_twin, prove_route, require_isolation
from tuner.model.root import CausalLM


def bloom(directory: Path) -> PreTrainedModel:
    """A Bloom whose logits spread, as transformers saves it."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(transformers.BloomConfig(**TOKENS, hidden_size=32, n_layer=2, n_head=4))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory)
    return model.eval()


def test_a_model_without_a_causal_mask_is_refused(tmp_path: Path) -> None:
    bloom(tmp_path)
    attention.register()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention.PACKED).eval()
    model.set_attn_implementation("eager")  # in vain
    assert model.config._attn_implementation == attention.PACKED
    root = CausalLM(model)
    for packed in (True, False):
        with pytest.raises(RecipeError, match="a later token moves earlier logits") as refusal:
            require_isolation(root, VOCAB, packed)
        assert refusal.value.hint == "choose another model"  # rows of one document would be as wrong


def test_a_model_with_attention_of_its_own_answers_each_prompt_as_alone(tmp_path: Path) -> None:
    plain = bloom(tmp_path)
    root = CausalLM(build_model(ModelSpec(str(tmp_path)), torch.float32, 0))
    prompts = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16]]
    answers = greedy(root, prompts, (), [5] * 3, torch.device("cpu"))
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = plain.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, eos_token_id=None)
        assert answer == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_the_plain_twin_is_the_same_tensors(family: str, tmp_path: Path) -> None:
    family_model(family, tied=True).save_pretrained(tmp_path)
    model = build_model(ModelSpec(str(tmp_path)), torch.bfloat16, 0)
    add_lora(model, LoraSpec(4, 8, 0.0, ["q_proj"]), seed=0)
    twin = plain_twin(model)
    assert twin.config._attn_implementation in ("sdpa", "eager")
    assert model.config._attn_implementation == attention.PACKED
    own, shared = (dict(one.named_parameters()) | dict(one.named_buffers()) for one in (model, twin))
    assert {name: t.data_ptr() for name, t in shared.items()} == {name: t.data_ptr() for name, t in own.items()}


def test_a_window_that_attention_is_not_told_of_is_refused_where_documents_are_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "tell_attention", lambda *_: None)  # as of a class that nobody knows how to tell
    sizes = SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12}
    root = drawn_root(PhimoeConfig(**sizes, router_jitter_noise=0.0, input_jitter_noise=0.0), tmp_path)
    require_isolation(root, VOCAB, longest=12)
    with pytest.raises(RecipeError, match="its layer 0 sees 12 of them by a mask of its own, and all 13") as refusal:
        require_isolation(root, VOCAB, longest=13)
    assert "at most 12" in str(refusal.value.hint)
    assert root.model.config._attn_implementation == attention.PACKED


@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_windows_that_attention_is_told_of_are_no_reason(kind: str, tmp_path: Path) -> None:
    require_isolation(drawn_root(tiny_config(kind), tmp_path), VOCAB, longest=100)


@pytest.mark.parametrize("module", [f"transformers.models.{kind}.modeling_{kind}" for kind in ("blt", "ernie4_5_moe")])
def test_what_a_class_says_it_never_trains_is_seen_however_it_says_so(module: str) -> None:
    from importlib import import_module
    from inspect import getsource

    from tuner.model.build import _UNTRAINED

    assert _UNTRAINED.search(getsource(import_module(module)))


WINDOW = 8
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SOME = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOW}
CASES: dict[str, tuple[PretrainedConfig, list[int | None]]] = {
    "stablelm": (transformers.StableLmConfig(**SHAPE), [None, None]),
    "nemotron": (transformers.NemotronConfig(**SHAPE, head_dim=8), [None, None]),
    "qwen2_moe": (Qwen2MoeConfig(**SHAPE, **EXPERTS, **SOME, shared_expert_intermediate_size=16), [None, WINDOW]),
    "phimoe": (PhimoeConfig(**SHAPE, num_local_experts=4, sliding_window=WINDOW), [WINDOW, WINDOW]),
    "phimoe without": (PhimoeConfig(**SHAPE, num_local_experts=4), [None, None]),
}


@pytest.mark.parametrize("name", CASES)
def test_documents_lie_end_to_end(name: str, tmp_path: Path) -> None:
    config, windows = CASES[name]
    root = drawn_root(config, tmp_path)
    for parameter in root.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    layers = root.model.model.layers
    assert [getattr(layer.self_attn, "tuner_window", None) for layer in layers] == windows
    assert root.layout.route == "flat" and prove_route(root, VOCAB, True, max(LENGTHS)) is None
    inputs, everywhere = packed_inputs(random_ids(VOCAB), LENGTHS), torch.arange(sum(LENGTHS))
    with torch.no_grad():
        packed = root.logits(inputs["input_ids"], inputs["position_ids"], LENGTHS, everywhere)
        assert relative(packed, root.model.lm_head(alone(root, inputs["input_ids"], LENGTHS))) < 1e-5


def test_a_model_whose_layers_hand_on_what_they_take_is_left_as_it_is(tmp_path: Path) -> None:
    Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=16).save_pretrained(tmp_path)
    model = build_model(ModelSpec(str(tmp_path), random_init=True), torch.float32, seed=1)
    assert not any("forward" in vars(module) or hasattr(module, "tuner_window") for module in model.modules())
