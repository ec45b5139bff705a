"""Whether an update happens: decided on the device, so that nobody waits for the decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tuner.config.recipe import TrainSection
from tuner.train.step_parts import Overflow


@dataclass(frozen=True)
class GuardLimits:
    """What a guard allows."""

    nonfinite_skips: int = 0
    """Steps that may be not finite."""
    spike_sigmas: float | None = None
    """Standard deviations above the mean at which loss and gradient norm are a spike; None: they are none."""
    window: int = 128
    """Steps whose loss and gradient norm say what is usual (by default those of OLMo-core's skipping optimizer)."""
    most_norm: float | None = None
    """The largest gradient norm of an update that happens; None: any."""

    @staticmethod
    def of(section: TrainSection) -> GuardLimits:
        """Those of a recipe."""
        return GuardLimits(section.nonfinite, section.skip_spikes, section.spike_window, section.skip_above)


class Guard:
    """Judges each step's loss and gradient norm, which are equal on every rank, before its update.

    An update that is not finite is rejected, and so is one whose norm is above ``most_norm``, or whose loss or norm is
    more than ``spike_sigmas`` standard deviations above the mean of the ``window`` steps before it. Once more than
    ``nonfinite_skips`` were not finite the guard is shut: every later update is rejected too, so the host may learn of
    it late and still finds the weights as they were before the bad step. Updates whose gradients overflow because the
    loss is scaled (:mod:`tuner.train.loss_scale`) count among the skipped, not among those that were not finite.
    """

    def __init__(self, device: torch.device, limits: GuardLimits = GuardLimits()) -> None:  # noqa: B008 - frozen
        self._limits = limits
        self._nonfinite = torch.zeros((), dtype=torch.float64, device=device)
        self._skipped = torch.zeros((), dtype=torch.float64, device=device)
        self._recent = torch.zeros((2, limits.window), dtype=torch.float64, device=device)
        self._judged = 0

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What it keeps on the device."""
        return self._nonfinite, self._skipped, self._recent

    def judge(self, values: torch.Tensor, overflow: Overflow | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a step's ``values`` (loss and gradient norm, float64 ``[2]``) into account.

        ``overflow`` is what they say of the scale of the loss, where there is one. Returns two boolean scalars on the
        device: whether this update is rejected, and whether the guard is shut.
        """
        bad = ~values.isfinite().all()
        if overflow is None:
            self._nonfinite += bad
        else:
            self._nonfinite += bad & ~overflow.here
            self._nonfinite.masked_fill_(overflow.at_floor, self._limits.nonfinite_skips + 1.0)  # nor any after it
        shut = self._nonfinite > self._limits.nonfinite_skips
        skip = bad | shut
        if self._limits.most_norm is not None:
            skip = skip | (values[1] > self._limits.most_norm)
        if self._limits.spike_sigmas is not None:
            skip = skip | self._is_spike(values, bad)
        self._skipped += skip
        self._judged += 1
        return skip, shut

    def skip(self) -> None:
        """Count a step that the recipe skips; there is nothing to judge."""
        self._skipped += 1

    def _is_spike(self, values: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        spike = torch.zeros_like(bad)
        if self._judged >= self._limits.window:
            deviation, mean = torch.std_mean(self._recent, dim=1)
            assert self._limits.spike_sigmas is not None
            spike = (values > mean + self._limits.spike_sigmas * deviation).any()
        slot = self._judged % self._limits.window
        self._recent[:, slot] = torch.where(bad, self._recent[:, slot - 1], values)
        return spike

    def as_state(self) -> dict[str, Any]:
        """What a resume needs, as JSON; reads the device."""
        recent = {} if self._limits.spike_sigmas is None else {"recent": self._recent.tolist()}
        counts = {"judged": self._judged, "nonfinite": int(self._nonfinite), "skipped": int(self._skipped)}
        return counts | recent

    def restore(self, state: Mapping[str, Any]) -> int:
        """Take over a saved state; returns how many updates were skipped so far."""
        self._judged = int(state["judged"])
        self._nonfinite.fill_(float(state["nonfinite"]))
        self._skipped.fill_(float(state["skipped"]))
        if "recent" in state:
            self._recent.copy_(torch.tensor(state["recent"], dtype=torch.float64))
        return int(state["skipped"])
