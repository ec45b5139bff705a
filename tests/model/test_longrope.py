"""Of documents that share a row each is rotated by the factors of its own length, as it is when it stands alone."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from tests.fixtures.packed import packed_inputs, relative
from tests.model.tiny import SHAPE, VOCAB
from tuner.model.attention import withdrawn
from tuner.model.blocks import apply_recompute
from tuner.model.build import ModelSpec, build_model
from tuner.model.decode import greedy
from tuner.model.kernels import apply_native
from tuner.model.root import CausalLM

BOUND = 16
LENGTHS = (5, 24, 16, 17, 1)  # on both sides of the bound, and on it


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Phi-3 whose two sets of factors are far apart."""
    found = tmp_path_factory.mktemp("longrope")
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": BOUND, **factors}
    config = Phi3Config(**SHAPE, original_max_position_embeddings=BOUND, rope_parameters=rope)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(found)
    return found


def built(directory: Path) -> CausalLM:
    return CausalLM(build_model(ModelSpec(str(directory)), torch.float32, 0))


def ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def alone(directory: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits ``[T, V]`` of each document by itself and the gradients of their sum, by transformers alone."""
    with withdrawn():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        logits = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids().split(LENGTHS)])
    logits.square().mean().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("way", ["plain", "native", "recomputed"])
def test_each_document_has_the_factors_of_its_own_length(directory: Path, way: str) -> None:
    expected, gradients = alone(directory)
    root = built(directory)
    if way == "native":
        apply_native(root.model)
    if way == "recomputed":
        apply_recompute(root, "full")
    inputs = packed_inputs(ids(), LENGTHS)
    logits = root.logits(inputs["input_ids"], inputs["position_ids"], LENGTHS, torch.arange(sum(LENGTHS)))
    assert relative(logits, expected) < 1e-6
    logits.square().mean().backward()
    worst = {name: relative(p.grad, gradients[name]) for name, p in root.model.named_parameters()}
    assert max(worst.values()) < 1e-5


def test_a_row_of_one_kind_is_the_models_own_row(directory: Path) -> None:
    root, decoder = built(directory), built(directory).model.model
    row = ids()[:12]
    found = root.logits(row, torch.cat([torch.arange(5), torch.arange(7)]), (5, 7), torch.arange(5))
    own = root.model.lm_head(decoder(input_ids=row[None, :5], use_cache=False).last_hidden_state[0])
    assert relative(found, own) < 1e-6


def test_prompts_answered_together_are_each_answered_as_alone(directory: Path) -> None:
    root = built(directory)
    prompts = [ids()[:5].tolist(), ids()[5:29].tolist(), ids()[:16].tolist()]
    cpu = torch.device("cpu")
    together = greedy(root, prompts, (), [4] * 3, cpu)
    assert together == [greedy(root, [prompt], (), [4], cpu)[0] for prompt in prompts]
