"""Every wrong export of the campaign is held back, and exports answer as the trained model where tuner is not there."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.export.runs import write_base, write_run
from tools import plain_export
from tools.export_campaign import RUNS, planted
from tools.export_faults import FAULTS, Fault, hold_back
from tools.plain_answers import answers, load
from tuner.api.exports import export_hf
from tuner.model.adapter import LoraSpec

SMALL, LARGE = 2e-4, 0.05
LORA, DORA = (LoraSpec(4, 8.0, 0.0, "all-linear", use_dora=use_dora) for use_dora in (False, True))
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, float], Path]:
    """Runs of a tied model in bf16, by whether they are DoRA's and by how far they went."""
    place = tmp_path_factory.mktemp("runs")
    base = write_base(place / "base", "llama-tied")
    return {
        (lora.use_dora, amount): write_run(place / f"{lora.use_dora}-{amount}", base, lora, True, "bf16", (), amount)
        for lora in (LORA, DORA)
        for amount in (SMALL, LARGE)
    }


@pytest.mark.parametrize("amount", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_export_is_held_back(
    runs: dict[tuple[bool, float], Path], tmp_path: Path, fault: Fault, amount: float
) -> None:
    assert hold_back(runs[fault.of == "dora", amount], fault, tmp_path / "out", dtype="bf16") == ""


def test_an_export_without_a_fault_is_not(runs: dict[tuple[bool, float], Path], tmp_path: Path) -> None:
    assert hold_back(runs[False, SMALL], Fault("none", nullcontext), tmp_path / "out").startswith("published")


def test_the_campaign_has_what_it_says() -> None:
    assert len(RUNS) == len(set(RUNS)) == 24
    assert len({fault.name for fault in FAULTS}) >= 12 and len(list(planted())) == 2 * len(FAULTS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.slow), LoraSpec(4, 8.0, 0.0, "all-linear")])
def test_the_same_text_and_logits_without_tuner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: LoraSpec | None
) -> None:
    monkeypatch.setattr(plain_export, "PROMPTS", ["w10 w20 w30", "w40"])
    base = write_base(tmp_path / "base", "llama")
    run = write_run(tmp_path / "run", base, lora, amount=0.3)
    exported = export_hf(run, dtype="fp32", adapter="merge" if lora is None else "keep").path
    ours = plain_export.answers_here(run)
    theirs = plain_export.answers_there(sys.executable, exported, None if lora is None else base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    before = answers(load(str(base), None), tokenizer, plain_export.PROMPTS, plain_export.NEW_TOKENS)
    assert [answer["text"] for answer in ours] == [answer["text"] for answer in theirs]
    assert plain_export.difference(ours, theirs) <= 1e-5 < plain_export.difference(ours, before)


@pytest.mark.slow
def test_answers_are_given_without_tuner() -> None:
    code = "import runpy, sys; sys.argv[1:] = ['nowhere', 'x']\ntry:\n runpy.run_path(%r, run_name='__main__')\n"
    code += "except OSError:\n pass\nimport tuner"
    script = str(plain_export.ROOT / "tools" / "plain_answers.py")
    done = subprocess.run([sys.executable, "-c", code % script], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: import of tuner halted" in done.stderr
