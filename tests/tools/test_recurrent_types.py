"""A tiny model of each family with states: every document of a row starts from nothing; answers are `generate`'s."""

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tools.causal_cases import VOCAB, tiny_config
from tuner.errors import RecipeError
from tuner.model import attention
from tuner.model.decode import greedy
from tuner.model.probe import plain_twin, require_isolation
from tuner.model.root import CausalLM
from tuner.model.transformers_private import takes_our_attention

FAMILIES = {
    "bamba": 2, "falcon_h1": 2, "granitemoehybrid": 2, "jamba": 2, "kimi_linear": 2, "lfm2_moe": 1, "mamba": 2,
    "mamba2": 2, "minimax": 2, "nemotron_h": 1, "olmo_hybrid": 2, "qwen3_next": 2, "recurrent_gemma": 4, "rwkv": 4,
    "xlstm": 2, "zamba": 4, "zamba2": 3, "zaya": 2,
}  # fmt: skip
"""How many layers of the tiny model mix tokens by a state of their own."""
OTHERS_STAND_FOR_THEM = {"bamba", "granitemoehybrid", "mamba2", "nemotron_h", "olmo_hybrid", "zamba2"}
"""Types whose state is of the kind of another one's here."""
PROMPTS = [[5, 9, 3], [7, 7, 11, 30, 4, 8, 60, 61, 62, 12, 13], [40, 41]]
LIMITS = [8, 5, 6]


def drawn(kind: str) -> PreTrainedModel:
    """A model whose weights are large enough for its states to matter."""
    attention.register()
    config = tiny_config(kind)
    chosen = {"attn_implementation": attention.PACKED} if takes_our_attention(config) else {}
    torch.manual_seed(2)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **chosen)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "conv" not in name:
                parameter.normal_(std=0.2)
    return model.train(False)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in sorted(OTHERS_STAND_FOR_THEM)]


@pytest.fixture(scope="module", params=[*sorted(FAMILIES.keys() - OTHERS_STAND_FOR_THEM), *SLOW])
def root(request: pytest.FixtureRequest) -> Iterator[CausalLM]:
    yield CausalLM(drawn(request.param))


@pytest.mark.slow("kimi_linear", "zamba")
def test_documents_of_a_row_do_not_see_each_other(root: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert root.layout.mixers is not None and len(root.layout.mixers.names) == FAMILIES[root.model.config.model_type]
    assert require_isolation(root, VOCAB).is_clean
    expect = root.layout.mixers.expect
    monkeypatch.setattr(root.layout.mixers, "expect", lambda lengths, device, **_: expect((), device))
    with pytest.raises(RecipeError, match="cannot be trained on packed rows: its documents see each other"):
        require_isolation(root, VOCAB)


@pytest.mark.slow("kimi_linear", "qwen3_next", "recurrent_gemma", "minimax")
@pytest.mark.slow("zaya")
@pytest.mark.parametrize("root", sorted(FAMILIES.keys() - OTHERS_STAND_FOR_THEM), indirect=True)
def test_answers_are_those_of_generate(root: CausalLM) -> None:
    plain = plain_twin(root.model)
    plain.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    for prompt, answer in zip(PROMPTS, greedy(root, PROMPTS, (), LIMITS, root.model.device), strict=True):
        ids = torch.tensor(prompt)[None]
        whole = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(answer), use_cache=True)
        assert whole[0, len(prompt) :].tolist() == answer
