"""The model as tasks ask it: likelihoods in packed rows and greedy answers, on the weights of every process.

Rows are filled before they are dealt out, and depend on no number of processes: each is the same forward wherever it
is computed, so that two processes find the same bits as one.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.evals.task import Likelihood, ScoreRequest
from tuner.model.decode import greedy
from tuner.model.output_layer import Head, OutputLayer, block_logits, product_dtype, spans
from tuner.model.root import CausalLM
from tuner.parallel.fsdp import sync_gradients
from tuner.parallel.gathered import gathered
from tuner.runtime.device import to_device
from tuner.runtime.process import Collective, gloo_group
from tuner.train.step import StepConfig, positions_of

ANSWERED_AT_ONCE = 16
"""Prompts that are decoded side by side."""


@dataclass(eq=False)
class _Document:
    """The tokens of one forward's document, and the requests that are read off it: requests may share a context."""

    ids: tuple[int, ...]
    requests: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Scorer:
    """A model that is asked; every process asks the same, in the same order, and gets every answer."""

    root: CausalLM
    step_config: StepConfig
    tokenizer: TextTokenizer
    row_tokens: int
    """Tokens of a forward at most, unless one document has more."""
    is_whole: bool = True
    """Whether each process can hold the whole model, to answer prompts of its own."""
    between: Callable[[], None] = lambda: None
    """Called before each forward, as often on every process; what it raises ends the work."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.step_config.device

    @torch.no_grad()
    def likelihoods(self, requests: Sequence[ScoreRequest]) -> list[Likelihood]:
        """The likelihood of each request, in their order. Collective; each is computed by one process, once."""
        self.root.eval()
        sync_gradients(self.root, True)
        documents = _documents(requests)
        rows = _rows(documents, self.row_tokens)
        mesh = self.step_config.mesh
        places: list[int] = []
        found: list[torch.Tensor] = []
        for first in range(0, len(rows), mesh.data_size):
            self.between()
            own = first + mesh.data_rank
            in_step = [_Document(rows[-1][-1].ids)]  # with the other processes; nothing is read off it
            row = rows[own] if own < len(rows) else in_step
            found.append(self._judged(row, requests))
            places += [place for document in row for place in document.requests]
        values = torch.cat(found).cpu().numpy() if found else np.empty((0, 2), dtype=np.float32)
        sums = _summed(values, [len(requests[place].continuation) for place in places])
        return self._merged(len(requests), places, sums)

    @torch.no_grad()
    def answers(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], stops: Sequence[Sequence[str]]
    ) -> list[str]:
        """The greedy answer to each prompt, in at most so many tokens. Collective.

        It ends where the model ends it, and before the first of its ``stops``.
        """
        self.root.eval()
        groups = [range(len(prompts))[span] for span in spans(len(prompts), ANSWERED_AT_ONCE)]
        mesh = self.step_config.mesh
        texts: dict[int, str] = {}
        with self._gathered(), self.step_config.autocast():
            for first in range(0, len(groups), mesh.data_size if self.is_whole else 1):
                self.between()
                mine = first + (mesh.data_rank if self.is_whole else 0)
                if mine < len(groups):
                    texts |= self._answered(groups[mine], prompts, limits, stops)
        of_all = Collective(gloo_group()).on_all_ranks(lambda: texts)
        whole = {place: text for own in of_all for place, text in own.items()}
        return [whole[place] for place in range(len(prompts))]

    def _answered(
        self, group: range, prompts: Sequence[Sequence[int]], limits: Sequence[int], stops: Sequence[Sequence[str]]
    ) -> dict[int, str]:
        def ends(place: int, ids: Sequence[int]) -> bool:
            return any(stop in self.tokenizer.decode(ids, True) for stop in stops[group[place]])

        ids = greedy(
            self.root, [prompts[place] for place in group], frozenset(self.tokenizer.eos_ids),
            [limits[place] for place in group], self.step_config.device,
            ends=ends if any(stops[place] for place in group) else None,
        )
        texts = zip(group, (self.tokenizer.decode(answer, True) for answer in ids), strict=True)
        return {place: before_stops(text, stops[place]) for place, text in texts}

    def _gathered(self) -> AbstractContextManager[None]:
        return gathered(self.root) if self.is_whole and self.step_config.mesh.is_sharded else nullcontext()

    def _judged(self, row: Sequence[_Document], requests: Sequence[ScoreRequest]) -> torch.Tensor:
        """float32 ``[N, 2]`` on the device: :func:`judged` at the positions that are asked for, in their order."""
        ids, places, positions, targets = (list[int]() for _ in range(4))
        for document in row:
            end = len(ids) + len(document.ids)
            for number in document.requests:
                continuation = requests[number].continuation
                positions += range(end - len(continuation), end)
                targets += continuation
            places += range(len(document.ids))
            ids += document.ids
        arrays = (np.array(values, dtype=np.int64) for values in (ids, places, targets))
        flat = [to_device(array, self.step_config.device) for array in arrays]
        at = positions_of(np.array(positions, dtype=np.int64), self.step_config)
        lengths = tuple(len(document.ids) for document in row)
        with self.step_config.autocast():
            result: torch.Tensor = self.root(flat[0], flat[1], lengths, at, flat[2], judged)
        return result

    def _merged(self, count: int, places: Sequence[int], sums: npt.NDArray[np.float64]) -> list[Likelihood]:
        """What all processes have found. Collective."""
        mine = (self.step_config.mesh.data_rank, places, sums)
        whole = np.full((count, 2), np.nan)
        times = np.zeros(count, dtype=np.int64)
        # By rank: processes that compute the same rows together found the same.
        found = {rank: (at, values) for rank, at, values in Collective(gloo_group()).on_all_ranks(lambda: mine)}
        for at, values in found.values():
            whole[at] = values
            times[at] += 1
        assert (times == 1).all(), "each request is computed once"
        return [Likelihood(-float(nats), bool(others == 0)) for nats, others in whole]


def judged(hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor) -> torch.Tensor:
    """float32 ``[N, 2]`` of hidden states ``[N, D]``: the loss in nats, and 1 where the target is the likeliest."""
    targets = head.share(targets)
    if head.parts is not None:
        return head.join(head.parts.judged(head, hidden, targets))
    bias = None if head.bias is None else head.bias.detach()
    layer = Head.of(hidden.detach(), head.weight.detach(), bias, product_dtype(hidden))
    found = torch.empty(len(targets), 2, dtype=torch.float32, device=hidden.device)
    for span, _, logits in layer.chunks():
        head.transform.apply_(logits)
        for block in spans(len(logits), max(1, block_logits(logits) // len(head.weight))):
            exact, wanted = logits[block].float(), targets[span][block]
            losses = torch.logsumexp(exact, -1) - exact.gather(1, wanted[:, None])[:, 0]
            found[span][block] = torch.stack([losses, (exact.argmax(-1) == wanted).float()], 1)
        del logits  # before the next chunk has its own
    return head.join(found)


def before_stops(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the ``stops`` in it."""
    return text[: min([at for stop in stops if (at := text.find(stop)) >= 0], default=len(text))]


