"""A model on the meta device made one whose layers are computed by several processes together.

Weights become DTensors over the axis, ``Shard(0)`` where a process has some outputs and ``Shard(1)`` where it takes
some inputs; FSDP2 shards those on. What is whole on all processes has its whole gradient on each of them, but for norms
and projections of which a process sees its own heads alone: their gradients are added up once, at the end of a step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tuner.model.root import CausalLM
from tuner.model.tokens import TrainableTokens
from tuner.model.wrap import Wrapper, wrap
from tuner.parallel.tensor.collectives import Group
from tuner.parallel.tensor.embedding import OwnRows, is_plain
from tuner.parallel.tensor.layers import (
    Columns,
    GatheredColumns,
    Rows,
    RowsOfOwn,
    SharedInput,
    gather_heads,
    in_parts,
    local,
    repeat_heads,
)
from tuner.parallel.tensor.plan import Part, SplitWay, parts_of
from tuner.parallel.vocabulary import split_head


def split_layers(root: CausalLM, mesh: DeviceMesh) -> None:
    """Split the matrices of a model's layers over the processes of an axis, in place, on the meta device.

    After adapters, before recomputing and FSDP2. Raises RecipeError as :func:`~tuner.parallel.tensor.plan.check_split`
    does.
    """
    parts = parts_of(root.model, mesh.size())
    split_head(root, mesh)
    splitter = _Splitter(mesh)
    for part in parts:
        splitter.split(part)
    splitter.split_embedding(root)
    splitter.place(root)
    root.complete(sum_partial_gradients=lambda: _sum_gradients(splitter.partial, splitter.group))


class _Splitter:
    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.partial: list[nn.Module] = []
        """Modules with gradients of which each process has a part."""
        self._dims: dict[nn.Parameter, int] = {}
        """Along which dim a parameter is to be split."""

    def split(self, part: Part) -> None:
        """Give the layers of a part their forwards, and note what becomes of their parameters."""
        enter = SharedInput(self.group)
        enter.clear_after(part.module)
        for name, way in part.ways.items():
            layer = getattr(part.module, name)
            if way == "repeated":
                repeat_heads(layer, self._own_heads(name, part), enter)
                self.partial.append(layer)
                if hasattr(part.module, "num_key_value_groups"):  # read by a class that attends by itself
                    vars(part.module)["num_key_value_groups"] = self._heads_of("q_proj", part) // self.group.size()
            elif way == "gathered_norm":
                gather_heads(layer, self.group)
            elif way != "partial_norm":
                self._split_linear(layer, way, enter)
            elif part.named("columns"):
                self.partial.append(layer)

    def _split_linear(self, layer: Any, way: SplitWay, enter: SharedInput) -> None:
        adapted = hasattr(layer, "get_base_layer")
        base, group = layer.get_base_layer() if adapted else layer, self.group
        forwards: dict[SplitWay, Callable[..., Any]] = {
            "columns": Columns(base, enter),
            "rows": Rows(base, group),
            "columns_gathered": GatheredColumns(base, enter, group),
            "rows_of_own": RowsOfOwn(base, group),
        }
        wrap(base, Wrapper.SPLIT, forwards[way])
        by_outputs = way in ("columns", "columns_gathered")
        self._dims[base.weight] = 0 if by_outputs else 1
        if by_outputs and base.bias is not None:
            self._dims[base.bias] = 0
        if adapted:
            from tuner.parallel.tensor.adapters import split_adapter, split_parameters

            split_adapter(layer, way, group)
            self._dims |= split_parameters(layer, way)

    def _heads_of(self, name: str, part: Part) -> int:
        """How many heads a layer of a part gives in one process."""
        return int(getattr(part.module, name).out_features) // part.head_dim

    def _own_heads(self, name: str, part: Part) -> slice:
        """The columns of the heads of keys or values that this process's queries go with."""
        heads = self._heads_of(name, part)
        own = self.group.rank() * heads // self.group.size()
        return slice(own * part.head_dim, (own + 1) * part.head_dim)

    def split_embedding(self, root: CausalLM) -> None:
        """Have each process look up its rows of the embedding, which lie as the output layer's where they are tied."""
        embedding = root.model.get_input_embeddings()
        table: Any = embedding.base_layer if isinstance(embedding, TrainableTokens) else embedding
        if is_plain(table):
            wrap(table, Wrapper.SPLIT, OwnRows(table, self.group))
            if not isinstance(table.weight, DTensor):
                self._dims[table.weight] = 0

    def place(self, root: CausalLM) -> None:
        """Put split parameters in the place of whole ones, wherever in the model they are."""
        made = {whole: in_parts(whole, self.mesh, dim) for whole, dim in self._dims.items()}
        for module in root.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter in made:
                    setattr(module, name, made[parameter])


@torch.no_grad()
def _sum_gradients(modules: Sequence[nn.Module], group: Group) -> None:
    """Add up the gradients of which each process of a group has a part, as they lie in FSDP2's shards. Collective.

    Once a step: what earlier micro-batches left there is a part, too, and would be added up again with each.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    parts = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    own = [part for part in parts if part is not None]
    if not own:
        return
    flat = torch.cat([part.reshape(-1) for part in own])
    dist.all_reduce(flat, group=group)
    for part, total in zip(own, flat.split([part.numel() for part in own]), strict=True):
        part.copy_(total.view_as(part))
