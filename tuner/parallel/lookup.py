"""An embedding in shards of which rows travel and the weight does not.

Of a large vocabulary a micro-batch takes few rows. The processes that share a weight all-gather their token ids; each
looks up those rows that are its own, and a reduce-scatter brings every row to who asked for it. A row is on one process
alone: added to zeros, as whole numbers, it keeps its bits. In the backward pass the gradients of all rows are gathered,
and each process adds those of its own rows up, in the order of ranks and tokens, into its shard of the gradient.

Nobody asks the device for a number on the way: token ids are filled up to a length that all processes know. So what is
moved grows with their number, and the rule is that it is at most half of what gathering the weight and reducing its
gradient would move. Forward passes without gradients, of any length on each process, gather the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from tuner.model.table import WORD, LookedUp, can_be_looked_up
from tuner.model.wrap import Wrapper, wrap
from tuner.runtime.parts import local

if TYPE_CHECKING:
    from tuner.model.touched_rows import TouchedRows

NOBODYS = -1
"""The token id that a micro-batch is filled up with: no process has a row of it."""


def pays(vocabulary: int, processes: int, tokens: int) -> bool:
    """Whether looking up so many tokens on each process moves at most half of what gathering the weight would."""
    return 2 * processes * tokens <= vocabulary


class Lookup(LookedUp):
    """The forward of an embedding whose weight ``[V, D]`` lies in shards of rows over the last axis of a mesh.

    ``tokens`` is the most that any process looks up in a forward pass with gradients. Collective, unless the weight is
    kept whole. Where there are ``touched`` rows, they have the gradient, and the weight has none.
    """

    def __init__(
        self, embedding: nn.Embedding, mesh: DeviceMesh, tokens: int, touched: TouchedRows | None = None
    ) -> None:
        super().__init__(embedding)
        self.mesh, self.tokens, self.touched = mesh, tokens, touched
        self.group = mesh.get_group(mesh.ndim - 1)
        """The processes that have a copy of the weight between them."""
        self.step = -(-embedding.num_embeddings // mesh.size(mesh.ndim - 1))
        """Rows of a shard; the last ones may be shorter, or empty."""
        self.whole: torch.Tensor | None = None
        """The whole weight where it is kept: :meth:`keep_whole`."""

    @property
    def shard(self) -> torch.Tensor:
        """This process's rows ``[<= step, D]``."""
        return local(self.embedding.weight)

    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight for token ids. Raises ValueError for more than all processes made room for."""
        if self.whole is not None or not torch.is_grad_enabled():
            weight = self._gathered() if self.whole is None else self.whole
            return functional.embedding(input_ids, weight)
        if input_ids.numel() > self.tokens:
            raise ValueError(f"{input_ids.numel()} tokens are looked up at once, and there is room for {self.tokens}")
        # Autograd would make zeros of the gradient that a weight with touched rows does not get.
        shard = self.shard if self.touched is None else self.shard.detach().requires_grad_()
        apply = cast("Callable[..., torch.Tensor]", _LookedUpRows.apply)
        return apply(shard, input_ids.reshape(-1), self).view(*input_ids.shape, -1)

    def keep_whole(self) -> None:
        """Have the whole weight on each process, which looks up alone from here on; no gradients. Collective."""
        self.whole = self._gathered()

    @torch.no_grad()
    def sum_over_copies(self) -> None:
        """Add up the gradients of the copies of the model, where there are several. Collective."""
        if self.mesh.ndim > 1 and (gradient := self.embedding.weight.grad) is not None:
            dist.all_reduce(local(gradient), group=self.mesh.get_group(0))

    @torch.no_grad()
    def _gathered(self) -> torch.Tensor:
        """The whole weight ``[V, D]``. Collective."""
        own = self.shard.detach()
        if missing := self.step - len(own):
            own = torch.cat([own, own.new_empty(missing, own.shape[1])])
        whole = own.new_empty(dist.get_world_size(self.group) * self.step, own.shape[1])
        gather_parts(whole, own.contiguous(), self.group)
        return whole[: self.embedding.num_embeddings]


class _LookedUpRows(torch.autograd.Function):
    """Rows ``[T, D]`` of a weight that lies in shards, for token ids ``[T]``, which may be other ones everywhere."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, input_ids: torch.Tensor, lookup: Lookup) -> torch.Tensor:
        count, first = len(input_ids), dist.get_rank(lookup.group) * lookup.step
        filled = functional.pad(input_ids, (0, lookup.tokens - count), value=NOBODYS)
        every = filled.new_empty(dist.get_world_size(lookup.group) * lookup.tokens)
        gather_parts(every, filled, lookup.group)
        places = every - first
        foreign = (places < 0) | (places >= len(shard))
        words = shard.view(WORD)
        if len(shard):
            rows = words.index_select(0, places.masked_fill(foreign, 0)).masked_fill_(foreign[:, None], 0)
        else:
            rows = words.new_zeros(len(every), words.shape[1])
        own = rows.new_empty(lookup.tokens, rows.shape[1])
        reduce_scatter_parts(own, rows, lookup.group)
        if shard.requires_grad:
            if (padding := lookup.embedding.padding_idx) is not None:
                foreign |= every == padding  # its gradient is none's
            ctx.save_for_backward(places.masked_fill_(foreign, len(shard)))
            ctx.lookup, ctx.n_rows = lookup, len(shard)
        return own.view(shard.dtype)[:count]

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        lookup, (places,) = ctx.lookup, ctx.saved_tensors
        filled = functional.pad(upstream, (0, 0, 0, lookup.tokens - len(upstream))).contiguous()
        every = filled.new_empty(len(places), filled.shape[1])
        gather_parts(every, filled, lookup.group)
        if lookup.touched is not None:
            lookup.touched.add(places, every)
            return None, None, None
        # What is not of this shard has a row of its own at the end. On CUDA this sorts: the order of sums is fixed.
        n_rows = ctx.n_rows
        gradient = torch.ops.aten.embedding_dense_backward(every, places, n_rows + 1, n_rows, False)
        return gradient[:n_rows], None, None


