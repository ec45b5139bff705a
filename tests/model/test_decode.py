"""Several prompts decoded together: each gets what it would get alone, with its whole text computed anew each time."""

from pathlib import Path

import pytest
import torch

from tests.fixtures.packed import drawn_root
from tests.model.tiny import TINY, VOCAB, tiny_config
from tuner.model.decode import SideBySide, greedy
from tuner.model.documents import Carried
from tuner.model.root import CausalLM

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 3], [7] * 2 + [11, 30, 4, 8, 60, 61, 62, 12, 13], [40]]
"""The second is longer than the sliding windows."""
LIMITS = [12, 9, 14]


def model(kind: str, directory: Path) -> CausalLM:
    return drawn_root(tiny_config(kind), directory, spread=6.0, seed=3)  # so that answers vary and ties do not decide


def anew(root: CausalLM, prompt: list[int], ends: set[int], limit: int) -> list[int]:
    """The answer without any cache."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        given = torch.tensor(ids)
        with torch.no_grad():
            logits = root.logits(given, torch.arange(len(ids)), (len(ids),), torch.tensor([len(ids) - 1]))
        token = int(logits[0].argmax())
        if token in ends:
            break
        ids.append(token)
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("llama", "gpt2", "gemma3") else pytest.mark.slow) for kind in TINY]
)
def test_answers_are_those_of_each_prompt_alone(kind: str, tmp_path: Path) -> None:
    root = model(kind, tmp_path)
    alone = [anew(root, prompt, set(), limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    assert len({token for answer in alone for token in answer}) > 3
    assert greedy(root, PROMPTS, (), LIMITS, CPU) == alone
    # An end token in the middle of the second: the others go on.
    end = alone[1][4]
    with_end = [anew(root, prompt, {end}, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    assert len(with_end[1]) <= 4
    assert greedy(root, PROMPTS, {end}, LIMITS, CPU) == with_end


def test_prompts_without_room_have_empty_answers(tmp_path: Path) -> None:
    root = model("llama", tmp_path)
    assert greedy(root, PROMPTS, (), [0, 2, 0], CPU) == [[], anew(root, PROMPTS[1], set(), 2), []]
    assert greedy(root, [], (), [], CPU) == []


def test_a_model_with_another_kind_of_state_takes_them_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = model("llama", tmp_path)
    together = greedy(root, PROMPTS, (), LIMITS, CPU)
    caches: list[bool] = []
    real = CausalLM.next_tokens

    def watched(self: CausalLM, *arguments: object) -> torch.Tensor:
        assert isinstance(arguments[3], Carried)
        caches.append(isinstance(arguments[3].arguments["past_key_values"], SideBySide))
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CausalLM, "next_tokens", watched)
    assert greedy(root, PROMPTS, (), LIMITS, CPU) == together
    assert (len(caches), set(caches)) == (max(LIMITS), {True})
    caches.clear()
    root.layout.takes_documents = False
    assert greedy(root, PROMPTS, (), LIMITS, CPU) == together
    assert (len(caches), set(caches)) == (sum(LIMITS), {False})


def test_the_vocabulary_is_that_of_the_prompts() -> None:
    assert max(max(prompt) for prompt in PROMPTS) < VOCAB
