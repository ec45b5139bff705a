"""Paired intervals: they cover the difference as often as they say, and items are paired by what they are."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.errors import DataError
from tuner.evals import figures as module
from tuner.evals.figures import Result, compare, figures_of, read_results, read_task_results, sign_test, write_results


def marks(values: list[float]) -> list[Result]:
    return [{"id": str(i), "figures": {"acc": value}} for i, value in enumerate(values)]


def texts(nats: list[float]) -> list[Result]:
    return [{"id": str(i), "sums": {"nats": n, "tokens": 10, "bytes": 30}} for i, n in enumerate(nats)]


def test_a_model_is_not_different_from_itself() -> None:
    one = marks([0, 1, 1, 0, 1])
    (found,) = compare({"t": one}, {"t": list(reversed(one))})
    assert (found.difference, found.low, found.high, found.p) == (0, 0, 0, 1)
    assert found.verdict == "not shown" and found.first == 0.6


def test_figures_of_texts_are_quotients_of_sums() -> None:
    before, after = texts([20.0, 40.0] * 3), texts([10.0, 20.0] * 3)
    found = {one.figure: one for one in compare({"t": before}, {"t": after})}
    assert found["perplexity"].first == pytest.approx(math.exp(60 / 20))
    assert found["bits_per_byte"].second == pytest.approx(30 / 60 / math.log(2))
    assert all(one.verdict == "better" and one.better == 6 and one.p is None for one in found.values())
    assert found["bits_per_byte"].high < 0
    few = compare({"t": before[:5]}, {"t": after[:5]})
    assert all(one.verdict == "not shown" and one.high < 0 for one in few), "five may agree by chance"


def test_a_clear_difference_is_shown_and_a_lucky_one_is_not() -> None:
    worse, better = [0.0] * 60 + [1.0] * 40, [0.0] * 20 + [1.0] * 80
    (found,) = compare({"t": marks(worse)}, {"t": marks(better)})
    assert found.verdict == "better" and found.low > 0.25 and found.high < 0.55
    assert found.p == pytest.approx(2 * 0.5**40)
    (found,) = compare({"t": marks([0.0] * 99 + [1.0])}, {"t": marks([0.0] * 98 + [1.0, 1.0])})
    assert found.verdict == "not shown" and found.p == 1


def test_the_interval_covers_the_difference_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLES", 400)
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        hard = rng.random(150)
        one, two = ((rng.random(150) < hard**power).astype(float).tolist() for power in (1.0, 0.7))
        truth = 1 / 1.7 - 1 / 2
        (found,) = compare({"t": marks(one)}, {"t": marks(two)}, level=0.9, seed=trial)
        covered += found.low <= truth <= found.high
    assert 165 <= covered <= 195, "of 200, at 90 %"


@given(st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_the_sign_test_is_exact(better: int, worse: int) -> None:
    count, fewer = better + worse, min(better, worse)
    exact = min(1.0, 2 * sum(math.comb(count, k) for k in range(fewer + 1)) / 2**count)
    assert sign_test(better, worse) == pytest.approx(1.0 if count == 0 else exact, rel=1e-9)


def test_other_items_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no task in common: one has a, the other b"):
        compare({"a": marks([1])}, {"b": marks([1])})
    with pytest.raises(DataError, match="2 items are the same; 1 are in the first alone, 0 in the second alone"):
        compare({"a": marks([1, 0, 1])}, {"a": marks([1, 0])})
    with pytest.raises(DataError, match="1 items are the same; 0 are in the first alone, 1 in the second"):
        compare({"a": marks([1])}, {"a": marks([1, 1])})
    with pytest.raises(DataError, match="holds no results of tasks"):
        read_task_results(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"step": 3}\n')
    with pytest.raises(DataError, match=r"a.jsonl:1: is no result of an item"):
        read_task_results(tmp_path)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results = [*marks([0.25])]
    write_results(tmp_path / "t.jsonl", results)
    assert read_results(tmp_path / "t.jsonl") == results
    assert figures_of([]) == {}


def test_an_item_without_a_figure_is_left_out_of_its_mean() -> None:
    results: list[Result] = [{"id": "0", "figures": {"a": 1.0}}, {"id": "1", "figures": {"a": 0.0, "b": 3.0}}]
    assert {name: one.value for name, one in figures_of(results).items()} == {"a": 0.5, "b": 3.0}
