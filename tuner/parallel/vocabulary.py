"""The output layer with the vocabulary over the processes of an axis: each makes the logits of its own tokens.

Every process has the hidden states of all positions and some rows of the weight, so of the logits ``[N, V]`` it makes
``[N, V / T]``, a chunk of positions at a time as one process does (:mod:`tuner.model.output_layer`). What a softmax
needs of the others is their largest logit, their sum of exponentials and the logit of the target: three numbers for
each position, gathered once for each chunk, from which all compute the same loss to the last bit (Megatron-LM,
https://arxiv.org/abs/1909.08053). The gradients of weight and bias need nothing of the others. That of the hidden
states is added up over the processes once, so whatever lies before the output layer gets the whole of it.

Chunks are cut by the process that has most rows and least memory: all of them come to each collective equally often.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tuner.model import output_layer
from tuner.model.build import has_score, head_layer
from tuner.model.root import CausalLM
from tuner.model.tokens import TrainableTokens
from tuner.model.wrap import Wrapper, wrap
from tuner.parallel.exchange import entered
from tuner.parallel.fsdp import sharded_like
from tuner.parallel.lookup import gather_parts, put_in_parts
from tuner.runtime.device import gpu_memory, is_traced
from tuner.runtime.parts import local


def split_head(root: CausalLM, mesh: DeviceMesh) -> None:
    """Cut the output layer of a model on the meta device into rows over the processes of an axis, in place.

    An embedding that is tied to it has the same rows. Called as a module it gives whole products, without gradients.
    A reward model's score is one row, which stays whole.
    """
    if has_score(root.model):
        return
    head = head_layer(root.model)
    layer: Any = head.base_layer if isinstance(head, TrainableTokens) else head
    put_in_parts(root, mesh, dict.fromkeys(layer.parameters(recurse=False), 0))
    parts = VocabularyParts(mesh, len(layer.weight), _least_memory(mesh))
    root.parts.set_once(vocabulary=parts)
    wrap(head, Wrapper.SPLIT, lambda hidden: parts.products(parts.layer(head, output_layer.PLAIN, None), hidden))


def _least_memory(mesh: DeviceMesh) -> int | None:
    """Bytes of the smallest GPU among the processes; None on CPUs. Collective."""
    if (there := gpu_memory(torch.empty(0, device=mesh.device_type))) is None or is_traced():
        return there
    least = torch.tensor(there, device=mesh.device_type)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=mesh.get_group())
    return int(least)


class Softmax(NamedTuple):
    """What the softmax over the whole vocabulary is made of at n positions: ``exp(z - largest) / total``."""

    largest: torch.Tensor
    """[n]: the largest logit."""
    total: torch.Tensor
    """[n]: the sum of ``exp(z - largest)``."""
    wanted: torch.Tensor
    """[n]: the target's logit."""

    @property
    def losses(self) -> torch.Tensor:
        """The cross-entropy at each position, ``[n]``."""
        return self.total.log() - (self.wanted - self.largest)


