"""The campaign of predictions for a GPU in its smallest form: a type of each outcome, and faults that it must find."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tools import cuda_campaign
from tools.causal_cases import tiny_config
from tools.cuda_campaign import MODES, KernelRefused, check_flash, examine
from tuner.errors import RecipeError
from tuner.model.attention import Unsupported
from tuner.model.build import meta_model
from tuner.profile import tracing
from tuner.profile.tracing import refusing

REFUSED = {
    "bert": "does not compute: bidirectional attention",
    "dbrx": "DbrxForCausalLM cannot be predicted: its own code does not run without masks, or on tensors without",
    "musicgen": "no text model of its own",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_type_that_cannot_be_predicted_is_refused_with_the_reason(model_type: str) -> None:
    found = examine(model_type, "h100-80g", modes=("full",)).modes["full"]
    assert found.verdict == "refused" and REFUSED[model_type] in found.reason


def test_what_no_kernel_takes_and_a_bug_of_ours_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_campaign, "WIDEST", 7)
    found = examine("llama", "h100-80g", modes=("full",)).modes["full"]
    assert found.verdict == "crashed" and "more than 7" in found.reason
    monkeypatch.setattr(tracing, "optimizer_step", lambda *given: torch.ones(2) @ torch.ones(3))
    assert examine("llama", "h100-80g", modes=("full",)).modes["full"].verdict == "crashed"


WIDE = torch.empty(4, 10, 16, dtype=torch.bfloat16)
BOUNDS = torch.tensor([0, 10], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda q, k, v, b: (q.repeat(1, 1, 17), k, v, b), "272 columns"),
        (lambda q, k, v, b: (q, k[:3], v[:3], b), "4 query heads on 3"),
        (lambda q, k, v, b: (q, k, v[:3], b), "4 key and 3 value heads"),
        (lambda q, k, v, b: (q, k, v.float(), b), "types"),
        (lambda q, k, v, b: (q, k, v, b.long()), "int64"),
    ],
)
def test_what_flash_attention_demands(change: Callable[..., Any], why: str) -> None:
    check_flash(WIDE, WIDE[:2], WIDE[:2, :, :8], BOUNDS)
    with pytest.raises(KernelRefused, match=why):
        check_flash(*change(WIDE, WIDE, WIDE, BOUNDS))


@pytest.mark.slow("full", "again")
@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_asks_for_numbers_is_refused_in_every_mode(mode: str) -> None:
    """Recomputing notes what a router chose by a mode of its own, between the model and torch."""
    found = examine("longcat_flash", "h100-80g", modes=(mode,)).modes[mode]
    assert (found.verdict, "cannot be predicted" in found.reason) == ("refused", True), found


def test_only_the_models_own_errors_are_refusals() -> None:
    model = meta_model(tiny_config("llama"), torch.float32)
    with pytest.raises(RecipeError, match="cannot be predicted"), refusing(model):
        model.model(input_ids=None, inputs_embeds=None)  # transformers itself refuses it
    with pytest.raises(RecipeError, match="cannot be trained"), refusing(model):
        raise Unsupported("a thing")
    with pytest.raises(RuntimeError), refusing(model):
        torch.ones(2) @ torch.ones(3)
