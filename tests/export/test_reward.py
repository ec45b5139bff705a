"""An exported reward model, loaded by transformers or peft alone, scores as the trained one."""

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from tests.export.runs import LORA, PROMPTS, recorded, write_base, write_run
from tests.fixtures import forked
from tuner.api.exports import export_hf
from tuner.errors import RecipeError, VerificationError
from tuner.export import padding
from tuner.export.source import resolve
from tuner.export.verify import Answers, Probes, divergence, last_logits, pairs
from tuner.generate import load_generator
from tuner.model.adapter import LoraSpec
from tuner.rundir.layout import TOKENIZER

Make = Callable[..., Path]
CASES = [("llama-tied", None), ("llama", LORA), ("gpt2", LORA), ("gemma3", None)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes a run with one checkpoint, of a kind of model, with an adapter or without; each once."""

    @functools.cache
    def make(kind: str, lora: LoraSpec | None = None) -> Path:
        place = tmp_path_factory.mktemp(kind)
        return write_run(place / "run", write_base(place / "base", kind), lora, head="score", amount=0.2)

    return make


@pytest.fixture(scope="module")
def exports(runs: Make) -> Make:
    """Exports them in float32, each once; nothing changes what is there."""

    @functools.cache
    def make(kind: str, lora: LoraSpec | None = None, adapter: Any = "merge") -> Path:
        run = runs(kind, lora)
        return export_hf(run, run.parent / adapter, dtype="fp32", adapter=adapter).path

    return make


def padded(model: Any, directory: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    batch = tokenizer.pad({"input_ids": PROMPTS}, return_tensors="pt")
    with torch.no_grad():
        scores: torch.Tensor = model(**batch).logits
    return scores


@pytest.mark.slow("case1", "case2")
@pytest.mark.parametrize("case", CASES)
def test_the_export_scores_as_the_trained_model(runs: Make, exports: Make, case: tuple[str, LoraSpec | None]) -> None:
    path, wanted = exports(*case), recorded(runs(*case))
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification")
    assert (config["id2label"], config["problem_type"]) == ({"0": "reward"}, "regression")
    assert not (path / "generation_config.json").exists()
    names = load_file(path / "model.safetensors")
    assert names["score.weight"].shape == (1, 32) and not any("lm_head" in name or "lora" in name for name in names)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    assert float(wanted.std()) > 0.01
    torch.testing.assert_close(last_logits(model, PROMPTS), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(padded(model, path), wanted, rtol=1e-4, atol=1e-5)


def test_rounded_exports_are_verified_by_what_they_prefer(runs: Make, tmp_path: Path) -> None:
    report = export_hf(runs("llama-tied"), tmp_path / "out")
    assert report.dtype == "bf16" and report.kept is not None and 0.9 < report.kept < 1
    scores = torch.tensor([[2.0], [0.5], [-1.0]])
    same, other, shifted = (Answers(each, pairs(each).log_softmax(-1)) for each in (scores, -scores, scores + 3))
    assert divergence(same, same) == divergence(same, shifted) == 0  # the same preferences
    assert divergence(same, other) > 0.5  # another order


def test_a_kept_adapter_is_pefts_with_its_score(runs: Make, exports: Make) -> None:
    run, path = runs("llama", LORA), exports("llama", LORA, "keep")
    config = json.loads((path / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    model = AutoPeftModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    model.base_model.model.config.pad_token_id = AutoTokenizer.from_pretrained(path).pad_token_id
    torch.testing.assert_close(last_logits(model.eval(), PROMPTS), recorded(run), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(padded(model, path), recorded(run), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adapter", ["merge", "keep"])
def test_what_the_card_says_runs_and_ranks(runs: Make, exports: Make, adapter: Any) -> None:
    path = exports("llama", LORA, adapter)
    card = (path / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "- reward-model" in card and "method | reward" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    base = runs("llama", LORA).parent / "base"
    text = f"DIRECTORY, BASE_MODEL = {str(path)!r}, {str(base)!r}\n{code}\nprint(*scores.shape)"
    done = forked.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["2"], done.stderr[-2000:]


def test_the_pipeline_gives_the_score_itself(exports: Make) -> None:
    path = exports("llama-tied")
    classify: Any = pipeline("text-classification", model=str(path), device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(path)
    (found,) = classify("w10 w11 w12", add_special_tokens=False)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    wanted = last_logits(model, [tokenizer("w10 w11 w12", add_special_tokens=False)["input_ids"]])
    assert found["label"] == "reward" and found["score"] == pytest.approx(wanted.item(), rel=1e-2)


def test_the_padding_ends_no_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer pads with what documents end with: transformers would score the token before it."""
    run = write_run(tmp_path / "run", write_base(tmp_path / "base", "llama"), head="score", amount=0.2)
    tokenizer = AutoTokenizer.from_pretrained(run / TOKENIZER)
    assert tokenizer.pad_token == "<pad>"
    report = export_hf(run, tmp_path / "plain", dtype="fp32")
    assert AutoTokenizer.from_pretrained(report.path).pad_token == "<pad>"
    for taken, name in (([], "<pad>"), ([0], "<s>"), ([0, 1], None)):
        ends = Probes(tuple((end,) for end in [*(prompt[-1] for prompt in PROMPTS), *taken]), recorded(run), True)
        monkeypatch.setattr(padding, "recorded_probes", lambda source, ends=ends: ends)
        found = padding.reward_padding(resolve(run))
        assert (found and found.token) == name


def test_a_score_that_was_changed_is_not_published(runs: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.export import hf

    real = hf.verify.load_plain

    def other(directory: Path, head: Any) -> Any:
        model: Any = real(directory, head)
        model.score.weight.data[0, 0] += 0.05
        return model

    monkeypatch.setattr(hf.verify, "load_plain", other)
    with pytest.raises(VerificationError, match=r"score.weight: 1 of its 32 numbers are not the trained ones"):
        export_hf(runs("llama-tied"), tmp_path / "out", dtype="fp32")
    assert not (tmp_path / "out").exists()


def test_a_reward_model_writes_no_text(runs: Make, exports: Make) -> None:
    for path in (runs("llama", LORA), exports("llama", LORA), exports("llama", LORA, "keep")):
        with pytest.raises(RecipeError, match="is a reward model: it scores text and writes none"):
            load_generator(str(path))
