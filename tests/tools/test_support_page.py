"""The page of supported models is written of findings, and refuses those that are wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tools.causal_cases import DECODERS, TYPES
from tools.support_page import PAGE, page


def finding(name: str, packed: str, single: str = "equal", lora: str = "equal", why: str = "") -> dict[str, Any]:
    verdicts = {"packed": packed, "single": single, "several": packed, "lora": lora}
    modes = {
        mode: {"verdict": verdict, "reason": why if verdict != "equal" else ""} for mode, verdict in verdicts.items()
    }
    return {"type": name, "impossible": "", "modes": modes}


def test_types_are_in_the_part_that_was_found() -> None:
    findings = [
        finding("a", "equal"),
        finding("b", "refused", why="X cannot be trained on packed rows: documents meet by 1.5e-1, allowed 1e-6"),
        finding(
            "c",
            "refused",
            lora="refused",
            why="Y cannot be trained on packed rows: documents meet by 2e-3, allowed 1e-6",
        ),
        finding("d", "refused", "refused", "refused", why="sinks | more"),
        {"type": "e", "impossible": "ImportError: <x>", "modes": {}},
        finding("f, is_decoder", "equal"),
    ]
    text = page(findings, "5.23.0", "1e-5")
    assert "5 types of causal language models: 1 are verified with packed rows, 2 more" in text
    assert "1 are refused, 1 are untried" in text
    assert "### Verified with packed rows\n\n`a`\n" in text
    assert "| `b`, `c` | documents meet by 1.5e-1, allowed 1e-6 |" in text
    assert "| `d` | sinks \\| more |" in text
    assert "| `e` | ImportError: &lt;x> |" in text
    assert "Of 1 encoders that `is_decoder: true` makes causal, `f` is" in text
    assert "Of these 3 types 2 are verified with LoRA" in text


def test_wrong_findings_make_no_page() -> None:
    with pytest.raises(SystemExit, match="b is wrong"):
        page([finding("a", "equal"), finding("b", "wrong")], "5.23.0", "1e-5")


def test_the_page_has_every_type_and_the_other_pages_its_figures() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w.-]+)`", text.split("### Verified with packed rows")[1].split("### LoRA")[0]))
    assert named == set(TYPES)
    total, packed, single = re.search(r"^(\d+) types.*?: (\d+) are verified.*?, (\d+) more", text, re.M).groups()  # type: ignore[union-attr]
    trained, encoders = int(packed) + int(single), len(DECODERS)
    assert f"Of {encoders} encoders" in text and int(total) == len(TYPES)
    root = PAGE.parents[1]
    readme, models = ((root / name).read_text(encoding="utf-8") for name in ("README.md", "docs/models.md"))
    assert f"{trained} of the {total} causal" in readme and f"{packed} of them packed" in readme
    assert f"Of the {total} types" in models and f"it trains {packed} in all three ways and {single} more" in models
