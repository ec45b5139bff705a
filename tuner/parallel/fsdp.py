"""Data parallelism by torch FSDP2: every parameter in equal shards, gathered block by block, and replicas of them.

And norms of tensors that lie so.
"""

import functools
import inspect
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tuner.errors import RecipeError
from tuner.model.build import decoder_blocks, has_score, head_layer
from tuner.model.root import FORWARD_METHODS, CausalLM
from tuner.model.wrap import names_in
from tuner.parallel.mesh import DeviceMeshes, Mesh, inner_axes, mesh_on
from tuner.runtime.device import to_device
from tuner.runtime.parts import Cut, TensorPart, cuts_of, local, part_at
from tuner.runtime.process import gloo_group
from tuner.runtime.torch_private import each_norm

if TYPE_CHECKING:
    from tuner.model.touched_rows import TouchedRows


_NORM_CHUNK = 4096
FLAT = 1 << 18
"""Elements up to which a gradient is sent as a part of one tensor, in place of by itself."""


def shard(
    root: CausalLM, meshes: DeviceMeshes, reshard_after_forward: bool, param_dtype: torch.dtype | None = None,
    tokens: int | None = None, on_host: bool = False, reduce_dtype: torch.dtype | None = None,
) -> None:
    """Shard a model on the meta device, in place: decoder blocks, embedding and output layer are a unit each.

    The rest, and an embedding that is the output layer's, is the root's unit. Experts that are spread over processes
    are a unit of their own, over the processes that have the same ones. With ``reshard_after_forward`` a block's
    weights are gathered again for its backward pass. Gradients are summed, not averaged, over processes: the loss is
    already divided by the global count. Where autocast rounds weights, ``param_dtype`` is the type in which they are
    gathered (:func:`rounded_weights`). Where it is known how many ``tokens`` a micro-batch has at most, the
    embedding's rows may be looked up in its shards (:mod:`tuner.parallel.lookup`), and it is no unit. Of a model of
    which nothing is trained, nothing stays whole after a forward. With ``on_host`` shards lie in the host's memory, and
    so do their gradients; a unit's are copied to the device before they are gathered. ``reduce_dtype`` is the type in
    which gradients are added up over processes, by default their own.
    """
    mesh = meshes.weights
    assert mesh is not None, "there is an axis to shard over"
    blocks = decoder_blocks(root.model)
    options: dict[str, Any] = {"mp_policy": fsdp.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)}
    if on_host:
        options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")  # copies overlap then
    trained = any(parameter.requires_grad for parameter in root.parameters())
    if meshes.expert is not None and meshes.expert_weights is not None:
        lie = {p for p in root.parameters() if isinstance(p, DTensor) and p.device_mesh == meshes.expert}
        for module in [one for one in root.modules() if not lie.isdisjoint(one.parameters(recurse=False))]:
            _shard_experts(module, meshes.expert_weights, reshard_after_forward, **options)
    for block in blocks:
        _unit(block, mesh, reshard_after_forward, param_dtype, **options)
    embedding, head = root.model.get_input_embeddings(), head_layer(root.model)
    # Rows that travel are added up in another order: with shards on the host every weight is gathered.
    looked_up = set() if tokens is None or on_host else _looked_up(embedding, root, mesh, tokens)
    if isinstance(embedding, nn.Embedding) and not looked_up and _shares_no_weights(embedding, root):
        _unit(embedding, mesh, True, **options)
        _state_of(embedding).set_unshard_in_backward(False)  # looking up needs no weight to go backward
    if _shares_no_weights(head, root):
        rounded = None if has_score(root.model) else param_dtype  # a score is float32 under autocast too
        _unit(head, mesh, not trained, rounded, **options)  # the backward pass begins with it
        _state_of(blocks[-1]).set_modules_to_forward_prefetch([_state_of(head)])
        _gather_for_objective(root, head)
    _fully_shard(root, mesh, not trained, ignored_params=looked_up, **options)
    if meshes.tensor is not None or meshes.expert is not None:
        require_as_declared(root)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    root.parts.set_once(max_forwards=_most)
    for method in FORWARD_METHODS:
        fsdp.register_fsdp_forward_method(root, method)


