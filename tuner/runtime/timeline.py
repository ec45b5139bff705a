"""Moments on the timeline of the device that computes; a CUDA device runs behind the host, which queues its work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Moment(Protocol):
    """When the device has done what was queued before."""

    def wait(self) -> None:
        """Return once the device has got there."""

    def seconds_since(self, earlier: Moment) -> float:
        """Seconds between two moments of one timeline, both of which the device has reached."""


class Timeline(Protocol):
    """The time of one device, and of the host beside it."""

    @property
    def is_behind(self) -> bool:
        """Whether the device runs behind the host, so that reading what it computes may be a wait."""

    def now(self) -> float:
        """The host's time, in seconds of a monotonic clock."""

    def mark(self) -> Moment:
        """The moment at which the device will have done all that is queued by now. Nothing waits."""


class _HostMoment:
    def __init__(self) -> None:
        self.at = time.monotonic()

    def wait(self) -> None:
        """It is now, or was."""

    def seconds_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, _HostMoment)
        return self.at - earlier.at


class _CudaMoment:
    def __init__(self) -> None:
        import torch

        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, _CudaMoment)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class _DeviceTimeline:
    def __init__(self, is_behind: bool) -> None:
        self.is_behind = is_behind

    def now(self) -> float:
        return time.monotonic()

    def mark(self) -> Moment:
        return _CudaMoment() if self.is_behind else _HostMoment()


def of(device: torch.device) -> Timeline:
    """The timeline of a device; a CPU's is the host's own."""
    return _DeviceTimeline(device.type == "cuda")