class VocabularyParts:
    """Which rows of an output layer's weight ``[V, D]`` each process of an axis has; all methods are collective.

    The mesh has one axis; ``memory`` is that of the smallest GPU among the processes, in bytes.
    """

    def __init__(self, mesh: DeviceMesh, vocabulary: int, memory: int | None = None) -> None:
        self.mesh, self.group, self.vocabulary, self.memory = mesh, mesh.get_group(), vocabulary, memory
        self.longest = -(-vocabulary // mesh.size())
        """Rows of the first process; none has more."""
        self.first = min(vocabulary, mesh.get_local_rank() * self.longest)
        """The first row that this process has, or would have."""
        self.count = min(self.longest, vocabulary - self.first)
        """Rows of this process; none where there are few."""

    def layer(
        self, head: Any, transform: output_layer.LogitTransform, scale: torch.Tensor | None
    ) -> output_layer.OutputLayer:
        """The output layer as this process has it, of the module between whose gather and release this runs."""
        weight = self._with_new_rows(head) if isinstance(head, TrainableTokens) else head.weight
        return output_layer.OutputLayer(weight, getattr(head, "bias", None), transform, self.kernel, scale, parts=self)

    def kernel(
        self, logits: torch.Tensor, targets: torch.Tensor, wants_gradient: bool, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The summed loss of this process's logits, which become its gradient."""
        softmax = self.softmax(logits, targets)
        if wants_gradient:
            self.into_gradient(logits, targets, softmax, weights)
        return (softmax.losses if weights is None else softmax.losses * weights).sum()

    def add_up(self, of_hidden: torch.Tensor) -> None:
        """Add the gradient of the hidden states up over the processes, in place."""
        if of_hidden.numel():
            dist.all_reduce(of_hidden, group=self.group)

    def lies(self, parameter: torch.Tensor | None) -> DTensor | None:
        """It, where it lies over processes; of another, which may be a copy, nothing is kept."""
        return parameter if isinstance(parameter, DTensor) else None

    def placed(self, gradient: torch.Tensor, lies: DTensor | None) -> torch.Tensor:
        """A gradient of weight or bias, lying as it does."""
        return gradient if lies is None else sharded_like(gradient, lies)

    @torch.no_grad()
    def judged(self, head: output_layer.OutputLayer, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """float32 ``[N, 2]``: the loss in nats, and 1 where the target is the likeliest token."""
        found = torch.empty(len(targets), 2, dtype=torch.float32, device=hidden.device)
        for span, logits in self._chunks(head, hidden):
            found[span, 0] = self.softmax(logits, targets[span]).losses.float()
            found[span, 1] = (self._likeliest(logits) == targets[span]).float()
            del logits  # before the next chunk has its own
        return found

    @torch.no_grad()
    def likeliest(self, head: output_layer.OutputLayer, hidden: torch.Tensor) -> torch.Tensor:
        """int64 ``[N]``: the likeliest token at each position, of equals the first."""
        found = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        for span, logits in self._chunks(head, hidden):
            found[span] = self._likeliest(logits)
            del logits
        return found

    @torch.no_grad()
    def products(self, head: output_layer.OutputLayer, hidden: torch.Tensor) -> torch.Tensor:
        """Products ``[N, V]``, whole on every process: for the few positions that somebody looks at."""
        own = self.head(head, hidden).products(hidden.to(output_layer.product_dtype(hidden)))
        filled = torch.nn.functional.pad(own, (0, self.longest - self.count))
        return torch.cat([*self.gathered(filled)], 1)[:, : self.vocabulary]

    def head(self, head: output_layer.OutputLayer, hidden: torch.Tensor) -> output_layer.Head:
        """This process's rows of a layer, with its input."""
        bias = None if head.bias is None else local(head.bias.detach())
        dtype = output_layer.product_dtype(hidden)
        return output_layer.Head.of(hidden.detach(), local(head.weight.detach()), bias, dtype)

    def positions(self, weight: torch.Tensor) -> int:
        """Positions of a chunk, the same on every process."""
        return output_layer.positions_of_chunk(self.longest, weight, self.memory)

    def blocks(self, logits: torch.Tensor) -> Iterator[slice]:
        """Positions whose logits may be in float32 at one time."""
        return output_layer.spans(len(logits), max(1, output_layer.block_logits(logits) // self.longest))

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """What every process has, ``[T, ...]``, of something that has the same shape everywhere."""
        every = own.new_empty(self.mesh.size(), *own.shape)
        gather_parts(every.view(-1), own.contiguous().view(-1), self.group)
        return every

    def places(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The targets' columns in this process's logits, a valid one in any case, and whether it has them: ``[n]``."""
        places = targets - self.first
        return places.clamp(0, self.count - 1), (places >= 0) & (places < self.count)

    def softmax(self, logits: torch.Tensor, targets: torch.Tensor) -> Softmax:
        """Of this process's logits ``[n, count]`` the softmax over those of all, at least float32."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        own = torch.empty(3, len(logits), dtype=dtype, device=logits.device)
        if self.count == 0:
            own[0], own[1], own[2] = -torch.inf, 0, -torch.inf
        else:
            places, here = self.places(targets)
            for block in self.blocks(logits):
                exact = logits[block].to(dtype)
                own[0, block] = largest = exact.amax(-1)
                wanted = exact.gather(1, places[block, None])[:, 0]
                own[2, block] = wanted.masked_fill(~here[block], -torch.inf)
                own[1, block] = (exact - largest[:, None]).exp_().sum(-1)
        largest, totals, wanted = self.gathered(own).unbind(1)
        most = largest.amax(0)
        return Softmax(most, (totals * (largest - most).exp_()).sum(0), wanted.amax(0))

    def into_gradient(
        self, logits: torch.Tensor, targets: torch.Tensor, softmax: Softmax, weights: torch.Tensor | None
    ) -> None:
        """Turn this process's logits into the gradient of the losses, each times its weight ``[n]``, in place."""
        if self.count == 0:
            return
        places, here = self.places(targets)
        taken = -here.to(softmax.total.dtype)
        for block in self.blocks(logits):
            share = logits[block].to(taken.dtype).sub_(softmax.largest[block, None])
            share.exp_().div_(softmax.total[block, None])
            share.scatter_add_(1, places[block, None], taken[block, None])
            logits[block] = share if weights is None else share.mul_(weights[block, None])

    def _chunks(self, head: output_layer.OutputLayer, hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """The positions of each chunk, and this process's logits at them."""
        layer = self.head(head, hidden)
        for span, _, logits in layer.chunks(size=self.positions(layer.weight)):
            head.transform.apply_(logits)
            yield span, logits
            del logits

    def _likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 ``[n]``: of all processes' logits ``[n, count]`` the token with the largest, of equals the first."""
        own = torch.full((2, len(logits)), -torch.inf, dtype=torch.float64, device=logits.device)  # ids fit in it
        if self.count:
            largest, places = logits.max(-1)
            own[0], own[1] = largest, places + self.first
        largest, tokens = self.gathered(own).unbind(1)
        return tokens.gather(0, largest.argmax(0, keepdim=True))[0].long()

    def _with_new_rows(self, head: TrainableTokens) -> torch.Tensor:
        """This process's rows of a frozen weight with those of new tokens in their places: a copy."""
        own = local(head.base_layer.weight)
        new = entered(head.new_rows, self.group)
        start, stop = (min(max(row - self.first, 0), self.count) for row in (head.first, head.first + len(new)))
        skipped = start + self.first - head.first if stop > start else 0
        # A process that has none of them keeps an empty part: its backward pass comes to the sum of all of them too.
        return torch.cat([own[:start], new[skipped : skipped + stop - start].to(own.dtype), own[stop:]])
