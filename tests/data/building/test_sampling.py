"""Shares of sources and held-out documents, against plain Python."""

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.config.numbers import Duration
from tuner.data.building import sampling
from tuner.data.building.encoded import digest
from tuner.data.building.sampling import copies, distinct, hold_out, shared
from tuner.data.building.spec import Source
from tuner.errors import DataError


def digests(documents: list[list[int]]) -> np.ndarray:
    ids = np.array([token for document in documents for token in document], dtype=np.uint32)
    return digest(ids, np.cumsum([0, *map(len, documents)]))


def share(**amount: Any) -> Source:
    return Source("", [], **amount)


@given(
    documents=st.integers(0, 300), weight=st.sampled_from([0.001, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.75]),
    count=st.none() | st.integers(1, 700), seed=st.integers(0, 2**64 - 1),
)
def test_a_share_is_exact_and_even(documents: int, weight: float, count: int | None, seed: int) -> None:
    source = share() if count is None and weight == 1 else share(count=count) if count else share(weight=weight)
    taken = copies(source, documents, seed, 0)
    wanted = 0 if not documents else count or math.floor(Fraction(source.weight) * documents + Fraction(1, 2))
    assert taken.sum() == wanted
    assert len(taken) == documents
    if documents:
        assert set(taken.tolist()) <= {wanted // documents, -(-wanted // documents)}
    assert np.array_equal(taken, copies(source, documents, seed, 0))


def test_what_is_drawn_depends_on_seed_and_source_and_is_kept_for_ever() -> None:
    half = share(weight=0.5)
    drawn = [copies(half, 1000, seed, source).tolist() for seed, source in ((1, 0), (2, 0), (1, 1))]
    assert len(set(map(tuple, drawn))) == 3
    assert np.flatnonzero(copies(half, 10, 42, 0)).tolist() == [4, 5, 6, 7, 9]
    assert not share(weight=2.0).is_drawn
    assert share(weight=2.5).is_drawn
    assert share(count=3).is_drawn


@given(documents=st.lists(st.lists(st.integers(0, 3), max_size=2), max_size=60))
def test_documents_are_told_apart(documents: list[list[int]]) -> None:
    half = len(documents) // 2
    table = digests(documents)
    assert distinct(table) == len({tuple(document) for document in documents})
    sides = [{tuple(document) for document in side} for side in (documents[:half], documents[half:])]
    assert shared(table[:half], table[half:]) == len(sides[0] & sides[1])


@given(pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60), chunk=st.integers(1, 70))
def test_digests_that_share_a_half_are_told_apart(pairs: list[tuple[int, int]], chunk: int) -> None:
    table = np.array(pairs, dtype=np.uint64).reshape(-1, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_CHUNK", chunk)
        assert distinct(table[:20], table[20:]) == len(set(pairs))
        patch.setattr(sampling, "_AT_ONCE", 7)
        table[:, 0] <<= 62  # so that first bits differ
        assert distinct(table[:20], table[20:]) == len(set(pairs))


def test_what_is_held_out_depends_on_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    table = digests([[number % 31 if number % 3 else number] for number in range(1000)])
    expected = hold_out(table, Duration.parse("35%"), 5)
    assert expected.sum() == 350
    monkeypatch.setattr(sampling, "_CHUNK", 7)
    assert np.array_equal(hold_out(table, Duration.parse("35%"), 5), expected)


@given(
    documents=st.lists(st.integers(0, 40), min_size=2, max_size=120), wanted=st.integers(1, 60),
    seed=st.integers(0, 2**64 - 1),
)
def test_groups_of_equal_documents_stay_together(documents: list[int], wanted: int, seed: int) -> None:
    table = digests([[document] for document in documents])
    split = Duration.parse(f"{wanted} documents")
    sizes = Counter(documents)
    if wanted >= len(documents) or min(sizes.values()) > wanted:
        with pytest.raises(DataError):
            hold_out(table, split, seed)
        return
    held = hold_out(table, split, seed)
    sides = [{d for d, flag in zip(documents, held, strict=True) if flag is side} for side in (True, False)]
    assert not sides[0] & sides[1]
    missing = wanted - held.sum()
    assert missing >= 0
    # What is left out would not have fitted.
    assert all(sizes[document] > missing for document in sides[1])
    # The order of the documents in the files changes nothing about which are held out.
    turned = hold_out(table[::-1], split, seed)[::-1]
    assert np.array_equal(held, turned)


def test_the_seed_chooses_and_the_choice_is_kept_for_ever() -> None:
    table = digests([[i, i + 1] for i in range(200)])
    split = Duration.parse("2%")
    assert np.flatnonzero(hold_out(table, split, 42)).tolist() == [33, 73, 126, 195]
    assert not np.array_equal(hold_out(table, split, 42), hold_out(table, split, 43))
