"""The campaign of causal types in its smallest form: a type of each family and verdict, and faults to be found."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import causal_campaign, causal_checks
from tools.causal_campaign import AS_DECODER, EVERY, chosen, examine, totals
from tools.causal_cases import FAMILIES
from tools.causal_checks import Finding, Outcome, named
from tools.causal_faults import FAULTS, planted
from tools.causal_rows import LAYOUTS, LENGTHS, STEPS, TRAINED
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
