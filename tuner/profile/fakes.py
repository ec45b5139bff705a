"""What `train` builds, on fake tensors: shapes and types as in training, for any device, in no memory.

Fakes lie on the CPU, since torch without CUDA has no backward pass for others; for CUDA, kernels are chosen as there.
Those of Triton and those compiled for this processor do nothing: what they would write to is there already. The one
place where a trace changes what it traces.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tuner.model import offload, output_layer, tiles, triton_attention
from tuner.model.quantize import linear
from tuner.parallel import expert
from tuner.parallel.fsdp import is_whole_along
from tuner.runtime import host, torch_private
from tuner.runtime.device import HOPPER, traced_for

TILES = 3
"""Tiles that are traced, with the last: the second begins while the first is there, the third finds its memory."""


def give_storage(root: nn.Module, device: torch.device) -> None:
    """Put tensors on ``device`` in the place of those on the meta device; tied ones stay one."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def like(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in made:
            fresh = torch.empty_like(tensor, device=device)
            made[tensor] = (
                nn.Parameter(fresh, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
            )
        return made[tensor]

    for module in root.modules():
        for kept in (module._parameters, module._buffers):
            for name, tensor in kept.items():
                if tensor is not None:
                    kept[name] = like(tensor)  # type: ignore[assignment]  # a parameter for a parameter


class _Quiet:
    """The compiled library, whose functions do nothing; those that say how much scratch space they take still do."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name) if name.endswith("_scratch") else lambda *args: 0


@contextmanager
def quiet_kernels() -> Iterator[None]:
    """Within, the kernels that are compiled for this processor do not run: fakes have no memory to work on."""
    users = [module for name, module in sys.modules.items() if name.startswith("tuner.model.native.")]
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        for module in users:
            if callable(plain := getattr(module, "library", None)):
                stack.enter_context(patch.object(module, "library", lambda plain=plain: _Quiet(plain())))
        yield


def balanced_experts(size: int) -> AbstractContextManager[object]:
    """Within, tokens go to the experts of all processes of a group evenly: fakes have no numbers to count."""
    def split_sizes(sent: torch.Tensor, received: torch.Tensor, choices: int) -> tuple[list[int], list[int]]:
        each = [choices // size + (rank < choices % size) for rank in range(size)]
        return each, list(each)

    return patch.object(expert, "split_sizes", split_sizes)


def few_tiles(standing_for: Callable[[int], None]) -> AbstractContextManager[object]:
    """Within, of the tiles of a row the first few and the last are computed: those between are like them.

    ``standing_for`` is called before each of them with the number of tiles in whose place it is traced.
    """
    every = output_layer.spans

    def some(count: int, size: int) -> Iterator[slice]:
        between = max(0, -(-count // size) - TILES - 1)
        try:
            for number, span in enumerate(every(count, size)):
                if TILES <= number < TILES + between:
                    continue
                standing_for(1 + between * (number == TILES - 1))
                yield span
        finally:  # computing a layer again may stop anywhere
            standing_for(1)

    return patch.object(tiles, "spans", some)


def few_weight_tiles() -> AbstractContextManager[object]:
    """Within, of the tiles of a quantised weight the first few, of which one is the largest, and the last are made."""
    every = linear.tiles

    def some(length: int, bytes_each: int, device: str) -> list[tuple[int, int]]:
        found = every(length, bytes_each, device)
        return [*found[:TILES], *found[TILES:][-1:]]

    return patch.object(linear, "tiles", some)


def enter_shards(tensors: Iterable[torch.Tensor], part: host.HostPart = "parameters") -> None:
    """Count to the host's memory what of tensors is a shard of FSDP2's, where these lie there."""
    for tensor in tensors:
        if not is_whole_along(tensor):
            host.entered(tensor, part)


def shards_copied() -> AbstractContextManager[None]:
    """Within, shards on the host are copied to where they are gathered, and their gradients come back to the host."""

    def brought_back(gradient: torch.Tensor) -> torch.Tensor:
        host.entered(back := gradient.clone(), "gradients")
        return back

    return torch_private.moved_shards(torch.clone, brought_back)


def inputs_not_copied() -> AbstractContextManager[object]:
    """Within, inputs on their way to the host and back have their memory at both ends, and no bytes are copied."""
    return patch.object(offload, "block_pairs", lambda place: iter(()))


class Properties:
    """What kernels ask of a device to choose their sizes; the numbers of an H100."""

    name = "stand-in"
    major, minor = 9, 0
    multi_processor_count = 132


@contextmanager
def cuda_stand_in(memory_bytes: int | None = None, *, generation: int = HOPPER) -> Iterator[None]:
    """Within, kernels and their sizes are chosen as on such a GPU of so much memory, and no Triton kernel runs."""
    answers: dict[str, Any] = {
        "get_device_capability": lambda device=None: (Properties.major, Properties.minor),
        "get_device_properties": lambda device=None: Properties,
    }
    with ExitStack() as stack:
        stack.enter_context(traced_for("cuda", memory_bytes, generation=generation))
        stack.enter_context(patch.object(triton_attention, "launch", lambda *args, **kwargs: None))
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(_no_kernels())
        yield


@contextmanager
def unchanged_modules(root: nn.Module) -> Iterator[None]:
    """Afterwards, the modules that define the model's classes are what they were: liger's patches reach all of them."""
    names = {type(module).__module__ for module in root.modules()}
    before = {name: dict(vars(sys.modules[name])) for name in names if name.startswith("transformers.")}
    try:
        yield
    finally:
        for name, values in before.items():
            vars(sys.modules[name]).update(values)


@contextmanager
def _no_kernels() -> Iterator[None]:
    try:
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    with ExitStack() as stack:
        for kind in (JITFunction, Autotuner):  # the latter tries each of its settings on the device first
            stack.enter_context(patch.object(kind, "run", lambda *args, **kwargs: None))
        yield