def gather_parts(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """All processes' own parts, end to end. From torch 2.13 on, the older of its two names warns."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, own, group=group)


def reduce_scatter_parts(own: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """This process's part of the sum of all processes' tensors."""
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce(own, whole, group=group)


def spread(
    embedding: nn.Module, mesh: DeviceMesh, tokens: int, touched: TouchedRows | None = None
) -> set[nn.Parameter]:
    """Put an embedding on the meta device into shards, in place, and have its rows looked up.

    ``tokens`` is the most of a micro-batch. Returns its weight as it lies now; nothing where this is no plain table, or
    where it does not pay. With ``touched`` rows it is looked up in any case: gathered, it would have a whole gradient.
    """
    if not can_be_looked_up(embedding):
        return set()
    if touched is None and not pays(embedding.num_embeddings, mesh.size(mesh.ndim - 1), tokens):
        return set()
    lookup = Lookup(embedding, mesh, tokens, touched)
    embedding.weight = weight = in_parts(embedding.weight, mesh, 0)
    if touched is not None:
        touched.hold(dist.get_rank(lookup.group) * lookup.step, len(lookup.shard))
    wrap(embedding, Wrapper.ROWS, lookup)
    return {weight}


def in_parts(whole: torch.Tensor, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """A parameter without storage cut along a dim over the last axis of a mesh as torch cuts it, a copy on others."""
    last, shape = mesh.ndim - 1, list(whole.shape)
    step = -(-shape[dim] // mesh.size(last))
    shape[dim] = min(step, max(0, shape[dim] - step * mesh.get_local_rank(last)))
    own, placements = torch.empty(shape, dtype=whole.dtype, device=whole.device), (*[Replicate()] * last, Shard(dim))
    placed = DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(placed, requires_grad=whole.requires_grad)


def put_in_parts(root: nn.Module, mesh: DeviceMesh, dims: Mapping[torch.Tensor, int]) -> None:
    """Put parameters in the place of those without storage, each cut along its dim, wherever in a model they are."""
    made = {whole: in_parts(whole, mesh, dim) for whole, dim in dims.items()}
    for module in root.modules():
        for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if parameter in made:
                setattr(module, name, made[parameter])


def lookups(root: nn.Module) -> list[Lookup]:
    """Those of a model's embeddings, in order."""
    forwards = (vars(module).get("forward") for module in root.modules())
    return [forward for forward in forwards if isinstance(forward, Lookup)]


def sum_over_copies(root: nn.Module) -> None:
    """Add up, over the copies of a model, the gradients of what is looked up: FSDP2 knows nothing of it. Collective."""
    for lookup in lookups(root):
        lookup.sum_over_copies()
