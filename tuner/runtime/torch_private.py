"""Every private name of torch that this package uses, each looked up when it is used.

Where torch lost one, what needs it says so; training needs none: it has a public way beside each. A contract test finds
private names of torch anywhere else.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tuner.errors import MachineError


@dataclass(frozen=True)
class Need:
    """What a private name is for: what needs it, and what works without."""

    by: str
    still_works: str


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_NEEDS = {key: Need(row["by"], row["still_works"]) for key, row in _TABLE.items()}
_PREDICTION = _NEEDS["prediction"]
NAMES = {name: (path, _NEEDS[key]) for key, row in _TABLE.items() for name, path in row.get("names", {}).items()}
"""By the name here: where torch has it, what needs it, and what works without."""


@cache
def private_name(path: str, need: Need) -> Any:
    """What a library has under a dotted path. Raises MachineError where it has no such name (any more)."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _gone(path, need) from error


def listed_name(names: Mapping[str, tuple[str, Need]], name: str) -> Any:
    """What a library has under a name of such a table. Raises AttributeError for others, MachineError if it is gone."""
    if name not in names:
        raise AttributeError(name)
    path, need = names[name]
    return private_name(path, need)


def private_attribute(owner: Any, name: str, need: Need) -> Any:
    """An attribute of a library's object or class. Raises MachineError where it has it no more."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        kind = owner if isinstance(owner, type) else type(owner)
        raise _gone(f"{kind.__module__}.{kind.__qualname__}.{name}", need) from error


def _gone(path: str, need: Need) -> MachineError:
    library = path.partition(".")[0]
    said = f"{library} {version(library)} has no {path}, which {need.by} needs; {need.still_works}"
    return MachineError(said, hint=f"install a tested version of {library}: docs/versions.md")


def __getattr__(name: str) -> Any:
    """One of ``NAMES``. Raises MachineError where this torch has it no more."""
    return listed_name(NAMES, name)


def storage_key(storage: torch.UntypedStorage) -> int:
    """What tells one living storage from another; it may be given again after the storage's end."""
    return int(private_attribute(storage, "_cdata", _PREDICTION))


def changes_in_place(tensor: torch.Tensor) -> int:
    """How often a tensor's numbers were changed in place."""
    return int(private_attribute(tensor, "_version", _PREDICTION))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor itself, or this process's shard of it, with no operation of its own."""
    shard: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def node_number(node: Any) -> int:
    """The number that autograd gave to one of its nodes, in the order of the forward pass."""
    return int(private_attribute(node, "_sequence_nr", _PREDICTION)())


def fsdp_groups(unit: Any) -> list[Any]:
    """The groups of parameters that a unit of FSDP2 gathers, of which each says where they lie after a forward.

    What is set there (``post_forward_mesh_info``) can be written by `set_reshard_after_forward`, and read nowhere else.
    """
    state = private_attribute(unit, "_get_fsdp_state", _NEEDS["samples"])()
    return list(private_attribute(state, "_fsdp_param_groups", _NEEDS["samples"]))


def to_empty(module: nn.Module, place: Callable[[torch.Tensor], torch.device]) -> None:
    """Give every tensor of a module storage where it has its place; torch's own has one place for all of them."""
    private_attribute(module, "_apply", _NEEDS["shards"])(lambda one: torch.empty_like(one, device=place(one)))


