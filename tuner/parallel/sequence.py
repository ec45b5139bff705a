"""Sequence parallelism: each process of a group computes a share of every row's positions, for rows too long for one.

Embeddings, norms, MLPs and experts look at one position at a time, so a process computes them for its share alone.
Around attention an all-to-all changes what is divided: from all heads of some positions to some heads of all positions,
and back (Ulysses: Jacobs et al. 2023, https://arxiv.org/abs/2309.14509). So attention is what it is in one process:
documents stay apart, a document may be longer than a share, and windows, chunks, sinks and every kernel are unchanged.
Where there are fewer key heads than processes, or a number that these do not divide, each is sent to all that need it.

The positions that a loss wants are shared out evenly before the output layer, wherever they lie. Every process gets the
sums and the losses of all of them, so a method computes its terms as in one process. Of these each process takes an
equal part (:meth:`tuner.train.methods.method.Terms.shared_by`), and each collective has its true adjoint in the
backward pass. A process's gradients are then those of its share, and the sum over processes, which FSDP2 takes in any
case, is that of the row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.model.attention import ByDistance, is_ours
from tuner.model.documents import Documents, Padding
from tuner.model.output_layer import OutputLayer
from tuner.model.root import CausalLM
from tuner.model.row_layout import Positions, rotates_by_length, route_of, takes_positions
from tuner.model.transformers_private import keeps_state
from tuner.parallel.exchange import Group, send, sum_over, two_way
from tuner.parallel.lookup import gather_parts, reduce_scatter_parts
from tuner.runtime.device import to_device

_ALONE = "write parallel.sequence: 1"


def check_cut(model: PreTrainedModel, size: int) -> None:
    """Raise RecipeError, naming what is in the way, where the rows of a model cannot be cut over so many processes.

    By its structure and its config: it may be without values.
    """
    _, why = route_of(model)
    in_the_way = {
        "attends by functions of its own": not is_ours(model.config),
        "has layers that carry a state from token to token": keeps_state(model),
        "rotates documents by factors of their length (longrope)": rotates_by_length(model),
        "numbers tokens from the start of the row": not takes_positions(model),
    }
    why = why or next((f"{type(model).__name__} {what}" for what, is_so in in_the_way.items() if is_so), None)
    if why is not None:
        raise RecipeError(f"parallel.sequence: {size}: rows cannot be cut over processes: {why}", hint=_ALONE)
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    if isinstance(heads, int):
        require_divided(heads, size)


def require_divided(heads: int, size: int) -> None:
    """Raise RecipeError, with numbers that would do, where a layer's heads do not divide over the processes."""
    if heads % size:
        possible = [n for n in range(1, heads + 1) if heads % n == 0]
        raise RecipeError(
            f"parallel.sequence: {size} does not divide the {heads} attention heads that a process has of a layer",
            hint=f"write one of {', '.join(map(str, possible))}",
        )


def cut_rows(root: CausalLM, mesh: DeviceMesh) -> None:
    """Cut each row over the processes of an axis, in place.

    Raises RecipeError for a model whose rows cannot be cut. What decodes with a cache is not: :meth:`next_tokens` of
    the root takes all tokens on every process.
    """
    if root.layout.route != "flat":
        raise RecipeError(
            f"parallel.sequence: {mesh.size()}: rows are cut where documents lie end to end, and those of "
            f"{type(root.model).__name__} go through the model apart",
            hint=_ALONE,
        )
    check_cut(root.model, mesh.size())
    root.parts.set_once(cut=SequenceCut(mesh.get_group()))


