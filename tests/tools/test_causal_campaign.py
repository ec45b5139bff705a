"""The campaign of causal types in its smallest form: types of each verdict."""

from __future__ import annotations

import re

import pytest
import torch

from tools import causal_campaign
from tools.causal_campaign import LENGTHS, MODES, examine

FLAT = ("llama", "gemma2", "qwen3_moe", "codegen", "gptj", "gpt_neo", "modernbert-decoder", "roc_bert")
KINDS = ("gpt_oss", "llama4_text", "doge", "mamba", "bamba")
APART = ("bloom", "falcon", "xglm", "mpt", "deepseek_v32", "minimax_m3_vl_text")
ENCODERS = ("electra", "roberta")
REFUSED = {"bert": "with is_decoder: false in its config its tokens see later ones"}


@pytest.mark.parametrize("model_type", [*FLAT, *KINDS, *APART, *ENCODERS, *REFUSED])
def test_the_first_step_is_that_of_the_plainly_loaded_model_or_refused(model_type: str) -> None:
    found = examine(model_type, decoder=model_type in ENCODERS, with_lora=False)
    assert not found.impossible
    verdicts = {mode: outcome.verdict for mode, outcome in found.modes.items()}
    assert verdicts == dict.fromkeys(MODES, "refused" if model_type in REFUSED else "equal"), found.modes
    assert re.search(REFUSED.get(model_type, "^$"), found.modes["packed"].reason)


def test_an_adapter_has_the_gradients_that_follow_from_the_plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_campaign, "MODES", {"packed": causal_campaign.MODES["packed"]})
    assert examine("gpt2").modes["lora"].verdict == "equal"
    monkeypatch.setitem(causal_campaign.ADAPTER, "adapter.use_rslora", True)
    assert examine("llama").modes["lora"].verdict == "equal"
    monkeypatch.setattr(causal_campaign, "adapter_gradients", lambda model, plain: {"other": torch.ones(())})
    assert examine("llama").modes["lora"].verdict == "wrong"


def test_the_campaign_has_documents_longer_than_windows_and_shorter() -> None:
    assert min(LENGTHS) < 8 < max(LENGTHS)
