"""How long this process itself computes in the decoder layers, without the waits for others around them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from tuner.runtime.device import DeviceMark, timeline_of


class LayerClock:
    """Seconds in the forward passes of decoder layers.

    The clock of a layer starts when FSDP2 has gathered its weights and stops before it frees them: what other processes
    are waited for is in none. The hooks lie around the layer, where it is compiled or recomputed too, and only within
    :meth:`running`. On CUDA events are recorded, and read when :meth:`seconds` is asked.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        inside = {part for layer in layers for part in layer.modules() if part is not layer}
        self._layers = [layer for layer in layers if layer not in inside]  # Mamba names its mixers, too
        self._timeline = timeline_of(device)
        self._marks: list[DeviceMark] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, forward passes are timed; what was timed before is forgotten."""
        self._marks = []
        with ExitStack() as stack:
            for layer in self._layers:
                stack.callback(layer.register_forward_pre_hook(self._mark).remove)
                stack.callback(layer.register_forward_hook(self._mark, prepend=True).remove)
            yield

    def seconds(self) -> float:
        """The sum over all layers and forward passes; on CUDA waits for the last of them."""
        if self._marks:
            self._marks[-1].wait()
        starts, ends = self._marks[::2], self._marks[1::2]
        return sum(end.seconds_since(start) for start, end in zip(starts, ends, strict=False))

    def _mark(self, *_: Any) -> None:
        self._marks.append(self._timeline.mark())
