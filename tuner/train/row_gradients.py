"""The gradients by rows of a step, over all processes: they agree on which rows there are, and add up what each has."""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tuner.model.touched_rows import TouchedRows
from tuner.parallel.mesh import Mesh
from tuner.runtime.device import to_device
from tuner.train.step_parts import StepForwards, StepPart


class RowGradients(StepPart):
    """Of embeddings by their parameters' names. A parameter that is here has no gradient of its own."""

    def __init__(self, touched: Mapping[str, TouchedRows], mesh: Mesh, device: torch.device) -> None:
        self._touched, self._mesh, self._device = dict(touched), mesh, device

    def owns(self, name: str) -> bool:
        """Of each embedding that is here."""
        return name in self._touched

    def before_forward(self, step: StepForwards) -> None:
        """Begin a step in which this process looks up the tokens of its batches."""
        self.begin(batch.input_ids for batch in step.batches.micro)

    def begin(self, input_ids: Iterable[npt.NDArray[np.int64]]) -> None:
        """Begin a step in which this process looks up these tokens. Collective where there are several processes.

        Raises ValueError for more of them than there is room for.
        """
        ids = np.concatenate([part.reshape(-1) for part in input_ids])
        for touched in self._touched.values():
            if len(ids) * self._mesh.data_size > touched.most:
                room = touched.most // self._mesh.data_size
                raise ValueError(f"{len(ids)} tokens are looked up in a step, and there is room for {room}")
            mask = np.zeros(touched.embedding.num_embeddings, dtype=np.uint8)
            mask[ids] = 1
            if (padding := touched.embedding.padding_idx) is not None:
                mask[padding] = 0  # its gradient is none's
            present = to_device(mask, self._device)
            if self._mesh.size > 1:
                dist.all_reduce(present, op=dist.ReduceOp.MAX)
            touched.begin(present)

    @torch.no_grad()
    def after_backward(self) -> None:
        """Add up what processes have of the same rows, once a step's backward passes are done. Collective.

        Those that hold other rows of one copy have added up all processes' gradients of them already.
        """
        if self._mesh.size == 1:
            return
        for touched in self._touched.values():
            gradient, weight = _gradient(touched), touched.embedding.weight
            if not isinstance(weight, DTensor):
                dist.all_reduce(gradient)
            elif weight.device_mesh.ndim > 1:
                dist.all_reduce(gradient, group=weight.device_mesh.get_group(0))

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients ``[room, D]`` of what the step touches, each row once; they lie as their parameters do."""
        return {name: _as_weight(touched) for name, touched in self._touched.items() if touched.rows is not None}

    def gradient_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Also what says which rows the gradients are of."""
        indices = ((name, index) for name, touched in self._touched.items() for index in touched.indices)
        return [*super().gradient_tensors(), *indices]


def _gradient(touched: TouchedRows) -> torch.Tensor:
    """The gradient by rows; zeros where no backward pass of this process got there."""
    if touched.gradient is None:
        weight = touched.embedding.weight
        touched.gradient = weight.new_zeros(touched.room, weight.shape[1], requires_grad=False)
    return touched.gradient


def _as_weight(touched: TouchedRows) -> torch.Tensor:
    gradient, weight = _gradient(touched), touched.embedding.weight
    if not isinstance(weight, DTensor):
        return gradient
    return DTensor.from_local(gradient, weight.device_mesh, weight.placements, run_check=False)
