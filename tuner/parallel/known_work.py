"""Work whose result is known: what a device computes and what collectives carry, checked against it.

A device that computes wrongly without an error, or a link that loses bits, shows in no loss for a long time (Dixit et
al. 2021, https://arxiv.org/abs/2102.11245). Products of the numbers -1, 0 and 1 are small integers, exact in every type
of a training and in any order of additions: each device is held to the very result, not to what others found. A product
of drawn numbers uses all bits; it has to be what the device itself computed first.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from tuner.parallel.lookup import gather_parts, reduce_scatter_parts
from tuner.runtime.process import Collective

_SIDE = {"cuda": 1024}
_SIDE_ELSEWHERE = 256
_NUMBERS = 4096
"""Elements that each process sends in a collective."""


class KnownProducts:
    """Two products of matrices ``[n, n]`` and their sums over rows, under the autocast of a training.

    Made once, when the drawn one is computed for the first time.
    """

    def __init__(self, device: torch.device, autocast: Callable[[], AbstractContextManager[object]]) -> None:
        self._autocast = autocast
        side = _SIDE.get(device.type, _SIDE_ELSEWHERE)
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randint(-1, 2, (side, side), generator=generator).float() for _ in range(2)]
        drawn = [torch.randn(side, side, generator=generator) for _ in range(2)]
        self._expected = (whole[0].double() @ whole[1].double()).to(device)
        self._whole, self._drawn = ([one.to(device) for one in pair] for pair in (whole, drawn))
        self._first = self._of_drawn()

    @torch.no_grad()
    def problem(self) -> str | None:
        """What is wrong with what this device computes now; None where nothing is. Waits for the device."""
        with self._autocast():
            product = self._whole[0] @ self._whole[1]
        wrong = product.double() != self._expected
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            got, right = float(product[row, column]), float(self._expected[row, column])
            return f"a product of matrices is wrong: {got:g} in place of {right:g} at [{row}, {column}]"
        sums = product.sum(0, dtype=torch.float32)
        if not torch.equal(sums.double(), self._expected.sum(0)):
            return "a sum over rows is wrong"
        if not torch.equal(self._of_drawn(), self._first):
            return "a product of matrices is not what it was when the launch began"
        return None

    @torch.no_grad()
    def _of_drawn(self) -> torch.Tensor:
        with self._autocast():
            return self._drawn[0] @ self._drawn[1]


@torch.no_grad()
def wrong_collective(device: torch.device, ranks: Collective) -> str | None:
    """What this process found wrong in collectives of known numbers over all processes. Collective.

    Sums of integers below 2^24, exact in float32; what is gathered says who sent it.
    """
    if ranks.group is None:
        return None
    size, rank = ranks.size, ranks.rank
    numbers = torch.arange(_NUMBERS, dtype=torch.float32, device=device) % 251
    total = numbers * size + size * (size - 1) / 2
    summed, gathered, own = numbers + rank, numbers.new_empty(size, _NUMBERS), numbers.new_empty(1, _NUMBERS)
    # All of them before any is judged: the others take part whatever this process finds.
    dist.all_reduce(summed)
    gather_parts(gathered, (numbers + rank)[None].contiguous(), None)
    reduce_scatter_parts(own, (numbers + rank).expand(size, -1).contiguous(), None)
    if not torch.equal(summed, total):
        return "an all-reduce of known numbers gave others"
    expected = numbers + torch.arange(size, device=device)[:, None]
    if wrong := (gathered != expected).any(1).nonzero().flatten().tolist():
        return f"an all-gather brought other numbers than rank {wrong[0]} sent"
    return None if torch.equal(own[0], total) else "a reduce-scatter of known numbers gave others"
