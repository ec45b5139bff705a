"""The feed: in order, one step ahead, errors at their own step."""

import threading
from typing import Any

import pytest

from tuner.train.prefetcher import Prefetcher


class Recorded:
    """Stands in for GlobalBatches: notes who was asked for what."""

    def __init__(self, bad: int | None = None) -> None:
        self.asked: list[int] = []
        self.threads: set[str] = set()
        self._bad = bad
        self.built = threading.Semaphore(0)

    def switch_to(self, *portion: Any) -> None:
        self.portion = portion

    def step(self, i: int) -> Any:
        self.asked.append(i)
        self.threads.add(threading.current_thread().name)
        self.built.release()
        if i == self._bad:
            raise OSError("the disk is gone")
        return f"step {i}"


def test_steps_come_in_order_and_one_ahead() -> None:
    batches: Any = Recorded()
    with Prefetcher(batches, 6) as feed:
        assert feed.step(3) == "step 3"
        assert batches.built.acquire(timeout=10)
        assert batches.built.acquire(timeout=10), "the next step is built while this one is trained on"
        assert batches.asked == [3, 4]
        assert [feed.step(4), feed.step(5)] == ["step 4", "step 5"]
    assert batches.asked == [3, 4, 5], "nothing beyond the plan is built"
    assert threading.current_thread().name not in batches.threads


def test_an_error_comes_at_its_own_step() -> None:
    batches: Any = Recorded(bad=1)
    with Prefetcher(batches, 5) as feed:
        assert feed.step(0) == "step 0"
        with pytest.raises(OSError, match="disk is gone"):
            feed.step(1)


def test_the_first_batch_again_and_again() -> None:
    batches: Any = Recorded()
    with Prefetcher(batches, 10, first_only=True) as feed:
        assert [feed.step(index) for index in range(7, 10)] == ["step 0"] * 3


def test_rows_begin_after_the_step_that_the_data_were_reset_at() -> None:
    batches: Any = Recorded()
    with Prefetcher(batches, 9, start_step=5) as feed:
        assert [feed.step(7), feed.step(8)] == ["step 2", "step 3"]


def test_it_goes_over_to_other_rows_after_the_last_step_of_these() -> None:
    batches: Any = Recorded()
    with Prefetcher(batches, 2) as feed:
        assert [feed.step(0), feed.step(1)] == ["step 0", "step 1"]
        rows: Any = "rows"
        feed.switch_to(rows, 3, start_step=2, end=4)
        assert batches.portion == ("rows", 3)
        assert [feed.step(2), feed.step(3)] == ["step 0", "step 1"]
    assert batches.asked == [0, 1, 0, 1], "nothing beyond a window is built"
