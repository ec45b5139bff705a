"""A model on the meta device made one whose layers are computed by several processes together.

Weights become DTensors over the axis, ``Shard(0)`` where a process has some outputs and ``Shard(1)`` where it takes
some inputs; FSDP2 shards those on. What is whole on all processes has its whole gradient on each of them, but for norms
and projections of which a process sees its own heads alone: their gradients are added up once, at the end of a step.
A module stays what it is, and gets a forward of its own: a product with this process's part of a weight, and what
processes exchange around it.
"""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tuner.model.adaptable import added_in_product, takes_product
from tuner.model.adapter import ADAPTER
from tuner.model.root import CausalLM
from tuner.model.table import LookedUp, is_plain
from tuner.model.tokens import TrainableTokens
from tuner.model.wrap import Wrapper, wrap
from tuner.parallel.exchange import Group, entered, gathered, own_part, summed
from tuner.parallel.lookup import put_in_parts
from tuner.parallel.tensor.plan import LayerSplit, SplitWay, parts_of
from tuner.parallel.vocabulary import split_head
from tuner.runtime.parts import local


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
    put_in_parts(root, mesh, splitter.dims)
    root.parts.set_once(sum_partial_gradients=lambda: _sum_gradients(splitter.partial, splitter.group))


class _Splitter:
    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.partial: list[nn.Module] = []
        """Modules with gradients of which each process has a part."""
        self.dims: dict[torch.Tensor, int] = {}
        """Along which dim a parameter is to be split."""

    def split(self, part: LayerSplit) -> None:
        """Give the layers of a part their forwards, and note what becomes of their parameters."""
        enter = SharedInput(self.group)
        part.module.register_forward_hook(enter.clear, always_call=True)
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

    def _split_linear(self, layer: Any, way: SplitWay, enter: "SharedInput") -> None:
        adapted = hasattr(layer, "get_base_layer")
        base, group = layer.get_base_layer() if adapted else layer, self.group
        forwards: dict[SplitWay, Callable[..., Any]] = {
            "columns": Columns(base, enter), "columns_gathered": Columns(base, enter, group),
            "rows": RowParallel(base, group), "rows_of_own": RowParallel(base, group, takes_whole=True),
        }
        wrap(base, Wrapper.SPLIT, forwards[way])
        by_outputs = way in ("columns", "columns_gathered")
        self.dims[base.weight] = 0 if by_outputs else 1
        if by_outputs and base.bias is not None:
            self.dims[base.bias] = 0
        if adapted:
            self.dims |= split_adapter(layer, way, group)

    def _heads_of(self, name: str, part: LayerSplit) -> int:
        """How many heads a layer of a part gives in one process."""
        return int(getattr(part.module, name).out_features) // part.head_dim

    def _own_heads(self, name: str, part: LayerSplit) -> slice:
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
                self.dims[table.weight] = 0


