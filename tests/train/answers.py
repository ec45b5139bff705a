"""Answers to prompts, made in memory: in pairs, with labels, packed, dealt out to micro-batches and ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.model.tiny import VOCAB
from tuner.data.batches import Batch, StepBatches, collate, without_targets
from tuner.data.prepared import Row

Rows = Sequence[Sequence[int]]
"""The documents of each row, by their numbers."""


@dataclass(frozen=True)
class Document:
    """A prompt and its answer, of which every token is trained, with what a reference gives it."""

    prompt: list[int]
    answer: list[int]
    desirable: bool
    reference: float
    reference_mismatched: float
    margin: float = 0.0

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer


class Answers:
    """So many documents: 2i and 2i + 1 have the same prompt. Each one's partner is the next one with another prompt."""

    def __init__(self, count: int, seed: int = 0, drift: float = -1.5) -> None:
        """``drift`` is added to what the reference gives each mismatched document: the divergence falls by it."""
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(3, VOCAB, int(rng.integers(2, 7))).tolist() for _ in range(-(-count // 2))]
        self.documents = []
        for number in range(count):
            answer = rng.integers(3, VOCAB, int(rng.integers(1, 9))).tolist()
            near, other = rng.normal(0, 2, 2)  # a random model of little training gives each token about 1 / VOCAB
            self.documents.append(
                Document(
                    prompts[number // 2], answer, bool(rng.random() < 0.4),
                    float(np.float32(-len(answer) * np.log(VOCAB) + near)),
                    float(np.float32(other + drift)),
                )
            )  # fmt: skip
        for number, document in enumerate(self.documents):
            length = len(self.documents[self.partner(number)].answer)
            given = float(np.float32(document.reference_mismatched - length * np.log(VOCAB)))
            self.documents[number] = Document(
                document.prompt, document.answer, document.desirable, document.reference, given, number // 2 / 4
            )

    def partner(self, number: int) -> int:
        return (number + 2) % len(self.documents)

    def row(self, numbers: Sequence[int], mismatched: bool = False) -> Row:
        ids, trained, lengths = [], [], []
        for number in numbers:
            prompt = self.documents[number].prompt
            answer = self.documents[self.partner(number) if mismatched else number].answer
            ids += prompt + answer
            trained += [False] * len(prompt) + [True] * len(answer)
            lengths.append(len(prompt) + len(answer))
        chosen = [self.documents[number] for number in numbers]
        columns = {
            "label": np.array([one.desirable for one in chosen]),
            "margin": np.array([one.margin for one in chosen], dtype=np.float32),
            "reference": np.array([one.reference for one in chosen], dtype=np.float32),
            "reference_mismatched": np.array([one.reference_mismatched for one in chosen], dtype=np.float32),
        }
        return Row(np.array(ids), np.array(trained), np.array(lengths, dtype=np.int32), np.array(numbers), columns)

    def step(self, rows: Rows, micro: int, rank: int = 0, world: int = 1) -> StepBatches:
        """A global batch in so many micro-batches of each of ``world`` ranks, rows dealt out in turn."""
        slots = micro * world

        def batch(slot: int, mismatched: bool) -> Batch:
            own = [self.row(numbers, mismatched) for numbers in rows[slot::slots]]
            return collate(own) if own else without_targets(collate([self.row(rows[0], mismatched)]))

        whole = collate([self.row(numbers) for numbers in rows])
        own = range(rank, slots, world)
        return StepBatches(
            row_ids=np.arange(len(rows)), trained_count=len(whole.trained_positions), tokens=len(whole.input_ids),
            micro=[batch(slot, False) for slot in own], trained_per_document=whole.trained_per_document,
            documents=len(whole.documents), columns=whole.columns, mismatched=[batch(slot, True) for slot in own],
        )
