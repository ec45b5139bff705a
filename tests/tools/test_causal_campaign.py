"""The campaign of causal types in its smallest form, faults to be found, and the pages written of its findings."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tools import causal_campaign, causal_checks
from tools.causal_campaign import AS_DECODER, EVERY, chosen, examine, totals
from tools.causal_cases import DECODERS, FAMILIES, TYPES
from tools.causal_checks import Finding, Outcome, named
from tools.causal_faults import FAULTS, planted
from tools.causal_rows import LAYOUTS, LENGTHS, STEPS, TRAINED
from tools.support_page import BEGIN, END, MODELS, PAGE, key, matrix, page, with_types
from tuner.model import documents

WAYS = ("packed", "single")
FURTHER = ("gptj", "qwen3_5_text", "falcon_h1", "deepseek_v3", "gpt_oss", "mamba2")
"""Of families that others stand for."""
ROUTES = {**dict.fromkeys(("llama", *FURTHER), "flat"), "bloom": "batch"}
REFUSED = {"bert": "with is_decoder: false in its config its tokens see later ones"}


def verdicts(finding: Finding) -> dict[str, str]:
    return {mode: outcome.verdict for mode, outcome in finding.modes.items()}


@pytest.mark.slow("bert")
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.slow] * (name in FURTHER)) for name in (*ROUTES, *REFUSED)]
)
def test_a_type_is_trained_as_the_plain_loop_trains_it_or_refused(model_type: str) -> None:
    found = examine(model_type, WAYS, steps=2)
    assert not found.impossible
    verdict = "equal" if model_type in ROUTES else "refused"
    assert verdicts(found) == dict.fromkeys(WAYS, verdict), found.modes
    if model_type in REFUSED:
        assert re.search(REFUSED[model_type], found.modes["packed"].reason)
    else:
        assert found.route == ROUTES[model_type]


COMPILED = dict.fromkeys(("mamba2", "gemma3n_text", "got_ocr2", "phimoe"), "equal")
COMPILED |= dict.fromkeys(("jetmoe", "bloom"), "refused")


@pytest.mark.slow("gemma3n_text", "got_ocr2", "phimoe", "jetmoe", "bloom")
@pytest.mark.parametrize("model_type", COMPILED)
def test_a_type_is_compiled_once_for_all_packings_or_refused(model_type: str) -> None:
    for outcome in examine(model_type, ("compiled", "again"), steps=2).modes.values():
        assert outcome.verdict == COMPILED[model_type], outcome
        assert "more for other packings" not in outcome.reason


@pytest.mark.slow
def test_another_program_for_each_number_of_documents_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "mark_dynamic", lambda *_: None)
    outcome = examine("llama", ("compiled",), steps=1).modes["compiled"]
    assert outcome.verdict == "wrong" and "more for other packings" in outcome.reason


@pytest.mark.slow
def test_a_mixture_in_every_way() -> None:
    ways = tuple(check for check in EVERY if check not in ("cuda", "single", "processes", "again", "inductor"))
    found = examine("mixtral", ways, steps=2)
    assert set(verdicts(found).values()) == {"equal"}, found.modes
    assert found.idle == [] and not found.draws and found.route == "flat"


PLANTED = {
    "reset": ("llama", ("packed",)), "state": ("mamba2", ("packed",)), "sink": ("gpt_oss", ("packed",)),
    "balance": ("mixtral", ("packed",)), "router": ("mixtral", ("single",)),
    "expert": ("mixtral", ("packed", "export")),
}  # fmt: skip


@pytest.mark.slow("expert", "sink", "router", "state")
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str) -> None:
    model_type, ways = PLANTED[fault]
    found = examine(model_type, ways, fault, steps=2)
    assert verdicts(found)[ways[-1]] == "wrong", found.modes
    assert set(PLANTED) == {*FAULTS, "expert"}
    with planted("", None):  # type: ignore[arg-type]
        pass


def test_random_numbers_of_a_models_own_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine("phimoe", WAYS, steps=2)
    assert found.draws and set(verdicts(found).values()) == {"equal"}, found.modes
    monkeypatch.setattr("tools.causal_plain.SEED", 41)
    assert verdicts(examine("phimoe", ("single",), steps=2)) == {"single": "wrong"}


def test_every_layout_has_the_same_documents_and_targets() -> None:
    for layout in LAYOUTS.values():
        for processes in (1, 2):
            steps = [layout.batches(1, rank, processes) for rank in range(processes)]
            batches = [batch for step in steps for batch in step.micro]
            assert sum(len(batch.trained_positions) for batch in batches) == TRAINED == steps[0].trained_count
            assert len({len(step.micro) for step in steps}) == 1
    assert min(LENGTHS) < 8 < max(LENGTHS)


def test_a_refusal_for_an_exception_is_not_one() -> None:
    assert named("refused", "X cannot be trained: it does not run (TypeError: 'NoneType' object)") == "unnamed"
    assert named("refused", "X cannot be trained: it is not causal") == "refused"


def test_the_campaign_resumes_and_fails_where_one_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []

    def found(name: str, checks: Sequence[str], fault: str, verdict: str = "equal") -> Finding:
        tried.append(name)
        return Finding(name, modes={check: Outcome("wrong" if name == "gpt2" else verdict) for check in checks})

    monkeypatch.setattr(causal_campaign, "examine", found)
    out = tmp_path / "figures.json"

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["campaign", *words, "--out", str(out)])
        return causal_campaign.main()

    assert run("--only", "llama", "bert") == 0
    assert tried == ["bert", "llama"] and "processes" in json.loads(out.read_text())[1]["modes"]
    assert "processes" not in json.loads(out.read_text())[0]["modes"]
    assert run("--only", "llama", "gpt2") == 1 and tried == ["bert", "llama", "gpt2"]
    assert run("--only", "llama", "--again") == 0 and tried[-1] == "llama"
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["packed"] == {"equal": 1}
    assert totals([{"impossible": "x", "modes": {}}])["cuda"] == {"impossible": 1}
    with pytest.raises(SystemExit, match="no such type: lama"):
        chosen(["lama"], "1/1")
    names = [name for part in (1, 2, 3) for name in chosen([], f"{part}/3")]
    assert len(names) == len(set(names)) == len(chosen([], "1/1")) and f"bert{AS_DECODER}" in names
    assert set(FAMILIES) <= set(names) and STEPS == 20
    assert causal_checks.SHORT < STEPS


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
