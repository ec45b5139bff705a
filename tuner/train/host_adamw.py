"""AdamW whose moments lie in the host's memory, where the update is computed as well, bucket by bucket."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch.optim.adamw import adamw

from tuner.runtime import host
from tuner.runtime.host import page_lock
from tuner.train.moments import AVERAGES, FlaggedOptimizer

# Copies between a device and a few buffers of the host's memory, each way on a stream of its own.

Copies: TypeAlias = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""What to write, and what to read for it."""


@dataclass
class Slot:
    """Buffers of the host that one bucket of parameters after the other passes through, flat.

    ``fetched`` is recorded after the newest copies from the device, ``returned`` after the newest ones back to it.
    """

    gradients: torch.Tensor
    weights: torch.Tensor
    fetched: torch.cuda.Event | None = None
    returned: torch.cuda.Event | None = None


class HostLink:
    """The way of a device's tensors to the host and back: on CUDA both ways at once, on a CPU copy after copy.

    In a turn, which begins with :meth:`begin` and ends with :meth:`end`, the host may touch a slot between :meth:`wait`
    and :meth:`give_back` alone. Where the system refuses to page-lock the buffers, they stay as they are, and
    ``problem`` says so.
    """

    def __init__(self, device: torch.device, count: int, elements: int, dtype: torch.dtype) -> None:
        self._device = device
        self._down: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._up: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.problem: str | None = None
        """Why copies wait for the host's work where they should not."""
        self.slots = [Slot(self._buffer(elements, dtype), self._buffer(elements, dtype)) for _ in range(count)]

    def begin(self) -> None:
        """What is fetched from now on is as it is after all that was queued on the device until now."""
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(self._device))

    def fetch(self, slot: Slot, copies: Copies) -> None:
        """Copy from the device into a slot, once what the slot holds has been copied out of it."""
        slot.fetched = _queued(self._down, copies, after=slot.returned)

    def wait(self, slot: Slot) -> None:
        """Return once a slot holds what was fetched for it. The host waits."""
        if slot.fetched is not None:
            slot.fetched.synchronize()

    def give_back(self, slot: Slot, copies: Copies) -> None:
        """Copy out of a slot to the device: what is there has been fetched before, and nobody there uses it."""
        slot.returned = _queued(self._up, copies)

    def end(self) -> None:
        """What is queued on the device from now on sees all that was given back."""
        if self._up is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._up)

    def _buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        block = torch.empty(elements, dtype=dtype)
        host.entered(block, "optimizer")
        if self._device.type != "cuda" or not elements:
            return block
        if code := page_lock(block, self._device):
            self.problem = (
                f"CUDA cannot page-lock {block.nbytes:,} bytes of host memory (error {code}): the optimizer's copies "
                "wait for its update; raise the limit (ulimit -l, or the container's)"
            )
        else:  # before its memory is somebody else's
            weakref.finalize(block, torch.cuda.cudart().cudaHostUnregister, block.data_ptr()).atexit = False
        return block


def _queued(
    stream: torch.cuda.Stream | None, copies: Copies, after: torch.cuda.Event | None = None
) -> torch.cuda.Event | None:
    """Queue copies on a stream, and an event that comes after them; made at once where there is no stream."""
    if stream is None:
        for to, source in copies:
            copy(to, source)
        return None
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        for to, source in copies:
            copy(to, source)
    event = torch.cuda.Event()
    event.record(stream)
    return event


def copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy between host and device on the current stream; on a CPU it is made at once."""
    to.copy_(source, non_blocking=True)


BUCKET = 1 << 23
"""Elements that are updated together: 32 MiB of gradients in float32."""
SLOTS = 3
"""Buckets on their way: one arrives, one is updated, one returns."""
UNIT = 16
"""Parameters are cut at multiples of it: torch's kernel computes whole vectors of up to so many elements alike, and
those that are left at a parameter's end one by one, which may round otherwise."""
STATE_BYTES, DOWN_BYTES, UP_BYTES = 8, 8, 4
"""Of a parameter in float32: two moments on the host; in each step gradient and weight to the host, and weight back."""


