"""Weights that bitsandbytes stored are read to the bits that it computes with; other formats are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures import tables
from tests.model.quantize.drawn import blocks
from tuner.errors import DataError, RecipeError
from tuner.model.quantize.codes import dequantize, quantize
from tuner.model.quantize.published import dequantized_as_stored, grouped, published_kind, read

STORED = Path(__file__).with_name("stored_by_bitsandbytes.safetensors")
"""Made by bitsandbytes 0.50.2 on a CPU: `tools/quantize_campaign.py --write`; `expected.NAME` are its values."""
STATE = "quant_state.bitsandbytes__nf4"


def stored() -> dict[str, dict[str, torch.Tensor]]:
    tensors = load_file(STORED)
    weights = grouped(name for name in tensors if not name.startswith("expected."))
    return {name: {part: tensors[full] for part, full in parts.items()} for name, parts in weights.items()}


def nf4(**changes: Any) -> dict[str, torch.Tensor]:
    """The parts of a weight whose state says something else."""
    parts = stored()["plain.weight"]
    told = json.loads(bytes(parts[STATE].tolist())) | changes
    return {**parts, STATE: torch.tensor([*json.dumps(told).encode()], dtype=torch.uint8)}


@pytest.mark.parametrize("name", ["plain", "nested", "wide", "bytes", "packed"])
def test_what_is_stored_is_read_to_the_bit(name: str) -> None:
    """Plain and quantised scales, blocks of 128 in one type, int8, and codes that are stored as bfloat16."""
    parts, expected = stored()[f"{name}.weight"], load_file(STORED)[f"expected.{name}"]
    assert torch.equal(dequantized_as_stored(name, parts), expected)
    made = read(name, parts)
    assert made.scales.shape == (len(expected), -(-expected.shape[1] // 64))
    assert torch.equal(dequantize(made.codes, made.scales, made.columns, expected.dtype), expected)


def test_plain_scales_are_those_of_our_quantiser() -> None:
    made, own = read("plain", stored()["plain.weight"]), quantize(blocks(torch.bfloat16, 6, 128), "nf4")
    assert torch.equal(made.codes, own.codes) and torch.equal(made.scales, own.scales)


def test_other_names_are_no_parts() -> None:
    weights = grouped(
        ["a.weight", "a.weight.absmax", "b.weight", "c.SCB", "d.bias", "e.weight.absmax", "f.weight", "f.SCB"]
    )
    assert weights == {
        "a.weight": {"weight": "a.weight", "absmax": "a.weight.absmax"},
        "f.weight": {"weight": "f.weight", "SCB": "f.SCB"},
    }


def test_blocks_that_cross_rows_are_refused_and_still_have_their_values() -> None:
    parts, expected = nf4(shape=[8, 96]), load_file(STORED)["expected.plain"]
    assert torch.equal(dequantized_as_stored("q", parts), expected.view(8, 96))
    with pytest.raises(RecipeError, match="q: its blocks of 64 values do not lie inside its rows of 96") as raised:
        read("q", parts)
    assert "model.quantize: nf4" in str(raised.value.hint)
    parts = nf4(blocksize=32)
    parts["absmax"] = torch.ones(24)
    with pytest.raises(RecipeError, match="blocks of 32"):
        read("q", parts)


@pytest.mark.parametrize(("changes", "message"), tables.cases(__file__, "a_state_that_does_not_fit_is_refused"))
def test_a_state_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read("q", nf4(**changes))


def test_damaged_parts_are_refused() -> None:
    whole = stored()
    plain, nested, rows = whole["plain.weight"], whole["nested.weight"], whole["bytes.weight"]
    damaged: list[tuple[dict[str, torch.Tensor], str]] = [
        ({**plain, "quant_map": plain["quant_map"] * 1.01}, "quant_map is not"),
        ({**plain, "absmax": plain["absmax"] * float("nan")}, "absmax is not 12 finite"),
        ({**plain, "weight": plain["weight"][:-1]}, "383 bytes of codes"),
        ({**plain, STATE: plain[STATE][:-3]}, "not what bitsandbytes writes"),
        ({key: one for key, one in plain.items() if key != STATE}, "not what bitsandbytes writes"),
        ({key: one for key, one in nested.items() if key != "nested_absmax"}, "is missing, or too short"),
        ({**rows, "SCB": rows["SCB"][:-1]}, "its SCB of"),
        ({**rows, "SCB": rows["SCB"] * float("inf")}, "SCB is not finite"),
    ]
    for parts, message in damaged:
        with pytest.raises(DataError, match=message):
            read("layers.0.q_proj.weight", parts)
    with pytest.raises(RecipeError, match="weight_format 2"):
        read("q", {**rows, "weight_format": torch.tensor(2, dtype=torch.uint8)})
    with pytest.raises(RecipeError, match="stand for fp4"):
        read("q", {**plain, "quant_state.bitsandbytes__fp4": plain[STATE]})


@pytest.mark.parametrize(("about", "kind"), tables.cases(__file__, "the_kind_of_a_model"))
def test_the_kind_of_a_model(about: Any, kind: str | None) -> None:
    assert published_kind({"quantization_config": about}, "config.json") == kind


@pytest.mark.parametrize(("about", "message"), tables.cases(__file__, "other_formats_are_refused_by_name"))
def test_other_formats_are_refused_by_name(about: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        published_kind({"quantization_config": about}, "m/config.json")
    assert raised.value.message.startswith("m/config.json: ") and raised.value.hint