def _documents(requests: Sequence[ScoreRequest]) -> list[_Document]:
    """The documents of requests, the longest first; those with the same tokens before their last one share theirs."""
    documents: dict[tuple[int, ...], _Document] = {}
    for number, request in enumerate(requests):
        ids = (request.context + request.continuation)[:-1]
        documents.setdefault(ids, _Document(ids)).requests.append(number)
    return sorted(documents.values(), key=lambda document: -len(document.ids))


def _rows(documents: Sequence[_Document], row_tokens: int) -> list[list[_Document]]:
    """The documents in rows of at most so many tokens, in order; a longer one has a row of its own."""
    rows: list[list[_Document]] = []
    room = 0
    for document in documents:
        if len(document.ids) > room:
            rows.append([])
            room = row_tokens
        rows[-1].append(document)
        room -= len(document.ids)
    return rows


def _summed(values: npt.NDArray[np.float32], lengths: Sequence[int]) -> npt.NDArray[np.float64]:
    """float64 ``[requests, 2]`` of positions ``[N, 2]``: nats, and the tokens that greedy decoding would not write."""
    if not lengths:
        return np.empty((0, 2))
    exact = values.astype(np.float64)
    exact[:, 1] = 1 - exact[:, 1]
    summed: npt.NDArray[np.float64] = np.add.reduceat(exact, np.cumsum([0, *lengths[:-1]]), axis=0)
    return summed
