"""Which kernel turns logits into loss and gradient the fastest on a GPU: measured on a chunk of the model's logits."""

import torch

from tuner.model.fastest import Candidate, Fastest, fastest, seconds_on
from tuner.model.kernels import KERNELS
from tuner.model.output_layer import positions_of_chunk
from tuner.runtime.device import gpu_memory

USUAL = "liger"
TRIED = 64
"""Positions whose loss and gradient are held to the usual kernel's."""
ALLOWED = 1e-2
"""How far they may be from these, relative: twice what rounding to bf16 makes of a gradient."""


def fastest_loss(vocabulary: int, device: torch.device) -> Fastest:
    """The fastest kernel for logits of so many tokens of a vocabulary in bf16; liger's unless another one is faster."""
    generator = torch.Generator(device).manual_seed(0)
    memory = gpu_memory(torch.empty(0, device=device))
    chunk = torch.empty(0, device=device, dtype=torch.bfloat16)
    count = max(TRIED, positions_of_chunk(vocabulary, chunk, memory))
    logits = torch.randn(count, vocabulary, generator=generator, device=device, dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, (count,), generator=generator, device=device)
    first = logits[:TRIED].clone()  # logits become their gradient, as soon as one kernel is timed

    def candidate(name: str) -> Candidate:
        def results() -> list[torch.Tensor]:
            few = first.clone()
            return [KERNELS[name](few, targets[:TRIED], True, None), few]

        return Candidate(name, results, lambda: KERNELS[name](logits, targets, True, None))

    return fastest(candidate(USUAL), [candidate("torch")], ALLOWED, seconds_on(device))