def _most(forwards: int) -> int:
    """Of the forwards that a micro-batch takes on each process, the most: each gathers shards from all. Collective."""
    most = torch.tensor([forwards])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=gloo_group())
    return int(most)


def _shard_experts(module: nn.Module, mesh: DeviceMesh, reshard: bool, **options: Any) -> None:
    """Make experts a unit over the processes that have the same ones, each of which holds columns of all of them.

    Their first dim is split by experts already. Split by it a second time they would lie in strides, which no slice of
    the whole tensor describes. Raises RecipeError where no other dim divides.
    """
    shards = mesh.size(mesh.ndim - 1)

    def placement(weight: nn.Parameter) -> Shard:
        even = [dim for dim in range(1, weight.ndim) if weight.shape[dim] % shards == 0]
        if not even:
            shape = "×".join(map(str, weight.shape))
            raise RecipeError(
                f"parallel.expert: weights of experts ({shape}) cannot be cut in {shards} equal parts, one for each "
                "process that has the same experts",
                hint="write a larger parallel.expert, or start fewer processes",
            )
        return Shard(even[0])

    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, shard_placement_fn=placement, **options)


def _unit(
    module: nn.Module, mesh: DeviceMesh, reshard: bool, param_dtype: torch.dtype | None = None, **options: Any
) -> None:
    """Make a module a unit of its own, in which autocast's weights are gathered in ``param_dtype`` where all can be."""
    if param_dtype is not None and (rounded := rounded_weights(module)):
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=options["mp_policy"].reduce_dtype or torch.float32,
            cast_forward_inputs=False,  # autocast takes care of everything else
        )
        options["ignored_params"] = set(module.parameters()) - rounded
    _fully_shard(module, mesh, reshard, **options)


def _fully_shard(module: nn.Module, mesh: DeviceMesh, reshard: bool, **options: Any) -> None:
    """FSDP2's own, over rows, or over what :func:`~tuner.parallel.fsdp.dim_to_shard` says."""
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        options["shard_placement_fn"] = functools.partial(dim_to_shard, shards=mesh.size(mesh.ndim - 1))
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, **options)


def _looked_up(embedding: nn.Module, root: CausalLM, mesh: DeviceMesh, tokens: int) -> set[nn.Parameter]:
    """Spread the tables in an embedding, or in what wraps it, whose rows are to be looked up; returns their weights."""
    from tuner.parallel.lookup import spread

    if any(isinstance(parameter, DTensor) for parameter in embedding.parameters()):
        return set()  # the processes of a tensor group look up rows of their own
    tables = [module for module in embedding.modules() if _shares_no_weights(module, root)]
    touched: dict[nn.Module, TouchedRows] = {one.embedding: one for one in root.parts.touched_rows.values()}
    return {weight for table in tables for weight in spread(table, mesh, tokens, touched.get(table))}


def _shares_no_weights(module: nn.Module, root: nn.Module) -> bool:
    """Whether no other module has parameters of this one."""
    inside = set(module.modules())
    others = (parameter for one in root.modules() if one not in inside for parameter in one.parameters(recurse=False))
    return set(module.parameters()).isdisjoint(others)


def _gather_for_objective(root: CausalLM, head: Any) -> None:
    """Have the root's objective computed where the output layer is whole, and as exactly as in one process."""

    def at_head(*args: Any) -> Any:
        weight = dict(head.named_parameters(recurse=False)).get("weight")  # with rows of new tokens it is a copy
        if weight is not None and weight.requires_grad:
            weight.grad_dtype = torch.float32  # as it is added up over chunks of logits
        return root.at_head(*args)

    head.at_head = at_head
    fsdp.register_fsdp_forward_method(head, "at_head")

    def gathered(*args: Any) -> Any:
        head.unshard()  # ends what was begun in the last block, and with it the buffer that was received into
        return head.at_head(*args)

    root.parts.set_once(at_gathered_head=gathered)


