"""What a method measures of held-out documents: its own loss and figures, of each source and of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from tuner.data.batches import Batch, GlobalBatches, selected, step_of, without_targets
from tuner.data.prepared import PackedRows
from tuner.model.root import CausalLM
from tuner.parallel.fsdp import sync_gradients
from tuner.train.methods.method import Counts, Method, Terms, logged
from tuner.train.step import StepConfig, microbatch_terms, of_step

if TYPE_CHECKING:
    from tuner.train.routing import HeldOutRouting


class Means(NamedTuple):
    """A method's loss, its figures by name (a mean over nothing is left out), and how many tokens were trained."""

    loss: float
    figures: dict[str, float]
    tokens: int


@dataclass(frozen=True)
class Sources:
    """How many sources the documents are from, and from which each is."""

    count: int
    of: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
    """From the numbers of documents to their sources."""

    def split(self, batch: Batch, expected: Sequence[int]) -> Iterator[tuple[int, Batch]]:
        """The batch's documents, those of each source by themselves; of a source without any, where one is
        ``expected``, a batch that adds nothing."""
        if self.count == 1:
            yield 0, batch
            return
        source = self.of(batch.documents)
        for i in sorted({*source.tolist(), *expected}):
            yield i, selected(batch, source == i) if (source == i).any() else without_targets(batch)

    def of_rows(self, rows: PackedRows, row_ids: npt.NDArray[np.int64]) -> Sequence[int]:
        """The sources of which there are documents in these rows."""
        if self.count == 1:
            return (0,)
        documents = np.concatenate([rows.row(int(i)).documents for i in row_ids])
        return tuple(np.unique(self.of(documents)).tolist())


class Totals:
    """Sums of a method's terms and what they are divided by, of each source, in float64; read once."""

    def __init__(self, sources: int, step_config: StepConfig) -> None:
        self._sources, self._device, self._mesh = sources, step_config.device, step_config.mesh
        self._terms: Terms | None = None
        self._names: tuple[str, ...] = ()
        self._sums = torch.empty(0)
        self._counts: npt.NDArray[np.float64] = np.empty(0)

    def add(self, source: int, terms: Terms, counts: Counts, trained: int) -> None:
        """The terms of documents of one source, their counts, and how many tokens are trained in them."""
        values = torch.stack([one.value.double() for one in (*terms.losses.values(), *terms.figures.values())])
        if self._terms is None:
            self._terms, self._names = terms, tuple(counts)
            self._sums = torch.zeros(self._sources, len(values), dtype=torch.float64, device=self._device)
            self._counts = np.zeros((self._sources, len(counts) + 1), dtype=np.float64)
        self._sums[source] += values
        self._counts[source] += (*counts.values(), trained)

    def means(self) -> tuple[Means, list[Means]]:
        """The means over all sources, and over each; over the documents of all processes. Collective."""
        both = torch.cat([self._sums, torch.as_tensor(self._counts).to(self._sums)], 1)
        if dist.is_initialized():
            dist.all_reduce(both)
            both[:, : self._sums.shape[1]] /= self._mesh.tensor
            both[:, self._sums.shape[1] :] /= self._mesh.row_holders
        each = [self._means(row) for row in both.tolist()]
        return self._means(both.sum(0).tolist()), each

    def _means(self, row: Sequence[float]) -> Means:
        assert self._terms is not None, "there is at least one batch"
        losses, figures = self._terms
        values = dict(zip((*losses, *figures), row, strict=False))
        *numbers, trained = row[len(values) :]
        counts = dict(zip(self._names, numbers, strict=True))
        pers = {name: one.per for name, one in (losses | figures).items()}
        means = {name: values[name] / counts[per] for name, per in pers.items() if counts[per]}
        loss = sum(means.get(name, 0.0) for name in losses)
        return Means(loss, {n: means[n] for n in logged(self._terms) if n in means}, int(trained))


@torch.no_grad()
def term_means(
    root: CausalLM,
    step_config: StepConfig,
    method: Method,
    batches: GlobalBatches,
    sources: Sources,
    between: Callable[[], None],
    routing: HeldOutRouting | None = None,
) -> tuple[Means, list[Means]]:
    """The method's means over all rows, and over those of each source, every process taking its share. Collective.

    Documents of one source go through the model by themselves. No document sees another: nothing changes by that but
    whose figures they are. What their routers choose is counted by ``routing``.
    """
    totals = Totals(sources.count, step_config)
    sync_gradients(root, True)
    for index in range(batches.steps_per_epoch):
        step = batches.step(index)
        shared = of_step(root, method, step, step_config)
        # Sharded processes compute together: each takes every source that any of them has.
        expected = sources.of_rows(batches.rows, step.row_ids) if step_config.mesh.data_size > 1 else ()
        for batch in step.micro:
            between()
            for source, part in sources.split(batch, expected):
                terms = microbatch_terms(root, method, part, step_config, shared)
                if routing is not None:
                    routing.note(part)
                totals.add(source, terms, method.counts(step_of([part])), len(part.trained_positions))
    return totals.means()