@contextmanager
def moved_shards(
    up: Callable[[torch.Tensor], torch.Tensor], down: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Within, of shards that FSDP2 keeps on the host it gathers what ``up`` makes, and keeps what ``down`` makes of
    their gradients: of the copies to a device and back there is nothing to see where the device is the host."""
    unit = __getattr__("FSDPParam")
    gathered, sharded = unit.all_gather_inputs.fget, unit.to_sharded_dtensor

    def copied(parameter: Any) -> Any:
        on_host = private_attribute(parameter, "_sharded_param_data", _PREDICTION)
        parameter._sharded_param_data = up(on_host) if parameter.offload_to_cpu else on_host
        try:
            return gathered(parameter)
        finally:
            parameter._sharded_param_data = on_host

    unit.all_gather_inputs = property(copied)
    unit.to_sharded_dtensor = lambda parameter, one: sharded(parameter, down(one) if parameter.offload_to_cpu else one)
    try:
        yield
    finally:
        unit.all_gather_inputs, unit.to_sharded_dtensor = property(gathered), sharded


def schema(function: Any) -> Any:
    """Name and arguments of an operation as it was declared."""
    return private_attribute(function, "_schema", _NEEDS["selective"])


def custom_body(function: Any) -> Callable[..., Any] | None:
    """The Python function of a custom operation; None of one that torch does not know as such."""
    found = __getattr__("OPDEFS").get(function.name())
    body: Callable[..., Any] | None = None if found is None else private_attribute(found, "_init_fn", _PREDICTION)
    return body


def operation(name: str) -> Any:
    """The default overload of an ATen operation that torch does not document."""
    return private_attribute(torch.ops.aten, name, _PREDICTION).default


def scaled_product(
    left: torch.Tensor, right: torch.Tensor, left_scale: torch.Tensor, right_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``left @ right`` of fp8 matrices in ``dtype``: ``[M, K]`` by rows, ``[K, N]`` by columns in memory.

    What their rows and columns are multiplied by is float32 ``[M, 1]`` and ``[1, N]``. Torch's public function
    (``torch.nn.functional.scaled_mm``) has no kernel for CPUs up to 2.13.
    """
    found: torch.Tensor = private_attribute(torch, "_scaled_mm", _NEEDS["float8"])(
        left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype
    )
    return found


def varlen_backward() -> Callable[..., Any] | None:
    """The backward pass of torch's flash attention over documents; without the name its own autograd differentiates."""
    found: Callable[..., Any] | None = getattr(torch.ops.torch_attn, "_varlen_attn_backward", None)
    return found


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Tell the compiler that a side changes from step to step; without the name it finds out and compiles once more."""
    if mark := getattr(sys.modules.get("torch._dynamo"), "maybe_mark_dynamic", None):
        mark(tensor, dim)


def allow_notes_in_checkpoints() -> None:
    """Have what is compiled take notes within what is computed again: in the forward pass alone, as without compiling.

    For the whole process: where it is not set, the compiler leaves such a layer to the interpreter.
    """
    this: Any = sys.modules[__name__]
    settings = this.compiler_settings
    name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    private_attribute(settings, name, _NEEDS["compiled"])
    setattr(settings, name, True)


def each_norm(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The norm of each tensor: on CUDA one launch for all of them, where torch has its private one."""
    fused = getattr(torch, "_foreach_norm", None)
    return fused(list(tensors)) if fused else [torch.linalg.vector_norm(tensor) for tensor in tensors]


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether something looks at what a module computes, or changes it."""
    return any(getattr(module, name, None) for name in ("_forward_hooks", "_forward_pre_hooks"))


def add_each(sums: Sequence[torch.Tensor], terms: Sequence[torch.Tensor]) -> None:
    """Add to each tensor a term of its shape, in place: on CUDA one launch for all, where torch has its private one."""
    if fused := getattr(torch, "_foreach_add_", None):
        fused(list(sums), list(terms))
    else:
        for total, term in zip(sums, terms, strict=True):
            total.add_(term)


def divide_(tensors: Sequence[torch.Tensor], divisor: torch.Tensor) -> None:
    """Divide each tensor in place: on CUDA one launch for all of them, where torch has its private one."""
    if fused := getattr(torch, "_foreach_div_", None):
        fused(tensors, divisor)
    else:
        for tensor in tensors:
            tensor.div_(divisor)


def softmax_backward(upstream: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The gradient of the scores along the last dimension, given that of their softmax ``share``; of its type."""
    if fused := getattr(torch, "_softmax_backward_data", None):
        gradient: torch.Tensor = fused(upstream, share, -1, share.dtype)
        return gradient
    weighted = upstream * share
    return weighted - share * weighted.sum(-1, keepdim=True)
