"""What a unit of FSDP2 gathers in bfloat16, or float16: the weights that autocast would round to it anyway.

Autocast multiplies by a float32 weight rounded to bfloat16; whether it is rounded before it is sent or after changes no
bit of a loss, and halves what is sent and what is gathered. Its gradient is bfloat16 in both cases, as it leaves the
product, and is added up over processes and micro-batches in float32. bf16 so has one meaning at every world size; fp16
has too, and fp8, which rounds further what bf16 has rounded.

The rule: a decoder layer gathers the float32 weights of its linear layers in bfloat16. What autocast leaves in float32
(norms, biases that are read elsewhere, the states of recurrent layers) is never rounded: it is small, so every process
keeps it whole. A layer in which it is not small, such as one whose experts are multiplied without autocast, gathers all
of its weights in float32. So does every layer with an adapter, whose large weights are bfloat16 on every process
already, and whose own ones are dropped out in the type of its weights.
"""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tuner.parallel.layouts import along
from tuner.parallel.mesh import inner_axes
from tuner.runtime.parts import cuts_of, local, part_at

SMALL = 1 << 18
"""Elements of a parameter that every process may keep whole: a mebibyte in float32."""

_MULTIPLIED = ("Linear", "Conv1D")
"""Types of module that do nothing with their weight but multiply by it. Subclasses may do more."""


def policy(dtype: torch.dtype, reduced_in: torch.dtype | None = None) -> MixedPrecisionPolicy:
    """Gathered in ``dtype``, reduced in float32 unless in another type; autocast takes care of everything else."""
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced_in or torch.float32, cast_forward_inputs=False)


def rounded_weights(unit: nn.Module) -> set[nn.Parameter]:
    """The weights of a unit that autocast rounds in every use; none where something else of it is large."""
    found = set(_multiplied(unit.modules()))
    rest = [parameter for parameter in unit.parameters() if parameter not in found]
    return set() if any(local(parameter.detach()).numel() > SMALL for parameter in rest) else found


def _multiplied(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    whole = list(modules)
    read = {id(layer) for owner in whole if _reads_weights(owner) for layer in owner.children()}
    for module in whole:
        weight = getattr(module, "weight", None)
        if id(module) in read or type(module).__name__ not in _MULTIPLIED:
            continue
        if isinstance(weight, nn.Parameter) and weight.dtype == torch.float32:
            yield weight


def _reads_weights(owner: nn.Module) -> bool:
    """Whether a module's forward reads the weight of a layer in it, to do more than multiply.

    LongCat's router multiplies by it in float32, without autocast.
    """
    forward = inspect.unwrap(type(owner).forward)
    return "weight" in getattr(getattr(forward, "__code__", None), "co_names", ())


@contextmanager
def as_trained(root: nn.Module) -> Iterator[None]:
    """Within, units compute with their weights as they are trained, in float32; for forward passes without autocast.

    Each gathers its own for the length of its forward. Collective wherever the model runs.
    """
    with ExitStack() as stack:
        for unit in (module for module in root.modules() if isinstance(module, FSDPModule)):
            unit.reshard()
            stack.callback(unit.register_forward_pre_hook(_Widened(unit)).remove)
            stack.callback(unit.register_forward_hook(lambda unit, *_: unit.reshard()).remove)
        yield


class _Widened:
    """Puts the weights of a unit as they are trained in the place of those that it has gathered in another type."""

    def __init__(self, unit: nn.Module) -> None:
        self._own = [
            (module, name, parameter)
            for module in unit.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if isinstance(parameter, DTensor)
        ]

    def __call__(self, unit: nn.Module, inputs: object) -> None:
        for module, name, sharded in self._own:
            gathered = getattr(module, name)
            if gathered.dtype != sharded.dtype:  # whose shard may lie in the host's memory
                whole = _unsharded(sharded).to(gathered.device)
                setattr(module, name, nn.Parameter(whole, requires_grad=False))


def _unsharded(sharded: DTensor) -> torch.Tensor:
    """What FSDP2 gathers of a parameter, in its own type: all of it, or of what a tensor group splits this part."""
    mesh, cuts, part = sharded.device_mesh, cuts_of(sharded), sharded.to_local().detach()
    inner, names = inner_axes(mesh), mesh.mesh_dim_names or ()
    place = mesh.get_coordinate()
    assert place is not None, "every process of a run is in the meshes of its own tensors"
    shape, sizes = tuple(sharded.shape), tuple(mesh.size(axis) for axis in inner)
    own = part_at(shape, sizes, tuple(cuts[axis] for axis in inner), tuple(place[axis] for axis in inner))
    for axis, cut in enumerate(cuts):
        if cut is not None and axis not in inner:
            part = along(part, cut.dim, own.shape[cut.dim], mesh.get_group(axis))
    if not inner:
        return part
    split = mesh[tuple(names[axis] for axis in inner)]
    placements = [sharded.placements[axis] for axis in inner]
    return DTensor.from_local(part, split, placements, run_check=False, shape=sharded.shape, stride=sharded.stride())