def _state_of(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def sync_gradients(root: nn.Module, last: bool, whole: bool = False) -> None:
    """How the next backward reduces gradients over processes; ``last`` is a step's last microbatch.

    Each one adds to the shards of the gradients, and replicas are added up in the last one. With ``whole``, nothing is
    sent before that, and every process keeps the gradients of the whole model until then.
    """
    if isinstance(root, FSDPModule):
        root.set_requires_gradient_sync(last or not whole)
        root.set_requires_all_reduce(last)


def sum_whole_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh | None = None) -> None:
    """Add up, over all processes, the gradients of parameters that each of them holds whole. Collective.

    Where processes compute layers together, over those of a ``mesh``, which have the same part of each layer: of what a
    tensor group splits and FSDP2 does not shard, too. Large ones in place, one collective each; the others become parts
    of one tensor. A parameter without a gradient on this process counts as zeros where another process has one. Where
    none has, it stays without, and an optimizer leaves it alone as in one process. Who has them all waits for no device
    to learn that.
    """
    whole = [parameter for parameter in parameters if is_whole_along(parameter)]
    if not whole:
        return
    groups = [None] if mesh is None else [mesh.get_group(axis) for axis in range(mesh.ndim)]
    small = [parameter for parameter in whole if local(parameter).numel() <= FLAT]
    here = [parameter.grad is not None for parameter in whole]
    parts = [_gradient(parameter).reshape(-1) for parameter in small]
    flat = torch.cat([*parts, to_device(torch.tensor(here, dtype=torch.float32), whole[0].device)])
    for group in groups:
        dist.all_reduce(flat, group=group)
    *sums, anywhere = flat.split([*map(len, parts), len(whole)])
    for parameter, part in zip(small, sums, strict=True):
        parameter.grad = sharded_like(part.view_as(local(parameter)), parameter)
    without = [number for number, is_here in enumerate(here) if not is_here]
    counts = anywhere.cpu() if without else anywhere
    nobodys = {whole[number] for number in without if not float(counts[number])}
    for parameter in whole:
        if parameter in nobodys:
            parameter.grad = None
        elif local(parameter).numel() > FLAT:
            gradient = _gradient(parameter)
            for group in groups:
                dist.all_reduce(gradient, group=group)
            parameter.grad = sharded_like(gradient, parameter)


def is_whole_along(parameter: torch.Tensor) -> bool:
    """Whether no process that computes the same part of a layer holds another part of a parameter of it."""
    if not isinstance(parameter, DTensor):
        return True
    names = parameter.device_mesh.mesh_dim_names
    return names is not None and all(name.endswith("tensor") for name in names)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This process's part of a gradient, zeros where it has none."""
    return torch.zeros_like(local(parameter.detach())) if parameter.grad is None else local(parameter.grad)


