"""Many encoded documents as flat arrays."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tuner.data.encoding.flat import Ints, offsets_of
from tuner.data.encoding.place import Document
from tuner.data.reading.problems import RecordProblem


@dataclass(frozen=True)
class EncodedBatch:
    """n documents, flat, in the order of the examples that they come from."""

    input_ids: npt.NDArray[np.uint32]
    """uint32[tokens]"""
    trained: npt.NDArray[np.bool_]
    """bool[tokens]: whether the token itself is to be learned."""
    offsets: Ints
    """int64[n + 1]"""
    prompt_tokens: npt.NDArray[np.uint32]
    """uint32[n]: tokens before the last answer, as a model is prompted with them; 0 where there is none."""
    records: Ints
    """int64[n]: the example that each document comes from, ascending; those of one example are in its order."""
    problems: dict[int, RecordProblem] = field(default_factory=dict)
    """Example -> why there is no document."""
    fast: int = 0
    """Documents whose ids the fast encoder gave."""
    escaped: int = 0
    """Documents in which a written-out control token was encoded as ordinary characters."""
    notes: Counter[str] = field(default_factory=Counter)
    by_answer: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Conversations of which each answer is a document -> the reasons of answers that have none."""


def joined(batch: EncodedBatch | None, placed: dict[int, list[Document]]) -> EncodedBatch:
    """One batch of documents that were encoded together and others, by the order of their examples."""
    extra = [i for i in sorted(placed) for _ in placed[i]]
    documents = [document for i in sorted(placed) for document in placed[i]]
    ids = [document.input_ids.astype(np.uint32) for document in documents]
    trained = [document.trained for document in documents]
    lengths = np.array([len(part) for part in ids], dtype=np.int64)
    prompts = np.array([document.prompt_tokens for document in documents], dtype=np.uint32)
    records = np.array(extra, dtype=np.int64)
    if batch is not None and not extra:
        return batch
    if batch is not None:
        ids, trained = [batch.input_ids, *ids], [batch.trained, *trained]
        lengths = np.concatenate([np.diff(batch.offsets), lengths])
        prompts = np.concatenate([batch.prompt_tokens, prompts])
        records = np.concatenate([batch.records, records])
    order = np.argsort(records, kind="stable")
    starts = offsets_of(lengths)[:-1][order]
    offsets = offsets_of(lengths[order])
    at = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths[order])
    flat_ids = np.concatenate([np.empty(0, dtype=np.uint32), *ids])
    flat_trained = np.concatenate([np.empty(0, dtype=np.bool_), *trained])
    return EncodedBatch(
        flat_ids[at], flat_trained[at], offsets, prompts[order], records[order], fast=0 if batch is None else batch.fast
    )
