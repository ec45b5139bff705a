"""What is allocated on the host is there for those who count it, and nobody else."""

import torch

from tuner.runtime import host


def test_who_observes_sees_what_is_kept_on_the_host() -> None:
    seen: list[tuple[int, str]] = []
    with host.observed(lambda tensor, part: seen.append((tensor.nbytes, part))):
        kept = host.host_empty((2, 3), torch.bfloat16, "optimizer", torch.device("cpu"))
        host.entered(torch.empty(5), "activations")
    host.entered(torch.empty(7), "activations")
    assert kept.shape == (2, 3) and kept.dtype is torch.bfloat16 and not kept.is_pinned()
    assert seen == [(12, "optimizer"), (20, "activations")]