def squared_norm(gradients: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """This process's share of the square of all gradients' norm: the sum of all shares counts each element once."""
    alike: dict[tuple[int, str], list[torch.Tensor]] = {}
    for gradient in gradients:  # with shards on the host, what every process keeps whole is on the device
        alike.setdefault((holders(gradient, mesh), local(gradient).device.type), []).append(local(gradient))
    shares = [sum_of_squares(own) / held for (held, _), own in sorted(alike.items(), key=operator.itemgetter(0))]
    return functools.reduce(operator.add, shares)  # scalars, which may lie on either


def holders(tensor: torch.Tensor, mesh: Mesh) -> int:
    """How many processes hold the same part of a tensor; a sum over all of them counts its elements so often.

    Divided by it, a sum of squares is that of the whole tensor, to the last bit where it is a power of two.
    """
    if not isinstance(tensor, DTensor):
        return mesh.size
    split = (axis for axis, cut in enumerate(cuts_of(tensor)) if cut is not None)
    return mesh.size // prod(map(tensor.device_mesh.size, split))


def sharded_like(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor as one that lies over the processes as ``like`` does, or whole as that is."""
    if not isinstance(like, DTensor):
        return part
    mesh = mesh_on(part.device.type, like.device_mesh)
    return DTensor.from_local(part, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of all elements' squares of one or more tensors, a float64 scalar on their device.

    torch's norm on a CPU adds a whole tensor up in a few float32 lanes: 1.5e-3 off for an embedding of 28 million
    elements, and less for each half of it. Here chunks of a few thousand elements are added in float32 and the chunks
    in float64, in less time. On CUDA one fused launch for all tensors already adds in chunks, as a tree.
    """
    if tensors[0].is_cuda:
        return torch.stack(list(each_norm(tensors))).double().square().sum()
    norms = [norm for tensor in tensors for norm in _chunk_norms(tensor.reshape(-1))]
    return torch.cat(norms).double().square().sum()


def _chunk_norms(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of a vector's whole chunks, and of what is left at its end."""
    whole = flat.numel() // _NORM_CHUNK * _NORM_CHUNK
    chunks = torch.linalg.vector_norm(flat[:whole].view(whole // _NORM_CHUNK, _NORM_CHUNK), dim=1)
    return chunks, torch.linalg.vector_norm(flat[whole:]).reshape(1)


# FSDP2 over weights that another axis splits already: what it cuts, and whether it cuts what it says.
#
# FSDP2 describes a parameter that it shards along the dimension that another axis splits by a strided placement, and
# cuts what it finds on each process end to end. The two are not always the same: the parts of a fused projection would
# change places between processes in every checkpoint, and so would the last rows of small uneven ones.

def dim_to_shard(parameter: nn.Parameter, shards: int) -> Shard | None:
    """What FSDP2 is to cut into so many shards, None for rows.

    Columns, of what is strided along rows (a fused projection), and of what has fewer rows on a process than there are
    shards (experts). Raises RecipeError where they are no multiple of the shards.
    """
    if not isinstance(parameter, DTensor):
        return None
    own = parameter.to_local().shape
    strided = any(cut is not None and cut.dim == 0 and cut.parts > 1 for cut in cuts_of(parameter))
    if len(own) > 1 and (strided or own[0] < shards) and own[1] % shards == 0:
        return Shard(1)
    if strided:
        what = f"{own[1]} columns" if len(own) > 1 else "rows alone"
        raise RecipeError(
            f"parallel.tensor: of a fused projection of shape {list(parameter.shape)}, {shards} shards cannot share "
            f"the {what}",
            hint="take as many processes as parallel.tensor, or a number of shards that divides the columns",
        )
    return None


def require_as_declared(root: nn.Module) -> None:
    """Check that all parameters lie as their placements say. Raises RecipeError, with the name and the numbers."""
    for name, parameter in root.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        for dim in range(parameter.ndim):
            if not _lies_as_declared(parameter, dim):
                sizes = " x ".join(str(parameter.device_mesh.size(axis)) for axis in _axes(parameter, dim))
                raise RecipeError(
                    f"{name}: {parameter.shape[dim]} rows cannot be shared by {sizes} processes: torch would not say "
                    "rightly which of them has which",
                    hint="take fewer processes, or a model in which the number is a multiple of theirs",
                )


def _axes(parameter: DTensor, dim: int) -> list[int]:
    """The axes that split a dimension."""
    return [axis for axis, cut in enumerate(cuts_of(parameter)) if cut is not None and cut.dim == dim]


def _lies_as_declared(parameter: DTensor, dim: int) -> bool:
    """Whether a dimension that several axes split is cut as its placements say: by the inner axes, then by FSDP2."""
    mesh, axes, cuts = parameter.device_mesh, _axes(parameter, dim), cuts_of(parameter)
    if len(axes) < 2:
        return True
    own = {axis: Cut(0, cut.parts) for axis, cut in enumerate(cuts) if cut is not None and cut.dim == dim}
    inner = [axis for axis in axes if axis in inner_axes(mesh)]
    as_cut = {axis: own[axis] for axis in inner} | {axis: Cut(0) for axis in axes if axis not in inner}

    def part(order: Mapping[int, Cut], at: Mapping[int, int]) -> TensorPart:
        sizes = tuple(map(mesh.size, order))
        return part_at((parameter.shape[dim],), sizes, tuple(order.values()), tuple(at[axis] for axis in order))

    places = (dict(zip(axes, place, strict=True)) for place in product(*(range(mesh.size(axis)) for axis in axes)))
    return all(part(own, at) == part(as_cut, at) for at in places)


# What a unit of FSDP2 gathers in bfloat16, or float16: the weights that autocast would round to it anyway.
#
# Autocast multiplies by a float32 weight rounded to bfloat16; whether it is rounded before it is sent or after changes
# no bit of a loss, and halves what is sent and what is gathered. Its gradient is bfloat16 in both cases, as it leaves
# the product, and is added up over processes and micro-batches in float32. bf16 so has one meaning at every world size;
# fp16 has too, and fp8, which rounds further what bf16 has rounded.
#
# The rule: a decoder layer gathers the float32 weights of its linear layers in bfloat16. What autocast leaves in
# float32 (norms, biases that are read elsewhere, the states of recurrent layers) is never rounded: it is small, so
# every process keeps it whole. A layer in which it is not small, such as one whose experts are multiplied without
# autocast, gathers all of its weights in float32. So does every layer with an adapter, whose large weights are bfloat16
# on every process already, and whose own ones are dropped out in the type of its weights.

SMALL = 1 << 18
"""Elements of a parameter that every process may keep whole: a mebibyte in float32."""

_MULTIPLIED = ("Linear", "Conv1D")
"""Types of module that do nothing with their weight but multiply by it. Subclasses may do more."""


def rounded_weights(unit: nn.Module) -> set[nn.Parameter]:
    """The weights of a unit that autocast rounds in every use; none where something else of it is large."""
    read = {id(layer) for owner in unit.modules() if _reads_weights(owner) for layer in owner.children()}
    multiplied = (one for one in unit.modules() if id(one) not in read and type(one).__name__ in _MULTIPLIED)
    weights = (getattr(one, "weight", None) for one in multiplied)
    found = {one for one in weights if isinstance(one, nn.Parameter) and one.dtype == torch.float32}
    rest = [parameter for parameter in unit.parameters() if parameter not in found]
    return set() if any(local(parameter.detach()).numel() > SMALL for parameter in rest) else found


def _reads_weights(owner: nn.Module) -> bool:
    """Whether a module's forward reads the weight of a layer in it, to do more than multiply.

    LongCat's router multiplies by it in float32, without autocast.
    """
    return "weight" in names_in(inspect.unwrap(type(owner).forward))


@contextmanager
def as_trained(root: nn.Module) -> Iterator[None]:
    """Within, units compute with their weights as they are trained, in float32; for forward passes without autocast.

    Each gathers its own for the length of its forward. Collective wherever the model runs.
    """
    with ExitStack() as stack:
        for unit in (module for module in root.modules() if isinstance(module, FSDPModule)):
            unit.reshard()
            own = [(module, *named) for module in unit.modules() for named in module.named_parameters(recurse=False)]
            stack.callback(unit.register_forward_pre_hook(functools.partial(_widen, own)).remove)
            stack.callback(unit.register_forward_hook(lambda unit, *_: unit.reshard()).remove)
        yield


def _widen(own: Sequence[tuple[nn.Module, str, nn.Parameter]], unit: nn.Module, inputs: object) -> None:
    """Put the weights of a unit as they are trained in the place of those that it has gathered in another type."""
    for module, name, sharded in own:
        gathered = getattr(module, name)
        if isinstance(sharded, DTensor) and gathered.dtype != sharded.dtype:  # the shard may be in the host's memory
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
            from tuner.parallel.layouts import along  # where processes split layers

            part = along(part, cut.dim, own.shape[cut.dim], mesh.get_group(axis))
    if not inner:
        return part
    split = mesh[tuple(names[axis] for axis in inner)]
    placements = [sharded.placements[axis] for axis in inner]
    return DTensor.from_local(part, split, placements, run_check=False, shape=sharded.shape, stride=sharded.stride())
