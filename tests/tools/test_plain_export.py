"""Exports answer as the trained model where tuner cannot be imported: transformers alone, and peft."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.export.runs import write_base, write_run
from tools import plain_export
from tools.plain_answers import answers, load
from tuner.api.exports import export_hf
from tuner.model.adapter import LoraSpec


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
