"""A stand-in for flash attention 4's package, on tensors of the CPU: it refuses what the real one asserts.

Its asserts are those of `_flash_attn_fwd` and `_flash_attn_bwd` in flash-attn-4 4.0.0b36; its numbers are those of the
blocks of products.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from tuner.model import blocked_attention, flash4_attention
from tuner.runtime.device import generation


@dataclass(frozen=True)
class Asked:
    """One launch: forward or backward, what it was told, and whether its sums are to be the same twice."""

    which: str
    bound: int
    longest: int
    window: int
    widths: tuple[int, int]
    cap: float
    has_sink: bool = False
    deterministic: bool = False


@dataclass
class StandIn:
    """The module; what it gives is off by a factor, or an error is raised."""

    launches: list[Asked] = field(default_factory=list)
    factor: float = 1.0
    problem: str | None = None

    def _flash_attn_fwd(  # noqa: PLR0913, PLR0917 - as it is
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softcap: float | None,
        learnable_sink: torch.Tensor | None, return_lse: bool, **asked: Any,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        window, bounds, longest = self._checked(q, k, v, asked)
        assert return_lse and softcap != 0
        if learnable_sink is not None:
            assert learnable_sink.shape == (q.shape[1],) and learnable_sink.is_contiguous()
            assert generation(None) != 12, "Learnable sink is not supported in this kernel"
        where = (asked["max_seqlen_q"], longest, window, (q.shape[2], v.shape[2]))
        self.launches.append(Asked("forward", *where, softcap or 0.0, has_sink=learnable_sink is not None))
        if self.problem is not None:
            raise RuntimeError(self.problem)
        sink = torch.full((q.shape[1],), -torch.inf) if learnable_sink is None else learnable_sink
        heads = [tensor.transpose(0, 1) for tensor in (q, k, v)]
        given = (*heads, bounds, window, asked["softmax_scale"], softcap or 0.0, sink)
        output, normaliser = blocked_attention.attend_with_sinks(*given)
        return output * self.factor, normaliser, None, None, None

    def _flash_attn_bwd(  # noqa: PLR0913, PLR0917
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, dout: torch.Tensor,
        lse: torch.Tensor, *, softcap: float, deterministic: bool, **asked: Any,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        window, bounds, longest = self._checked(q, k, v, asked)
        major, (_, heads, width), value_width = generation(None), q.shape, v.shape[2]
        assert out.shape == dout.shape == (len(q), heads, value_width) and lse.shape == (heads, len(q))
        assert lse.dtype == torch.float32 and dout.is_contiguous() and out.stride(-1) == 1
        assert heads == k.shape[1] or width == value_width, "GQA backward requires head_dim == head_dim_v"
        assert not (major == 12 and deterministic), "deterministic backward not supported on SM 12.0"
        of_256 = major in (10, 11) and width == 256
        assert not (of_256 and (softcap or window)), "head_dim=256 supports neither softcap nor local attention"
        where = (asked["max_seqlen_q"], longest, window, (width, value_width))
        self.launches.append(Asked("backward", *where, softcap, deterministic=deterministic))
        given = [tensor.transpose(0, 1) for tensor in (q, k, v)]
        grads = blocked_attention._backward(dout, *given, bounds, window, asked["softmax_scale"], softcap, lse)
        return tuple(grad.transpose(0, 1).contiguous() for grad in grads)

    @staticmethod
    def _checked(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: dict[str, Any]
    ) -> tuple[int, torch.Tensor, int]:
        """Tokens that a query sees (0: all), the bounds, and the longest document."""
        major, bounds, widths = generation(None), asked["cu_seqlens_q"], (query.shape[2], value.shape[2])
        assert query.dtype == key.dtype == value.dtype and query.dtype in (torch.bfloat16, torch.float16)
        assert key.shape == (len(query), key.shape[1], widths[0]) and value.shape[:2] == key.shape[:2]
        assert all(tensor.stride(-1) == 1 for tensor in (query, key, value)) and query.shape[1] % key.shape[1] == 0
        small = all(8 <= width <= 128 and width % 8 == 0 for width in widths)
        if major == 9:
            assert all(8 <= width <= 256 and width % 8 == 0 for width in widths), widths
        else:
            assert major in (10, 11, 12) and (small or (major != 12 and widths in ((192, 128), (256, 256)))), widths
        assert bounds is asked["cu_seqlens_k"] and bounds.dtype == torch.int32
        longest, bound = int(bounds.diff().max()), asked["max_seqlen_q"]
        assert type(bound) is int and bound == asked["max_seqlen_k"] and bound >= longest
        left, right = asked["window_size_left"], asked["window_size_right"]
        assert asked["causal"] and right == (None if left is None else 0)
        return (0 if left is None else left + 1), bounds, longest


@contextmanager
def flash4_stand_in(is_taken: bool = True) -> Iterator[StandIn]:
    """Within, the package is there, and with `is_taken` attention is computed by it where it takes the heads."""
    found, before = StandIn(), flash4_attention.is_taken()
    with patch.object(flash4_attention, "_package", lambda: found):
        try:
            flash4_attention.take(is_taken)
            yield found
        finally:
            flash4_attention.take(before)