@torch.no_grad()
def _sum_gradients(modules: Sequence[nn.Module], group: Group) -> None:
    """Add up the gradients of which each process of a group has a part, as they lie in FSDP2's shards. Collective.

    Once a step: what earlier micro-batches left there is a part, too, and would be added up again with each.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    own = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not own:
        return
    flat = torch.cat([part.reshape(-1) for part in own])
    dist.all_reduce(flat, group=group)
    for part, total in zip(own, flat.split([part.numel() for part in own]), strict=True):
        part.copy_(total.view_as(part))


# Adapters of split layers: each product of LoRA is split as its layer is, and DoRA's lengths are those of whole rows.
#
# Of a layer of which a process has some outputs, B ``[out, r]`` lies as the weight does, and A ``[r, in]`` is whole:
# the gradient of ``A x``, r numbers a token, is what is added up. Of one that takes some inputs, A lies as the weight
# does, and ``A x`` is what is added up. Where its outputs or inputs are whole everywhere, so is its adapter.

def split_adapter(layer: Any, way: SplitWay, group: Group) -> dict[torch.Tensor, int]:
    """Have an adapted layer of peft's, whose base computes in one of the ways, add its adapter so, in place.

    Returns along which dim the parameters of the adapter are to be split, of those that are.
    """
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    dims: dict[torch.Tensor, int] = {up.weight: 0} if way == "columns" else {down.weight: 1} if way == "rows" else {}
    if way == "columns":
        wrap(up, Wrapper.SPLIT, Columns(up, lambda given: entered(given, group)))
        if takes_product(layer, ADAPTER):
            wrap(layer, Wrapper.SPLIT, MethodType(_columns_forward, layer))
    elif way == "rows":
        wrap(down, Wrapper.SPLIT, RowParallel(down, group))
        if not isinstance(dropout := layer.lora_dropout[ADAPTER], nn.Identity):
            layer.lora_dropout[ADAPTER] = OwnDropout(dropout.p, group)
    if layer.lora_magnitude_vector:
        vector = layer.lora_magnitude_vector[ADAPTER]
        wrap(vector, Wrapper.SPLIT, Lengths(vector, way, group))
        if way == "columns":
            dims[vector.weight] = 0
    return dims


def _columns_forward(layer: Any, source: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """As :func:`tuner.model.adaptable.add_in_product` has it, with this process's rows of B."""

    def own_rows(up: Any, inner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return up.forward.enter(inner), own_weight(up)

    return added_in_product(layer, source, *args, second=own_rows, **options)


class Lengths:
    """The forward of DoRA's part of a split layer, with peft's arguments: the lengths are those of whole rows."""

    def __init__(self, vector: nn.Module, way: SplitWay, group: Group) -> None:
        self._vector, self._way, self._group = vector, way, group

    def __call__(  # noqa: PLR0913 - peft's
        self, x: torch.Tensor, *, lora_A: Any, lora_B: Any, scaling: float, base_layer: Any,
        base_result: torch.Tensor | None = None, adapter_name: str = ADAPTER,
    ) -> torch.Tensor:
        """What is added to the base's result, as in peft's ``DoraLinearLayer``: m / |W + s·B·A| of both products."""
        factor = own_weight(self._vector) / self._lengths(base_layer, lora_A, lora_B, scaling, x.dtype)
        base: torch.Tensor = base_layer(x) if base_result is None else base_result
        if (bias := held(base_layer.bias)) is not None:
            base = base - bias
        added: torch.Tensor = lora_B(lora_A(x)) * scaling
        return (factor - 1) * base + factor * added

    @torch.no_grad()
    def _lengths(self, base: Any, down: Any, up: Any, scaling: float, dtype: torch.dtype) -> torch.Tensor:
        """Lengths of the rows that this process hands on: all of them, or where it has some outputs, its own."""
        weight, a, b = own_weight(base).to(dtype), own_weight(down), own_weight(up)
        size, rank = self._group.size(), self._group.rank()
        if self._way == "rows_of_own":
            a = a.chunk(size, 1)[rank]
        if self._way == "columns_gathered":
            b = b.chunk(size)[rank]
        whole = weight + scaling * (b @ a).to(dtype)
        if self._way == "columns":
            lengths: torch.Tensor = torch.linalg.vector_norm(whole, dim=1)
            return lengths
        squares = whole.square().sum(1)
        if self._way == "columns_gathered":
            every = squares.new_zeros(size, len(squares))
            every[rank] = squares
            squares = every.flatten()
        dist.all_reduce(squares, group=self._group)
        return squares.sqrt()


class SharedInput:
    """What the layers of a part that take the same input share: its gradient is added up over processes once.

    What was entered is kept until another input comes, or the part's forward ends.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._given: torch.Tensor | None = None
        self._entered: torch.Tensor | None = None

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """The input as a layer takes it of which each process computes a part."""
        if self._entered is None or given is not self._given:
            self._given, self._entered = given, entered(given, self._group)
        return self._entered

    def clear(self, *_: object) -> None:
        """Keep nothing: as a hook beyond a module's forward, however that ends."""
        self._given = self._entered = None


def own_weight(layer: nn.Module) -> torch.Tensor:
    """This process's part of a layer's weight."""
    found = held(layer.weight)  # type: ignore[arg-type]  # modules' attributes have no types
    assert found is not None
    return found


def held(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """As :func:`tuner.runtime.parts.local`, in words that the compiler follows."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Columns:
    """The forward of a linear layer of which each process has some outputs: ``[..., in]`` to ``[..., out / T]``.

    With a ``group`` in which they are gathered, to all of them, ``[..., out]``.
    """

    def __init__(
        self, layer: nn.Linear, enter: Callable[[torch.Tensor], torch.Tensor], group: Group | None = None
    ) -> None:
        self._layer, self.enter, self._group = layer, enter, group

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """This process's outputs, or all."""
        own = functional.linear(self.enter(given), own_weight(self._layer), held(self._layer.bias))
        return own if self._group is None else gathered(own, self._group)


class RowParallel:
    """The forward of a linear layer that takes some inputs on each process: ``[..., in / T]`` to ``[..., out]``.

    Or, where every process has the whole input and ``takes_whole``, its part of that. Its bias is whole everywhere, and
    is added to the sum.
    """

    def __init__(self, layer: nn.Linear, group: Group, takes_whole: bool = False) -> None:
        self._layer, self._group, self._takes_whole = layer, group, takes_whole

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """The whole product of this process's inputs and all others'."""
        if self._takes_whole:
            given = own_part(given, self._group)
        total = summed(functional.linear(given, own_weight(self._layer)), self._group)
        bias = self._layer.bias
        return total if bias is None else total + bias.to(total.dtype)


class OwnDropout(nn.Dropout):
    """Dropout of this process's part of an input: the mask is drawn for all of it, as one process draws it."""

    def __init__(self, share: float, group: Group) -> None:
        super().__init__(share)
        self._group = group

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """The part ``[..., n]`` with its part of the mask."""
        if not self.training or self.p == 0:
            return input
        ones = input.new_ones(*input.shape[:-1], input.shape[-1] * self._group.size())
        return input * own_part(functional.dropout(ones, self.p), self._group)


def repeat_heads(layer: nn.Module, own: slice, enter: SharedInput) -> None:
    """Have a layer computed whole on each process, which hands the columns of its ``own`` heads on, in place.

    Each process has that part of its parameters' gradients that comes through these heads.
    """

    layer.register_forward_pre_hook(lambda module, given: (enter(given[0]), *given[1:]))
    layer.register_forward_hook(lambda module, given, output: output[..., own])


def gather_heads(norm: nn.Module, group: Group) -> None:
    """Have a norm over all heads see them all, and hand this process's own on, in place."""
    norm.register_forward_pre_hook(lambda module, given: (gathered(given[0], group), *given[1:]))
    norm.register_forward_hook(lambda module, given, output: own_part(output, group))


# An embedding of whose rows each process has some: the rows that it lacks are zeros, and a sum brings them together.
#
# A row is on one process of a group alone: added to zeros it stays what it is. Its gradient is whole on each of them,
# and each takes that of its own rows.

class OwnRows(LookedUp):
    """The forward of a plain embedding whose weight ``[V, D]`` lies in parts of rows. Collective."""

    def __init__(self, embedding: nn.Embedding, group: Group) -> None:
        super().__init__(embedding)
        self._group = group
        self._first = -(-embedding.num_embeddings // group.size()) * group.rank()

    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight for token ids."""
        weight = own_weight(self.embedding)
        places = input_ids - self._first
        foreign = (places < 0) | (places >= len(weight))
        if (padding := self.embedding.padding_idx) is not None:
            padding -= self._first  # its gradient is none's
        if len(weight):
            inside = padding if padding is not None and 0 <= padding < len(weight) else None
            own = functional.embedding(places.masked_fill(foreign, 0), weight, inside)
            own = own.masked_fill(foreign[..., None], 0)
        else:  # of a graph all the same, as on the other processes
            own = weight.new_zeros(*input_ids.shape, weight.shape[1]) + weight.sum()
        return summed(own, self._group)
