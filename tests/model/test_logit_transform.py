"""Models that divide, multiply or softcap their logits: the loss and gradients are those of the model's own forward."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Cohere2Config, CohereConfig, Gemma2Config, GraniteConfig, PretrainedConfig

from tests.fixtures.packed import LENGTHS, drawn_root, gradient, packed_inputs, random_ids, relative
from tests.model.tiny import SHAPE
from tuner.model import output_layer as module
from tuner.model.attention import PACKED
from tuner.model.output_layer import PLAIN, LogitTransform, OutputLayer
from tuner.model.probe import require_isolation
from tuner.model.root import CausalLM, position_losses
from tuner.train.methods.custom import token_mean

GEMMA = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}
CONFIGS: dict[str, tuple[PretrainedConfig, LogitTransform]] = {
    "gemma2": (Gemma2Config(**SHAPE, **GEMMA, attn_logit_softcapping=0.5), LogitTransform(1.0, 2.0)),
    "granite": (
        GraniteConfig(**SHAPE, logits_scaling=8.0, residual_multiplier=0.5, embedding_multiplier=3.0),
        LogitTransform(0.125),
    ),
    "cohere": (CohereConfig(**SHAPE, logit_scale=0.25), LogitTransform(0.25)),
    "cohere2": (Cohere2Config(**SHAPE, logit_scale=3.0, sliding_window=8), LogitTransform(3.0)),
}


def root_for(kind: str, directory: Path) -> CausalLM:
    return drawn_root(CONFIGS[kind][0], directory, spread=8.0).train()


def own_losses(root: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    """The losses of the model's own forward, each document by itself, with stock attention."""
    root.model.set_attn_implementation("eager")
    losses = []
    for document in ids.split(list(LENGTHS)):
        logits = root.model(input_ids=document[None], use_cache=False).logits[0]
        losses.append(cross_entropy(logits[:-1].double(), document[1:], reduction="none"))
    root.model.set_attn_implementation(PACKED)
    return torch.cat(losses)


@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_and_gradients_are_the_models_own(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", {"cpu": 13 * 97})
    root, ids = root_for(kind, tmp_path), random_ids(97)
    assert root.logit_transform == CONFIGS[kind][1]
    require_isolation(root, 97)
    expected = own_losses(root, ids)
    expected.sum().backward()
    wanted = gradient(root)
    root.zero_grad()
    inputs = packed_inputs(ids, LENGTHS)
    loss = root(document_lengths=LENGTHS, **inputs)
    loss.backward()
    assert loss.item() == pytest.approx(expected.sum().item(), rel=1e-6)
    assert relative(gradient(root), wanted) < 1e-5
    assert relative(root(document_lengths=LENGTHS, **inputs, objective=position_losses).double(), expected) < 1e-6
    root.logit_transform = PLAIN
    assert root(document_lengths=LENGTHS, **inputs).item() != pytest.approx(expected.sum().item(), rel=1e-3)


@pytest.mark.parametrize("kind", ["gemma2", "cohere2"])
def test_generated_token_by_token(kind: str, tmp_path: Path) -> None:
    from tuner.model.decode import greedy

    root = root_for(kind, tmp_path).eval()
    prompt = random_ids(97)[:20].tolist()
    [found] = greedy(root, [prompt], [], [6], torch.device("cpu"))
    root.model.set_attn_implementation("eager")
    ids = list(prompt)
    for _ in range(6):
        ids.append(int(root.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert found == ids[20:]


def test_a_loss_of_the_users_own_sees_the_factor() -> None:
    def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor) -> object:
        return cross_entropy(hidden @ weight.T, targets, reduction="sum"), {}

    own = token_mean(plain, "own")  # type: ignore[arg-type]
    hidden, weight, targets = torch.randn(5, 8), torch.randn(11, 8), torch.arange(5)
    expected = cross_entropy(hidden @ weight.T * 0.25, targets, reduction="sum")
    found = own.terms(hidden, OutputLayer(weight, None, LogitTransform(0.25)), targets, {})
    torch.testing.assert_close(found.losses["loss"].value, expected)