class SequenceCut:
    """Rows of T tokens, filled up to a multiple of the processes, in equal shares of t positions, in order of ranks."""

    def __init__(self, group: Group) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def fill(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, lengths: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Ids and positions with a document of padding at the end, where their number asks for it."""
        return Padding(self.size, self.size).fill(input_ids, position_ids, lengths)

    def exchanging(self, documents: Documents, position_ids: torch.Tensor) -> Documents:
        """The documents of a whole row, with what brings its positions together."""
        return replace(documents, exchange=AllToAllHeads(self, documents, position_ids[None]))

    def own(self, of_row: torch.Tensor) -> torch.Tensor:
        """This process's share ``[t, ...]`` of ``[T, ...]``."""
        share = len(of_row) // self.size
        return of_row.narrow(0, self.rank * share, share)

    def taken(self, hidden: torch.Tensor, positions: Positions) -> torch.Tensor:
        """Of hidden states ``[t, D]`` on each process those at N positions, in even shares ``[n, D]`` in their order.

        Collective, but for no positions. Positions on the host cost no wait for the device.
        """
        places = positions.cpu().numpy() if isinstance(positions, torch.Tensor) else positions
        if len(places) == 0:
            return hidden[:0]
        ours = self.part(len(places))
        holders, takers = places // len(hidden), np.arange(len(places)) // self.most(len(places))
        sent = np.flatnonzero(holders == self.rank)
        rows = hidden.index_select(0, to_device(places[sent] - self.rank * len(hidden), hidden.device))
        received = _moved(rows, self._counts(takers[sent]), self._counts(holders[ours]), self.group)
        order = np.argsort(holders[ours], kind="stable")
        if (np.diff(order) == 1).all():  # as they come: positions in the order of the row
            return received
        return received.index_select(0, to_device(np.argsort(order), hidden.device))

    def whole(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """All of what was taken, ``[N, D]``. Collective, but for no positions."""
        if count == 0:
            return hidden
        return _joined(hidden, count, self)

    def summed(self, own: torch.Tensor) -> torch.Tensor:
        """The sum over the processes. Collective."""
        return _summed(own, self.group)

    def head(self, layer: OutputLayer, count: int) -> OutputLayer:
        """The output layer for shares of N positions."""
        own = {one.name: getattr(layer, one.name) for one in fields(OutputLayer)}
        return CutOutputLayer(**own, layer=layer, cut=self, count=count)

    def most(self, count: int) -> int:
        """Of N positions, the most of a process; the last ones may have fewer, or none."""
        return -(-count // self.size)

    def part(self, count: int) -> slice:
        """Which of N positions are this process's."""
        start = min(count, self.rank * self.most(count))
        return slice(start, min(count, start + self.most(count)))

    def exchanged(self, parts: torch.Tensor) -> torch.Tensor:
        """Of parts ``[processes, ...]``, one for each process, those that all have for this one. Collective."""
        return _moved(parts, None, None, self.group)

    def _counts(self, ranks: npt.NDArray[np.int64]) -> list[int]:
        return list(np.bincount(ranks, minlength=self.size).tolist())


@dataclass(frozen=True, eq=False)
class AllToAllHeads:
    """Attention over whole rows by processes that each have some of its positions, and get some of the heads."""

    cut: SequenceCut
    documents: Documents
    """Of the whole row."""
    places: torch.Tensor
    """Numbers of all its tokens ``[1, T]``, for layers that count."""

    def attend(
        self, attention: Callable[..., tuple[torch.Tensor, None]], tensors: tuple[torch.Tensor, ...],
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """What ``attention`` gives for query, key and value ``[1, heads, t, d]``: ``[1, t, heads, d]``. Collective.

        Raises RecipeError for heads that do not divide, and for a bias of pairs of tokens, which a share of the
        positions cannot have.
        """
        query, key, value = tensors
        heads, size = query.shape[1], self.cut.size
        require_divided(heads, size)
        repeated = size // gcd(key.shape[1], size)  # divides the queries of a key head, since it divides all heads
        if repeated > 1:
            key, value = key.repeat_interleave(repeated, 1), value.repeat_interleave(repeated, 1)
        given = {**options, "documents": self.documents}
        if given.get("places") is not None:
            given["places"] = self.places
        if (sinks := given.get("s_aux")) is not None:
            given["s_aux"] = self.cut.own(sinks)
        by_query: dict[str, torch.Tensor] = {}
        if (by_token := given.get("sinks")) is not None:
            by_query["sinks"] = by_token
        if (bias := given.get("position_bias")) is not None:
            if not isinstance(bias, ByDistance):
                raise RecipeError("parallel.sequence: rows cannot be cut: layers have a bias of pairs", hint=_ALONE)
            by_query["position_bias"] = bias.numbers
        query, key, value, *others = self._to_heads([query, key, value, *by_query.values()])
        given |= dict(zip(by_query, others, strict=True))
        if bias is not None:
            given["position_bias"] = ByDistance(given["position_bias"])
        output = attention(query, key, value, **given)[0]  # [1, T, heads / processes, d] to [1, t, heads, d]
        received = self.cut.exchanged(output[0].unflatten(0, (self.cut.size, -1)))
        return received.transpose(0, 1).flatten(1, 2)[None]

    def _to_heads(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """From ``[1, heads, t, d]`` to ``[1, heads / processes, T, d]``: those of one type and width go together."""
        kinds = [(tensor.dtype, tensor.shape[3]) for tensor in tensors]
        found = {
            kind: iter(self._together([tensor for tensor, own in zip(tensors, kinds, strict=True) if own == kind]))
            for kind in dict.fromkeys(kinds)
        }
        return [next(found[kind]) for kind in kinds]

    def _together(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        parts = [tensor[0].unflatten(0, (self.cut.size, -1)) for tensor in tensors]
        received = self.cut.exchanged(torch.cat(parts, 1))
        whole = received.transpose(0, 1).flatten(1, 2)[None]
        return tuple(whole.split([part.shape[1] for part in parts], 1))


@dataclass(frozen=True)
class CutOutputLayer(OutputLayer):
    """An output layer with a share ``[n, D]`` of the hidden states at N positions, which gives sums and losses of all.

    Targets and weights are given whole. Collective: a method asks the same of it on every process.
    """

    layer: OutputLayer = field(kw_only=True)
    """What computes the shares."""
    cut: SequenceCut = field(kw_only=True)
    count: int = field(kw_only=True)
    """N"""

    def cross_entropy(
        self, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sum over all N positions."""
        own = None if weights is None else self.share(weights)
        return self.total(self.layer.cross_entropy(hidden, self.share(targets), own))

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """At all N positions."""
        return self.join(self.layer.scores(hidden))

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """At all N positions."""
        return self.join(self.layer.losses(hidden, self.share(targets)))

    def share(self, of_positions: torch.Tensor) -> torch.Tensor:
        """This process's ``[n, ...]``."""
        return of_positions[self.cut.part(self.count)]

    def join(self, of_share: torch.Tensor) -> torch.Tensor:
        """Everybody's, in the order of the positions."""
        return self.cut.whole(of_share, self.count)

    def total(self, of_share: torch.Tensor) -> torch.Tensor:
        """The sums over the processes."""
        return self.cut.summed(of_share)

    @property
    def of_one(self) -> OutputLayer:
        """The layer for joined hidden states."""
        return self.layer


def _join(own: torch.Tensor, count: int, cut: SequenceCut) -> torch.Tensor:
    """The processes' shares ``[n, ...]`` of ``[N, ...]``."""
    filled = _filled(own, cut.most(count))
    whole = filled.new_empty(cut.size * len(filled), *filled.shape[1:])
    gather_parts(whole, filled, cut.group)
    return whole[:count]


def _share_of_sums(upstream: torch.Tensor, count: int, cut: SequenceCut) -> torch.Tensor:
    """The sum of what all processes say of this one's share."""
    most, part = cut.most(count), cut.part(count)
    exact = torch.promote_types(upstream.dtype, torch.float32)
    whole = _filled(upstream.to(exact), cut.size * most)
    own = whole.new_empty(most, *whole.shape[1:])
    reduce_scatter_parts(own, whole, cut.group)
    return own[: part.stop - part.start].to(upstream.dtype)


def _filled(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Rows with zeros at the end, up to so many."""
    missing = count - len(rows)
    return functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows.contiguous()


_moved = two_way(send, lambda rows, sent, received, group: send(rows, received, sent, group))
_joined = two_way(_join, _share_of_sums)
_summed = two_way(sum_over, sum_over)
"""A sum over processes, of values and of gradients: each uses the same sum for a part of what comes after it."""
