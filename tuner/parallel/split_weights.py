"""FSDP2 over weights that another axis splits already: what it cuts, and whether it cuts what it says.

FSDP2 describes a parameter that it shards along the dimension that another axis splits by a strided placement, and cuts
what it finds on each process end to end. The two are not always the same: the parts of a fused projection would change
places between processes in every checkpoint, and so would the last rows of small uneven ones.
"""

from __future__ import annotations

from itertools import product

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tuner.errors import RecipeError
from tuner.parallel.mesh import inner_axes
from tuner.runtime.parts import Cut, cuts_of, part_at


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
    for place in product(*(range(mesh.size(axis)) for axis in axes)):
        at = dict(zip(axes, place, strict=True))
        said, done = (
            part_at(
                (parameter.shape[dim],),
                tuple(mesh.size(axis) for axis in order),
                tuple(order.values()),
                tuple(at[axis] for axis in order),
            )
            for order in (own, as_cut)
        )
        if said != done:
            return False
    return True
