"""Adapters of routed experts, against one expert after the other in plain torch; what they are refused for."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.model.tiny import SHAPE, family_config
from tuner.errors import RecipeError
from tuner.model.adapter import LoraSpec, adapter_off, add_lora, left_out_experts, require_used, stacked_weights
from tuner.model.blocks import apply_recompute
from tuner.model.build import ModelSpec, build_model, meta_model
from tuner.model.experts import adapted_experts, routed_experts
from tuner.model.root import CausalLM

SPEC = LoraSpec(3, 6.0, 0.0, "all-linear", experts=True)
_GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2}
_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "mamba_n_groups": 1, "n_groups": 1}
_NO_GATE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3-moe": lambda: family_config("qwen3-moe", tied=False),
    "mixtral": lambda: family_config("mixtral", tied=False),
    "gpt-oss": lambda: CONFIG_MAPPING["gpt_oss"](**SHAPE, **_GPT_OSS),
    "no gate": lambda: CONFIG_MAPPING["nemotron_h"](
        **SHAPE, **_MAMBA, **_NO_GATE, layers_block_type=["moe", "attention"], moe_shared_expert_intermediate_size=16
    ),
}
CHOICES = [[0, 2], [2, 0], [0, 3], [3, 2], [2, 3]]
"""Nobody chooses the second expert."""


def built(kind: str, implementation: str = "grouped_mm", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(1)
    config = CONFIGS[kind]()
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=implementation)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.train(False)  # type: ignore[no-any-return]


def spread(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> None:
    """Give adapters values that training might."""
    generator = torch.Generator().manual_seed(3)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator).mul(0.3).to(dtype)


def plainly(module: Any, tokens: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One expert after the other, its weights merged: W + s·B·A."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    scale, rows = SPEC.alpha / SPEC.r, []
    for token, chosen, weighed in zip(tokens, choices.tolist(), weights, strict=True):
        total = torch.zeros_like(token)
        for number, weight in zip(chosen, weighed, strict=True):
            inner = token
            for name in (first, "down_proj"):
                own = getattr(module, name)[number]
                own = own.T if module.is_transposed else own
                added = getattr(module, f"{name}_lora_B")[number] @ getattr(module, f"{name}_lora_A")[number]
                inner = (own + scale * added) @ inner
                if module.has_bias:
                    inner = inner + getattr(module, f"{name}_bias")[number]
                if name == first:
                    inner = module._apply_gate(inner[None])[0] if module.has_gate else module.act_fn(inner)
            total = total + weight * inner
        rows.append(total)
    return torch.stack(rows)


def computed(module: Any, compute: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The output, and the gradients of tokens, weights of choices and adapters."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(len(CHOICES), 32, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(len(CHOICES), 2, generator=generator).to(dtype).requires_grad_()
    module.zero_grad()
    output = compute(tokens, torch.tensor(CHOICES), weights)
    output.square().sum().backward()
    trained = {name: one for name, one in module.named_parameters() if "lora" in name}
    assert len(trained) == 4 and all(one.grad is not None for one in trained.values())
    own = [one.grad.clone() for one in trained.values() if one.grad is not None]
    assert all(not one[1].any() and bool(one[2].any()) for one in own), "an expert without tokens has no gradient"
    assert tokens.grad is not None and weights.grad is not None
    return [output.detach(), tokens.grad, weights.grad, *own]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    ("dtype", "implementation", "bound"), [(torch.float64, "eager", 1e-12), (torch.float32, "grouped_mm", 1e-6)]
)
def test_experts_compute_what_merged_weights_would(
    kind: str, dtype: torch.dtype, implementation: str, bound: float
) -> None:
    model = built(kind, implementation)
    add_lora(model, SPEC, seed=0)
    spread(model)
    model.to(dtype=dtype)
    module = next(iter(adapted_experts(model).values()))
    wanted = computed(module, lambda *given: plainly(module, *given), dtype)
    for found, expected in zip(computed(module, module, dtype), wanted, strict=True):
        assert float((found - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_new_adapter_changes_no_bit(kind: str) -> None:
    model = built(kind)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        add_lora(model, SPEC, seed=0)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
        spread(model)
        assert not torch.equal(model(input_ids=ids, use_cache=False).logits, before)
        with adapter_off(model):
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    assert left_out_experts(model) is None
    assert not any("lora" in name for name in stacked_weights(model))


def test_adapters_are_float32_drawn_as_peft_draws_and_the_only_ones_trained() -> None:
    model, again = built("qwen3-moe"), built("qwen3-moe")
    for each in (model, again):
        add_lora(each, SPEC, seed=4)
    other = built("qwen3-moe")
    add_lora(other, SPEC, seed=5)
    for name, module in adapted_experts(model).items():
        a: Any = module.gate_up_proj_lora_A
        assert torch.equal(a, again.get_parameter(f"{name}.gate_up_proj_lora_A"))
        assert not torch.equal(a, other.get_parameter(f"{name}.gate_up_proj_lora_A"))
        bound = 1 / math.sqrt(32)
        assert a.dtype == torch.float32 and 0.9 * bound < float(a.detach().abs().max()) <= bound
        assert not module.down_proj_lora_B.any()  # type: ignore[operator]
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert all("lora_" in name for name in trained) and len([one for one in trained if ".experts." in one]) == 8
    meta = meta_model(CONFIGS["qwen3-moe"](), torch.float32)
    add_lora(meta, SPEC, seed=4)
    shapes = {name: tuple(one.shape) for name, one in meta.named_parameters()}
    assert shapes == {name: tuple(one.shape) for name, one in model.named_parameters()}
    assert all(one.is_meta for one in meta.parameters())


def test_in_bfloat16_they_are_as_near_as_the_layers() -> None:
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        model = built("qwen3-moe")
        model.to(dtype=dtype)
        add_lora(model, SPEC, seed=0)
        spread(model)
        module = next(iter(adapted_experts(model).values()))
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randn(len(CHOICES), 32, generator=generator).to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            results.append(module(tokens, torch.tensor(CHOICES), torch.full((len(CHOICES), 2), 0.5)).detach())
        assert results[-1].dtype == dtype
    exact, rounded = results
    assert float((rounded.float() - exact).norm() / exact.norm()) < 2e-2


def test_dropout_is_drawn_for_the_adapter_alone_and_in_training_alone() -> None:
    model = built("qwen3-moe")
    add_lora(model, LoraSpec(4, 8.0, 0.5, "all-linear", experts=True), seed=0)
    module = next(iter(adapted_experts(model).values()))
    given = (torch.randn(5, 32), torch.tensor(CHOICES), torch.full((5, 2), 0.5))
    whole = module(*given)
    assert torch.equal(module.train()(*given), whole), "B is zero: what is dropped does not count"
    spread(model)
    assert not torch.equal(module.train()(*given), module(*given))
    assert torch.equal(module.eval()(*given), module(*given))


@pytest.mark.parametrize("level", ["selective", "full"])
@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss"])
def test_recomputed_layers_have_the_same_gradients(kind: str, level: Any) -> None:
    found = []
    for recomputed in (False, True):
        model = built(kind)
        add_lora(model, SPEC, seed=0)
        spread(model)
        root = CausalLM(model)
        if recomputed:
            apply_recompute(root, level)
        root.train()
        ids = torch.arange(3, 30)
        root(ids[:-1], torch.arange(26), (20, 6), torch.arange(26), ids[1:]).backward()
        found.append({name: one.grad for name, one in model.named_parameters() if one.requires_grad})
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name  # type: ignore[arg-type]


def refused(kind: str, spec: LoraSpec) -> RecipeError:
    model = built(kind) if kind in CONFIGS else AutoModelForCausalLM.from_config(family_config(kind, tied=False))
    with pytest.raises(RecipeError) as caught:
        add_lora(model, spec, seed=0)
    return caught.value


def test_what_cannot_be_adapted_is_refused_by_name() -> None:
    error = refused("llama", SPEC)
    assert error.message == "adapter.experts: LlamaForCausalLM has no routed experts"
    assert error.hint == "write experts: false"
    full = LoraSpec(4, 8.0, 0.0, "all-linear", modules_to_save=("mlp.experts",), experts=True)
    assert "modules_to_save trains model.layers.0.mlp.experts in full" in refused("qwen3-moe", full).message


def test_experts_that_are_not_called_are_refused() -> None:
    model = built("qwen3-moe")
    add_lora(model, SPEC, seed=0)
    logits = lambda: model(input_ids=torch.arange(3, 20)[None]).logits  # noqa: E731
    require_used(model, logits)
    module: Any = model.get_submodule("model.layers.1.mlp")
    experts = module.experts
    module.forward = lambda hidden: hidden
    with pytest.raises(RecipeError, match=r"experts: model\.layers\.1\.mlp\.experts is not called"):
        require_used(model, logits)
    assert experts in routed_experts(model).values()


def test_a_base_of_codes_keeps_its_experts_whole_under_their_adapters(tmp_path: Path) -> None:
    from tuner.model.quantize.layers import QuantizeSpec, left_whole

    built("qwen3-moe").save_pretrained(tmp_path)
    model = build_model(ModelSpec(str(tmp_path), quantize=QuantizeSpec("nf4")), torch.float32, seed=0)
    add_lora(model, SPEC, seed=0)
    spread(model)
    model(input_ids=torch.arange(3, 20)[None]).logits.sum().backward()
    assert all(one.grad is not None for one in model.parameters() if one.requires_grad)
    assert "4 weights stay as they are, such as model.layers.0.mlp.experts.gate_up_proj" in str(left_whole(model))


def test_ligers_kernel_of_experts_does_not_take_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as code

    from tuner.model.kernels import apply_liger, has_liger

    if not has_liger("qwen3_moe"):
        pytest.skip("no liger-kernel")
    for name, value in list(vars(code).items()):  # it replaces classes for every model of the process
        if name.startswith("Qwen3Moe"):
            monkeypatch.setattr(code, name, value)
    model = built("qwen3-moe")
    add_lora(model, SPEC, seed=0)
    apply_liger(model)
    assert all("forward" not in vars(module) for module in adapted_experts(model).values())
