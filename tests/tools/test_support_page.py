"""The pages of supported models are written of findings, and refuse those that are wrong."""

import json
import re
from typing import Any

import pytest

from tools.causal_cases import DECODERS, TYPES
from tools.support_page import BEGIN, END, MODELS, PAGE, key, matrix, page, with_types


def finding(  # noqa: PLR0913 - what a finding can be
    name: str, packed: str, single: str = "equal", lora: str = "equal", why: str = "", route: str = "flat"
) -> dict[str, Any]:
    verdicts = {"packed": packed, "single": single, "several": packed, "lora": lora}
    modes = {
        mode: {"verdict": verdict, "reason": why if verdict != "equal" else ""} for mode, verdict in verdicts.items()
    }
    return {"type": name, "impossible": "", "modes": modes, "route": route, "liger": name == "a"}


FINDINGS = [
    finding("a", "equal"),
    finding("b", "refused", why="X cannot be trained on packed rows: documents meet by 1.5e-1, allowed 1e-6"),
    finding(
        "c", "refused", lora="refused", why="Y cannot be trained on packed rows: documents meet by 2e-3, allowed 1e-6"
    ),
    finding("d", "refused", "refused", "refused", why="sinks | more"),
    {"type": "e", "impossible": "ImportError: <x>", "modes": {}, "route": "flat", "liger": False},
    finding("g", "equal", route="batch"),
    finding("f, is_decoder", "equal"),
]  # fmt: skip


def test_types_are_in_the_part_that_was_found() -> None:
    text = page(FINDINGS, "5.23.0", "1e-5")
    assert "6 types of causal language models: 2 are verified with packed rows, 2 more" in text
    assert "1 are refused, 1 are untried" in text
    assert "### Verified with packed rows\n\n`a`\n" in text
    assert "documents go through the model as a batch\n\n`g`\n" in text and "one by one" not in text
    assert "| `b`, `c` | documents meet by 1.5e-1, allowed 1e-6 |" in text
    assert "| `d` | sinks \\| more |" in text
    assert "| `e` | ImportError: &lt;x> |" in text
    assert "Of 1 encoders that `is_decoder: true` makes" in text and "causal, `f` are verified" in text
    assert "Of these 4 types 3 are verified with LoRA" in text


def test_a_type_has_a_line_with_every_check() -> None:
    lines = {line.split("|")[1].strip(): line for line in matrix(FINDINGS).splitlines()}
    assert lines["`a`"].startswith("| `a` | end to end | yes | yes |") and lines["`a`"].count("yes") == 3
    assert lines["`g`"].startswith("| `g` | as a batch | yes | yes |")
    assert lines["`c`"].startswith("| `c` | no | yes | no |")
    assert len({line.count(" |") for line in lines.values()}) == 1
    text = with_types(f"before\n{BEGIN}\nold\n{END}\nafter\n", FINDINGS)
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "it trains 2 with packed rows (1 end to end, 1 as a batch, 0 one by one) and 2 more" in text


@pytest.mark.parametrize("bad", ["wrong", "crashed", "unnamed"])
def test_wrong_findings_make_no_page(bad: str) -> None:
    with pytest.raises(SystemExit, match=f"b is {bad}"):
        page([finding("a", "equal"), finding("b", bad)], "5.23.0", "1e-5")
    with pytest.raises(SystemExit):
        key(json.loads(json.dumps(finding("b", "equal", lora=bad))))


def test_the_pages_have_every_type_and_the_readme_their_figures() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w.-]+)`", text.split("### Verified with packed rows", 1)[1].split("### LoRA")[0]))
    assert named == set(TYPES)
    total, packed, single = re.search(r"^(\d+) types.*?: (\d+) are verified.*?, (\d+) more", text, re.M).groups()  # type: ignore[union-attr]
    trained, encoders = int(packed) + int(single), len(DECODERS)
    assert re.search(rf"Of {encoders}\s+encoders", text) and int(total) == len(TYPES)
    models = MODELS.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert set(re.findall(r"^\| `([\w.-]+)(?:, is_decoder)?` \|", models, re.M)) == {*TYPES, *DECODERS}
    assert f"Of the {total} types" in models and f"it trains {packed} with packed rows" in models
    assert f"and {single} more with one" in models
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"{trained} of the {total} causal" in readme and f"{packed} of them packed" in readme
