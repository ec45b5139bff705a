"""Loss on held-out documents, of each source and of all, and sample answers.

Most methods are measured by the cross-entropy of the trained tokens, and those that say so by their own terms
(:mod:`tuner.train.evaluate`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from tuner.data.batches import Batch, GlobalBatches, selected, step_of, without_targets
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.prepared import PackedRows, PreparedSample
from tuner.errors import DataError, RecipeError
from tuner.model.build import position_limit
from tuner.model.root import CausalLM, position_losses
from tuner.parallel.fsdp import sync_gradients
from tuner.train.methods.method import Counts, Method, Terms, logged
from tuner.train.step import StepConfig, TrainState, microbatch_terms, on_device, step_estimates

if TYPE_CHECKING:
    from tuner.train.routing import HeldOutRouting

# What a method measures of held-out documents: its own loss and figures, of each source and of all.


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

    def means(self) -> tuple[Evaluation, list[Evaluation]]:
        """The means over all sources, and over each; over the documents of all processes. Collective."""
        both = torch.cat([self._sums, torch.as_tensor(self._counts).to(self._sums)], 1)
        if dist.is_initialized():
            dist.all_reduce(both)
            both[:, : self._sums.shape[1]] /= self._mesh.tensor
            both[:, self._sums.shape[1] :] /= self._mesh.row_holders
        each = [self._means(row) for row in both.tolist()]
        return self._means(both.sum(0).tolist()), each

    def _means(self, row: Sequence[float]) -> Evaluation:
        assert self._terms is not None, "there is at least one batch"
        losses, figures = self._terms
        values = dict(zip((*losses, *figures), row, strict=False))
        *numbers, trained = row[len(values) :]
        counts = dict(zip(self._names, numbers, strict=True))
        pers = {name: one.per for name, one in (losses | figures).items()}
        means = {name: values[name] / counts[per] for name, per in pers.items() if counts[per]}
        loss = sum(means.get(name, 0.0) for name in losses)
        return Evaluation(loss, int(trained), figures={n: means[n] for n in logged(self._terms) if n in means})


@torch.no_grad()
def term_means(
    root: CausalLM, step_config: StepConfig, method: Method, batches: GlobalBatches, held: HeldOut,
    between: Callable[[], None], routing: HeldOutRouting | None = None,
) -> tuple[Evaluation, list[Evaluation]]:
    """The method's means over all rows, and over those of each source, every process taking its share. Collective.

    Documents of one source go through the model by themselves. No document sees another: nothing changes by that but
    whose figures they are. What their routers choose is counted by ``routing``.
    """
    totals = Totals(len(held.sources), step_config)
    sync_gradients(root, True)
    for index in range(batches.steps_per_epoch):
        step = batches.step(index)
        shared = step_estimates(root, method, step, step_config)
        # Sharded processes compute together: each takes every source that any of them has.
        expected = held.of_rows(step.row_ids) if step_config.mesh.data_size > 1 else ()
        for batch in step.micro:
            between()
            for source, part in held.split(batch, expected):
                terms = microbatch_terms(root, method, part, step_config, shared)
                if routing is not None:
                    routing.note(part)
                totals.add(source, terms, method.counts(step_of([part])), len(part.trained_positions))
    return totals.means()


MAX_ANSWER_TOKENS = 128


class EvaluationCutError(Exception):
    """Raised by what an evaluation calls between its forwards, on every rank alike, to end it without a result."""


@dataclass
class HeldOut:
    """Held-out rows, and whose their documents are; a portion of the data may have its own."""

    rows: PackedRows
    sources: tuple[str, ...]
    """The sources' names, each its own."""
    documents: tuple[int, ...]
    """Documents of each; those of one source lie together, in the order of the sources."""
    samples: Sequence[PreparedSample] = ()
    """Prompts of them that may be answered, with the answers that the data has."""

    def become(self, other: HeldOut | None, name: str) -> None:
        """Be those that are held out with the portion of this name. Raises DataError where there are none."""
        if other is None:
            raise DataError(f"{name}: no held-out rows", hint="put rows there, or name one file for all in data.eval")
        self.rows, self.sources, self.documents = other.rows, other.sources, other.documents
        self.samples = other.samples

    def source_of(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64[documents]: the source of each, by its place."""
        return np.searchsorted(np.cumsum(self.documents), documents, side="right")

    def by_source(self, batch: Batch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The batch's trained positions, those of one source together, and how many each source has."""
        if len(self.sources) == 1:
            return batch.trained_positions, np.array([len(batch.trained_positions)])
        source = self.source_of(batch.documents[batch.document_of_trained])
        order = np.argsort(source, kind="stable")
        return batch.trained_positions[order], np.bincount(source, minlength=len(self.sources))

    def split(self, batch: Batch, expected: Sequence[int]) -> Iterator[tuple[int, Batch]]:
        """The batch's documents, those of each source by themselves; of a source without any, where one is
        ``expected``, a batch that adds nothing."""
        if len(self.sources) == 1:
            yield 0, batch
            return
        source = self.source_of(batch.documents)
        for i in sorted({*source.tolist(), *expected}):
            yield i, selected(batch, source == i) if (source == i).any() else without_targets(batch)

    def of_rows(self, row_ids: npt.NDArray[np.int64]) -> Sequence[int]:
        """The sources of which there are documents in these rows."""
        if len(self.sources) == 1:
            return (0,)
        documents = np.concatenate([self.rows.row(int(i)).documents for i in row_ids])
        return tuple(np.unique(self.source_of(documents)).tolist())


@dataclass(frozen=True)
class Evaluation:
    """A loss over so many trained tokens, in nats for each of them or whatever the method's loss is a mean of; of each
    source too, where there are several."""

    loss: float
    tokens: int
    sources: dict[str, Evaluation] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    """What else a method that is measured by its own terms has measured; a mean over nothing is left out."""

    def line(self) -> dict[str, float]:
        """The figures as `metrics.jsonl` names them: `loss`, `accuracy`, then `loss/<source>`, `accuracy/<source>`."""
        own = {"loss": self.loss, **self.figures}
        parts = {source: part.line() for source, part in self.sources.items()}
        return own | {f"{name}/{source}": part[name] for name in own for source, part in parts.items() if name in part}


@dataclass(frozen=True)
class ByTerms:
    """A method that is measured by its own terms, over global batches of so many rows."""

    method: Method
    global_batch_size: int

    @staticmethod
    def of(method: Method, global_batch_size: int) -> ByTerms | None:
        """None for a method that is measured by the cross-entropy of the trained tokens."""
        return ByTerms(method, global_batch_size) if method.by_terms else None

    def batches(self, of_tokens: GlobalBatches) -> GlobalBatches:
        """Its own, where those of tokens would be these."""
        return replace(
            of_tokens, global_batch_size=self.global_batch_size, by_document=self.method.by_document,
            mismatched=self.method.mismatched,
        )


def check_metric(metric: str | None, held: HeldOut | None, figures: Iterable[str]) -> None:
    """Raise RecipeError, naming what there is, for a figure that evaluations of these held-out rows do not measure."""
    if metric is not None and held is not None:
        require_metric(metric, held.sources, figures)


def require_metric(metric: str, sources: Sequence[str], figures: Iterable[str]) -> None:
    """Raise RecipeError, naming what there is, for a figure that evaluations of these sources do not measure."""
    of_all = [f"eval/{name}" for name in ("loss", *figures)]
    names = of_all + [f"{name}/{source}" for name in of_all for source in (sources if len(sources) > 1 else ())]
    if metric not in names:
        raise RecipeError(f"checkpoint.keep_best: no evaluation measures {metric}", hint=f"write {' or '.join(names)}")


def source_names(paths: Sequence[str]) -> tuple[str, ...]:
    """Short names of sources that tell them apart: file stems, with as many directories before as it takes.

    A path that is there twice gets a number.
    """
    parts = [[part for part in PurePath(path).parts if part != os.sep] or [path] for path in paths]
    names = [_stem(part[-1]) for part in parts]
    depth = 1
    while len(set(names)) < len(names) and depth < max(map(len, parts)):
        depth += 1
        again = {name for name in names if names.count(name) > 1}
        names = [
            "/".join((*part[-depth:-1], _stem(part[-1]))) if name in again else name
            for name, part in zip(names, parts, strict=True)
        ]
    before = [names[:i].count(name) for i, name in enumerate(names)]
    return tuple(f"{name}#{count + 1}" if count else name for name, count in zip(names, before, strict=True))


def held_out(rows: PackedRows, documents: Sequence[int], paths: Sequence[str]) -> HeldOut:
    """Held-out rows of the sources at `paths`, of which each gave so many `documents`; those that gave none are out."""
    names = source_names(paths)
    given = [(name, count) for name, count in zip(names, documents, strict=True) if count]
    return HeldOut(rows, tuple(name for name, _ in given), tuple(count for _, count in given))


@torch.no_grad()
def evaluate(
    root: CausalLM, step_config: StepConfig, held: HeldOut, micro_batch_size: int, max_rows: int | None,
    between: Callable[[], None] = lambda: None, by_terms: ByTerms | None = None,
) -> Evaluation:
    """Mean losses over the held-out rows, every process taking its share in one pass. Collective.

    ``between`` is called before each batch, as often on every process. ``by_terms`` is a method that is measured by its
    own terms, in place of the cross-entropy of the trained tokens.

    Sums are kept in float64 on the device, one for each source, and read once at the end; the whole's is their sum.
    """
    root.eval()
    batches = GlobalBatches(
        held.rows, seed=0, shuffle=False, global_batch_size=micro_batch_size * step_config.mesh.data_size,
        micro_batch_size=micro_batch_size, rank=step_config.mesh.data_rank, world_size=step_config.mesh.data_size,
        max_rows=max_rows,
    )
    routing = _routing(root, step_config)
    if by_terms is None:
        whole, each = token_means(root, step_config, batches, held, between, routing)
    else:
        whole, each = term_means(root, step_config, by_terms.method, by_terms.batches(batches), held, between, routing)
    parts = {name: one for name, one in zip(held.sources, each, strict=True) if one.tokens}
    figures = whole.figures if routing is None else {**whole.figures, **routing.figures()}
    return replace(whole, sources=parts if len(held.sources) > 1 else {}, figures=figures)


def token_means(
    root: CausalLM, step_config: StepConfig, batches: GlobalBatches, held: HeldOut, between: Callable[[], None],
    routing: HeldOutRouting | None = None,
) -> tuple[Evaluation, list[Evaluation]]:
    """The mean cross-entropy of the trained tokens of all rows, and of those of each source. Collective."""
    sums = torch.zeros(len(held.sources), dtype=torch.float64, device=step_config.device)
    counts = np.zeros(len(held.sources), dtype=np.int64)
    sync_gradients(root, True)
    for index in range(batches.steps_per_epoch):
        between()
        for batch in batches.step(index).micro:
            positions, own = held.by_source(batch)
            losses = batch_losses(root, step_config, batch, positions)
            if routing is not None:
                routing.note(batch)
            # Slices and not an indexed sum: the same order of additions on every device.
            sums += torch.stack([part.sum(dtype=torch.float64) for part in losses.split(own.tolist())])
            counts += own
    both = torch.stack([sums, torch.as_tensor(counts).to(sums)])
    if dist.is_initialized():
        dist.all_reduce(both)
        both /= step_config.mesh.row_holders
    totals, numbers = both.tolist()
    each = [Evaluation(total / max(1, number), int(number)) for total, number in zip(totals, numbers, strict=True)]
    tokens = int(sum(numbers))
    return Evaluation(sum(totals) / max(1, tokens), tokens), each


def _routing(root: CausalLM, step_config: StepConfig) -> HeldOutRouting | None:
    """What counts how the routers choose, where that is part of the loss."""
    if root.parts.router_loss is None:
        return None
    from tuner.train.routing import HeldOutRouting

    return HeldOutRouting(root.parts.router_loss, step_config.mesh, step_config.device)


def answer_samples(
    state: TrainState, samples: Sequence[PreparedSample], tokenizer: TextTokenizer,
    between: Callable[[], None] = lambda: None,
) -> list[str]:
    """Greedy answers to held-out prompts. Collective: every rank decodes the same prompts, all of them together.

    An answer ends at an end token, at the model's last position, after MAX_ANSWER_TOKENS, or where it is a good part
    longer than what was wanted. ``between`` is called before each forward.
    """
    from tuner.model.decode import greedy

    state.root.eval()
    limits = answer_limits(samples, tokenizer, state.root.model.config)
    prompts = [sample.prompt_ids for sample in samples]
    with state.step_config.autocast():
        device = state.step_config.device
        answers = greedy(state.root, prompts, frozenset(tokenizer.eos_ids), limits, device, between)
    return [tokenizer.decode(ids) for ids in answers]


def answer_limits(samples: Sequence[PreparedSample], tokenizer: TextTokenizer, config: PretrainedConfig) -> list[int]:
    """The most tokens that the answer to each prompt may have."""
    max_positions = position_limit(config) or sys.maxsize
    wanted = [len(tokenizer.encode(sample.reference)) for sample in samples]
    return [
        min(MAX_ANSWER_TOKENS, count + count // 4 + 8, max(0, max_positions - len(sample.prompt_ids)))
        for sample, count in zip(samples, wanted, strict=True)
    ]


def batch_losses(root: CausalLM, step_config: StepConfig, batch: Batch, at: npt.NDArray[np.int64]) -> torch.Tensor:
    """float32 ``[N]``: the losses ``at`` N trained positions of one batch, on the device, without gradients."""
    with step_config.autocast(), torch.no_grad():
        return root(*on_device(batch, at, step_config), position_losses)  # type: ignore[no-any-return]


def _stem(name: str) -> str:
    """`orders` for `orders.jsonl.gz`; a hub name keeps its split."""
    return name.split(".", maxsplit=1)[0] or name
