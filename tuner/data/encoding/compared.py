"""Pairs of answers and labelled answers to documents: each answer is encoded as one that is learned by itself.

Both documents of a pair have the same ids before the answer: the prompt's own, since before every trained answer stand
the ids that its prompt alone has. A record of which that cannot be shown for both answers is refused.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tuner.config.methods import ExampleKind
from tuner.data.encoding.encode import CHECKS, Encoder
from tuner.data.encoding.flat import EncodedBatch
from tuner.data.encoding.place import Document, Placed
from tuner.data.ranges import Ints, ranges
from tuner.data.reading.examples import Compared, Example, Labelled, Pair, answers_of
from tuner.data.reading.problems import RecordProblem

NO_ONE_TEXT = "no one text of the conversation has an exact mask for every trained answer, and the row is one document"
EQUAL = "chosen and rejected become the same tokens"
OTHER_PROMPT = "the template writes the prompt of chosen and that of rejected differently"
WITH_MARGIN = "pairs with a margin"
AT_ITS_TURN = "answers written as at their turn: the whole conversation has no exact mask"
_SIDES = ("chosen", "rejected")


class AnyEncoder:
    """Encodes examples of any kind."""

    def __init__(self, encoder: Encoder, kind: ExampleKind) -> None:
        """All examples are of this `kind`, which is the method's."""
        self._encoder = encoder
        self._kind = kind

    def encode(
        self, examples: Sequence[Example | Compared], total_bytes: int | None = None, checks: int = CHECKS
    ) -> EncodedBatch:
        """Encode as `Encoder.encode` does. The documents of a pair lie next to each other, or are both left out.

        Labels and margins become columns; `prompt_tokens` are then all before the first trained token.
        """
        parts = [part for example in examples for part in answers_of(example)]
        batch = self._encoder.encode(parts, total_bytes, checks)
        if self._kind == "preference":
            return _compared(batch, 2, "margin", _margins(examples))
        if self._kind == "unpaired":
            labels = [example.label for example in examples if isinstance(example, Labelled)]
            return _compared(batch, 1, "label", np.array(labels, dtype=np.bool_))
        return batch

    def explain(self, example: Example | Compared) -> Placed:
        """Encode one example with the rule of every token. Raises RecordProblem."""
        if not isinstance(example, (Pair, Labelled)):
            return self._encoder.explain(example)
        batch = self.encode([example])
        if batch.problems:
            raise batch.problems[0]
        documents = [self._encoder.explain(part).documents[0] for part in answers_of(example)]
        return Placed([_with_prompt(document) for document in documents], ())


def _with_prompt(document: Document) -> Document:
    trained = document.trained
    return replace(document, prompt_tokens=int(np.argmax(trained)) if trained.any() else len(trained))


def _compared(batch: EncodedBatch, each: int, name: str, values: npt.NDArray[np.generic]) -> EncodedBatch:
    """The documents of answers as those of examples, of which `each` belong to one, with a column of their `values`."""
    problems: dict[int, RecordProblem] = {}
    for part, problem in sorted(batch.problems.items()):
        problems.setdefault(part // each, _placed(problem, _SIDES[part % 2] if each == 2 else None))
    for part in np.flatnonzero(np.bincount(batch.records, minlength=len(values) * each) > 1).tolist():
        problems.setdefault(part // each, RecordProblem(NO_ONE_TEXT, 1))
    for part, left_out in batch.by_answer.items():
        if left_out:
            problems.setdefault(part // each, RecordProblem(NO_ONE_TEXT, 1))
    records = batch.records // each
    whole = batch.only(~np.isin(records, list(problems)))
    prompts = _prompts(whole)
    if each == 2:
        pairs = whole.records[::2] // 2
        for reason, found in _unlike(whole, prompts):
            problems |= {record: RecordProblem(reason, 1) for record in pairs[found].tolist() if record not in problems}
        keep = ~np.isin(whole.records // 2, list(problems))
        whole, prompts = whole.only(keep), prompts[keep]
    notes = Counter(batch.notes)
    if batch.by_answer:
        notes[AT_ITS_TURN] += sum(part // each not in problems for part in batch.by_answer)
    own = whole.records // each
    column = values[own]
    if name == "margin" and (known := int((~np.isnan(column[::2])).sum())):
        notes[WITH_MARGIN] += known
    return replace(
        whole, prompt_tokens=prompts.astype(np.uint32), records=own, problems=problems, by_answer={}, notes=notes,
        fast=min(batch.fast, len(own)), columns={name: column},
    )  # fmt: skip


def _placed(problem: RecordProblem, side: str | None) -> RecordProblem:
    """The problem of one answer's document, with the key of that answer for its place."""
    if side is None:
        return problem
    return RecordProblem(problem.reason, problem.col if not problem.path else None, (side,), problem.hint)


def _prompts(batch: EncodedBatch) -> Ints:
    """int64[documents]: tokens before the first trained one; all of them where none is."""
    at = np.append(np.flatnonzero(batch.trained), len(batch.trained))
    first = at[np.searchsorted(at, batch.offsets[:-1])]
    prompts: Ints = np.minimum(first, batch.offsets[1:]) - batch.offsets[:-1]
    return prompts


def _unlike(batch: EncodedBatch, prompts: Ints) -> list[tuple[str, npt.NDArray[np.bool_]]]:
    """Reasons why pairs of neighbours are no two answers to one prompt, each with bool[pairs]."""
    lengths = np.diff(batch.offsets)
    chosen, rejected = slice(None, None, 2), slice(1, None, 2)
    learned = (prompts < lengths)[chosen] & (prompts < lengths)[rejected]  # the others are left out for another reason
    alike = prompts[chosen] == prompts[rejected]
    shared = _equal_tokens(batch, np.where(alike, prompts[chosen], 0))
    same_length = lengths[chosen] == lengths[rejected]
    equal = same_length & _equal_tokens(batch, np.where(same_length, lengths[chosen], 0))
    return [(EQUAL, equal), (OTHER_PROMPT, learned & ~(alike & shared))]


def _equal_tokens(batch: EncodedBatch, counts: Ints) -> npt.NDArray[np.bool_]:
    """bool[pairs]: whether both documents of a pair begin with the same `counts` ids."""
    starts = batch.offsets[:-1]
    one, other = (ranges(first, counts) for first in (starts[::2], starts[1::2]))
    differs = batch.input_ids[one] != batch.input_ids[other]
    owner = np.repeat(np.arange(len(counts)), counts)
    equal: npt.NDArray[np.bool_] = np.bincount(owner[differs], minlength=len(counts)) == 0
    return equal


def _margins(examples: Sequence[Example | Compared]) -> npt.NDArray[np.float32]:
    """float32[examples]: by how much chosen answers are preferred; NaN where a pair does not say."""
    margins = (example.margin for example in examples if isinstance(example, Pair))
    return np.array([np.nan if margin is None else margin for margin in margins], dtype=np.float32)
