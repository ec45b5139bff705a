"""Greedy decoding with a key-value cache, the same on every rank."""

from collections.abc import Sequence

import torch
from transformers import DynamicCache

from tuner.model.root import CausalLM


@torch.no_grad()
def greedy(
    root: CausalLM, prompt_ids: Sequence[int], eos_ids: Sequence[int], max_new_tokens: int, device: torch.device
) -> list[int]:
    """The most likely continuation, token by token, up to an end token (left out) or ``max_new_tokens``.

    Under FSDP2 every rank must call it with the same prompt: the ranks then take the same number of forwards.
    """
    cache = DynamicCache(config=root.model.config)
    ends = set(eos_ids)
    given = torch.tensor(list(prompt_ids), dtype=torch.int64, device=device)
    answer: list[int] = []
    while len(answer) < max_new_tokens:
        token = int(root.next_logits(given, cache).argmax())
        if token in ends:
            break
        answer.append(token)
        given = torch.tensor([token], dtype=torch.int64, device=device)
    return answer
