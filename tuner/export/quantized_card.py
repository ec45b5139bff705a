"""What the card of a run on a quantised base says of that base, and of its use under a kept adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BITS = {"nf4": "4 bits (nf4)", "int8": "8 bits (int8)"}
_NF4 = """from transformers import BitsAndBytesConfig

quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")
base = AutoModelForCausalLM.from_pretrained(BASE_MODEL, quantization_config=quantised)"""


def quantized_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of the table: how the base was quantised, and what the adapter was merged into."""
    found = facts.get("quantized_base")
    if found is None:
        return []
    bits, into, kl = _BITS.get(found["kind"], found["kind"]), found["merged_into"], found["kl"]
    rows = [("base in training", f"frozen weights of linear layers in {bits}, 64 to a scale")]
    if into is not None:
        rows.append(("merged into", "the base as published" if into == "original" else "the quantised base, made wide"))
    figures = f"{kl['quantized']:.2g} on the quantised base"
    figures += f", {kl['original']:.2g} on the base as published" if "original" in kl else ""
    return [*rows, ("KL from the trained model", f"{figures} (nats a token, {found['tokens']:,} tokens)")]


def quantized_usage(facts: Mapping[str, Any], is_whole: bool) -> list[str]:
    """What to load a kept adapter onto, after the lines that load it onto the base as published."""
    found = facts.get("quantized_base")
    if found is None or "original" not in found["kl"]:  # of a base that was published as it was trained on
        return []
    apart = f"it answers {found['kl']['original']:.2g} nats a token (KL) from the model that was trained"
    bits = _BITS.get(found["kind"], found["kind"])
    lines = ["", f"The adapter was trained on this base with its linear layers in {bits}."]
    lines += [f"On the base as published {apart}."]
    if found["kind"] == "nf4" and not is_whole:
        lines += ["On a GPU, bitsandbytes makes the same codes of layers whose inputs are a multiple of 64:", ""]
        lines += ["```python", *_NF4.splitlines(), "```"]
    return [*lines, ""]