@dataclass(frozen=True)
class StatePiece:
    """Elements ``start`` to ``end`` of a parameter, at ``at`` in the buffers of its bucket."""

    parameter: torch.Tensor
    group: dict[str, Any]
    start: int
    end: int
    at: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of the parameter, of its gradient, or of a moment; in whatever order the parameter lies."""
        return flat(tensor)[self.start : self.end]

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """The place of these elements in a buffer."""
        return buffer[self.at : self.at + self.end - self.start]


class HostAdamW(FlaggedOptimizer):
    """AdamW (Loshchilov & Hutter 2019): torch's fused kernel of the CPU over tensors that are a device's.

    The device holds weights and gradients, the host both moments: 8 bytes a parameter in float32. In a step gradients
    and weights come to the host through page-locked buffers of bounded size, are updated there, and weights return;
    the copies of other buckets run during the update of one. The result is that of ``torch.optim.AdamW(fused=True)``
    on a CPU, bit for bit, wherever the parameters are cut into buckets. ``found_inf`` and ``grad_scale`` are honoured
    as torch's fused optimizers do, but the host reads them, once a step, before it changes anything: by then it must
    wait for the gradients anyway, and the device has nothing queued while the update is computed.
    """

    def __init__(
        self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float, bucket: int | None = None
    ) -> None:
        super().__init__(groups)
        self._betas, self._eps = betas, eps
        for parameter in self.parameters:
            state = {"step": torch.empty((), dtype=torch.float32)}
            state |= {moment: _like(parameter) for moment in AVERAGES}
            for tensor in state.values():
                host.entered(tensor.zero_(), "optimizer")  # every page of it is there at once
            self.state[parameter] = state
        self._buckets = buckets(self.param_groups, bucket or BUCKET)
        elements = max((found[-1].at + found[-1].end - found[-1].start for found in self._buckets), default=0)
        self._link = HostLink(device_of(self.parameters), min(SLOTS, len(self._buckets)), elements, torch.float32)

    @property
    def problem(self) -> str | None:
        """Why the copies wait for the update where they should not."""
        return self._link.problem

    @property
    def buffers(self) -> list[torch.Tensor]:
        """What it keeps in the host's memory besides its states."""
        return [buffer for slot in self._link.slots for buffer in (slot.gradients, slot.weights)]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; no closure. The host waits for all gradients, and not for the last weights to return."""
        divisor = self._divisor()
        if divisor == 0.0:
            return
        scale = None if self.grad_scale is None else torch.tensor(divisor)
        # Each lies as its parameter does; queued before anything is fetched.
        there = {p: p.grad for p in self.parameters if p.grad is not None}
        gradients = {p: g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for p, g in there.items()}
        given = [[piece for piece in bucket if piece.parameter in gradients] for bucket in self._buckets]
        turns = [(pieces, self._link.slots[n % SLOTS]) for n, pieces in enumerate(filter(None, given))]
        self._link.begin()
        for pieces, slot in turns[: SLOTS - 1]:
            self._fetch(pieces, slot, gradients)
        for number, (pieces, slot) in enumerate(turns):
            for later, free in turns[number + SLOTS - 1 : number + SLOTS]:
                self._fetch(later, free, gradients)
            self._link.wait(slot)
            self._update(pieces, slot, scale)
            self._link.give_back(slot, [(piece.of(piece.parameter), piece.within(slot.weights)) for piece in pieces])
        self._link.end()
        for parameter in gradients:
            self.state[parameter]["step"] += 1

    def _divisor(self) -> float:
        """What gradients are divided by, 0 for a step that is left out: the one thing that the host reads."""
        if self.found_inf is None:
            return 1.0 if self.grad_scale is None else float(self.grad_scale)
        divisor = torch.ones_like(self.found_inf) if self.grad_scale is None else self.grad_scale
        return float(torch.where(self.found_inf > 0, 0.0, divisor))

    def _fetch(self, pieces: Sequence[StatePiece], slot: Slot, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        of_gradients = [(piece.within(slot.gradients), piece.of(gradients[piece.parameter])) for piece in pieces]
        of_weights = [(piece.within(slot.weights), piece.of(piece.parameter)) for piece in pieces]
        self._link.fetch(slot, [*of_gradients, *of_weights])

    def _update(self, pieces: Sequence[StatePiece], slot: Slot, scale: torch.Tensor | None) -> None:
        for _, found in groupby(pieces, key=lambda piece: id(piece.group)):
            own = list(found)
            states, group = [self.state[piece.parameter] for piece in own], own[0].group
            adamw(
                [piece.within(slot.weights) for piece in own],
                [piece.within(slot.gradients) for piece in own],
                [piece.of(state["exp_avg"]) for piece, state in zip(own, states, strict=True)],
                [piece.of(state["exp_avg_sq"]) for piece, state in zip(own, states, strict=True)],
                [],
                [state["step"].clone() for state in states],  # counted up there, for each piece of a parameter
                fused=True, grad_scale=scale, amsgrad=False, maximize=False, beta1=self._betas[0],
                beta2=self._betas[1], lr=group["lr"], weight_decay=group["weight_decay"], eps=self._eps,
            )


def buckets(groups: Iterable[dict[str, Any]], limit: int) -> list[list[StatePiece]]:
    """Parameters in their order, in buckets of up to ``limit`` elements; larger ones are cut."""
    limit = max(UNIT, limit // UNIT * UNIT)
    found: list[list[StatePiece]] = []
    at = limit
    for group in groups:
        for parameter in group["params"]:
            start, size = 0, parameter.numel()
            while start < size:
                if at + UNIT > limit:
                    found.append([])
                    at = 0
                end = min(size, start + limit - at)
                found[-1].append(StatePiece(parameter, group, start, end, at))
                at += -(-(end - start) // UNIT) * UNIT
                start = end
    return found


def buffer_bytes(elements: int) -> int:
    """Bytes of the buffers through which so many elements of parameters pass, at most."""
    return min(SLOTS * BUCKET, elements + UNIT * SLOTS) * 2 * 4


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in the order in which they lie in memory, ``[elements]``, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


def device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """Where the parameters lie."""
    return parameters[0].device if parameters else torch.device("cpu")


def _like(parameter: torch.Tensor) -> torch.Tensor:
    """A moment of a parameter in the host's memory, lying as the parameter does."""
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
