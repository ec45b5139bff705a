"""The time of a step by measured rates: held against steps that were measured, and what each rate is for.

The devices that predictions are made for: the present one is taken as it is.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from tuner.config.load import load_recipe
from tuner.model.flops import FROZEN, TRAINED, Product
from tuner.profile import devices
from tuner.profile.devices import DeviceRates, MeasuredStep, find_device, is_verified, rates_of, stated_error, steps_of
from tuner.profile.predict import Target, predict_by_layers
from tuner.profile.prediction import Prediction
from tuner.runtime.device import device_facts
from tuner.runtime.dist import RankInfo

H200 = "NVIDIA H200"
PRODUCTS = [(1024, 4096, 500e12), (4096, 4096, 700e12)]
RATES = DeviceRates("card", "2026-01-01", 8192, PRODUCTS, [(512, 1e14), (4096, 2e14)], copy=4e12, thin=1e12)
FULL = 1 - 512 / (8192 + 512)
SHAPES = {
    "Qwen3 0.6B": (1024, 28, 16, 3072, True), "Qwen3 1.7B": (2048, 28, 16, 6144, True),
    "Qwen3 4B": (2560, 36, 32, 9728, True), "Qwen3 8B": (4096, 36, 32, 12288, False),
}  # fmt: skip
LORA = {"adapter": {"kind": "lora", "r": 16, "alpha": 32}}


def tree_of(step: MeasuredStep, place: Path) -> dict[str, Any]:
    """The recipe that a measured step was of; its model's config is in a directory there."""
    width, layers, heads, inner, tied = SHAPES[step.model]
    config = Qwen3Config(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8, head_dim=128,
        intermediate_size=inner, vocab_size=151936, tie_word_embeddings=tied, max_position_embeddings=40960,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(place)
    model = {"name_or_path": str(place), "init": "random"}
    if step.trained == "nf4":
        model = {"name_or_path": str(place), "quantize": "nf4"}
    train = {
        "global_batch_size": step.rows, "micro_batch_size": step.micro_rows, "duration": "10 steps",
        "gradient_checkpointing": "none", "precision": step.precision,
    }  # fmt: skip
    return {
        "model": model, "data": {"train": str(place / "r.jsonl"), "max_length": 4096}, "method": {"kind": "pretrain"},
        "optimizer": {"lr": 1e-4}, "train": train, **({} if step.trained == "full" else LORA),
    }  # fmt: skip


def predicted(step: MeasuredStep, place: Path) -> Prediction:
    device = find_device("h200-141g")
    recipe = load_recipe(tree_of(step, place)).recipe
    return predict_by_layers(recipe, Target(device, RankInfo(), device.memory_bytes), SHAPES[step.model][1])


QUICK = [one for one in steps_of(H200) if "lora" in str(one) and one.measured_s]
STEPS = [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow, id=str(one)) for one in steps_of(H200)]


@pytest.mark.parametrize("step", STEPS)
def test_steps_are_predicted_as_the_table_says_and_within_a_tenth(step: MeasuredStep, tmp_path: Path) -> None:
    """Those that were measured; of those to be measured next the table says what is predicted."""
    found = predicted(step, tmp_path)
    assert found.time.step_s == pytest.approx(step.predicted_s, rel=2e-3)
    assert found.tensor_bytes / 2**30 == pytest.approx(step.predicted_gib, rel=2e-3)
    assert found.time.basis == "by rates that were measured on NVIDIA H200 on 2026-11-26"
    assert step.measured_s is None or found.time.step_s == pytest.approx(step.measured_s, rel=0.1)
    assert step.measured_gib is None or found.tensor_bytes / 2**30 == pytest.approx(step.measured_gib, rel=0.03)


def test_the_stated_error_is_the_measured_one_of_a_device() -> None:
    assert stated_error(H200) == 0.03 and stated_error("NVIDIA A10") is None
    assert is_verified("cuda", "NVIDIA H200 SXM") and not is_verified("cuda", "NVIDIA A10")
    assert rates_of("NVIDIA H200") is devices.measured()[0] and rates_of("NVIDIA H100 SXM") is None


@pytest.mark.parametrize(
    ("inputs", "outputs", "tokens", "rate"),
    [
        (1024, 4096, 8192, 500e12), (1024, 3000, 8192, 500e12), (3000, 4096, 8192, 700e12), (8192, 8192, 8192, 700e12),
        (1024, 4096, 512, 250e12 / FULL),
    ],
)  # fmt: skip
def test_a_product_has_the_rate_of_the_nearest_shape(inputs: int, outputs: int, tokens: int, rate: float) -> None:
    product = Product(inputs, outputs, 1, 1.0, TRAINED, is_output=False)
    assert RATES.of_product(product, tokens) == pytest.approx(rate)


def test_attention_has_a_rate_between_those_of_two_lengths() -> None:
    assert RATES.of_attention(512 * 8**0.5) == pytest.approx(1e14 * 2**0.5), "between their logarithms"
    assert (RATES.of_attention(10), RATES.of_attention(10**6)) == (1e14, 2e14)
    assert RATES.seconds_of_attention((512, 4096), lambda length: 1e14 * length) == pytest.approx(
        devices.IN_KERNEL * (512 + 2048)
    )


def test_seconds_of_products_are_those_of_their_parts() -> None:
    def seconds(product: Product, tokens: float = 8192, trained: float = 100, parts: int = 1) -> float:
        return RATES.seconds_of_products([product], tokens, trained, parts)

    plain = Product(1024, 4096, 1, 1.0, TRAINED, is_output=False)
    passes = 3 * 2 * 5120 * 8192 / 4e12
    assert seconds(plain) == pytest.approx(6 * 1024 * 4096 * 8192 / 500e12 + passes)
    frozen = seconds(plain._replace(cost=FROZEN))
    assert frozen == pytest.approx(seconds(plain) * 2 / 3)
    assert seconds(plain._replace(copies=3)) == pytest.approx(3 * seconds(plain))
    assert seconds(plain, parts=2) == pytest.approx(seconds(plain, 4096))
    assert seconds(plain._replace(is_output=True)) == pytest.approx(seconds(plain, 100))
    of_experts = plain._replace(copies=8, share=0.25)
    assert seconds(of_experts) == pytest.approx(8 * seconds(plain, 2048))
    thin = Product(4096, 16, 1, 1.0, TRAINED, is_output=False)
    assert seconds(thin) == pytest.approx(3 * 2 * 4112 * 8192 / 1e12 + 2 * 2 * 4096 * 8192 / 4e12)


def test_seconds_of_weights_grow_with_the_micro_batches() -> None:
    once, twice = RATES.seconds_of_weights(1e9, 1), RATES.seconds_of_weights(1e9, 2)
    assert (once, twice - once) == (pytest.approx(56 * 1e9 / 4e12), pytest.approx(24 * 1e9 / 4e12))


@pytest.mark.parametrize("bf16_fast", [True, False])
def test_the_present_processor_computes_in_what_it_has_instructions_for(
    monkeypatch: pytest.MonkeyPatch, bf16_fast: bool
) -> None:
    here = replace(device_facts("cpu"), bf16_fast=bf16_fast)
    monkeypatch.setattr(devices, "device_facts", lambda kind: here)
    assert devices.present_device("cpu").facts().bf16_fast is bf16_fast


def test_cards_before_ampere_have_no_bf16_units() -> None:
    assert {name for name, card in devices.devices().items() if not card.facts().bf16_fast} == {"t4-16g"}
