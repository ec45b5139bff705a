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

    def step(self, i: int) -> Any:
        self.asked.append(i)
        self.threads.add(threading.current_thread().name)
        self.built.release()
        if i == self._bad:
            raise OSError("the disk is gone")
        return f"step {i}"


def test_steps_come_in_order_and_one_ahead() -> None:
    batches: Any = Recorded()
    with Prefetcher(batches, 3, 6) as feed:
        assert feed.next() == "step 3"
        assert batches.built.acquire(timeout=10)
        assert batches.built.acquire(timeout=10), "the next step is built while this one is trained on"
        assert batches.asked == [3, 4]
        assert [feed.next(), feed.next()] == ["step 4", "step 5"]
    assert batches.asked == [3, 4, 5], "nothing beyond the plan is built"
    assert threading.current_thread().name not in batches.threads


def test_an_error_comes_at_its_own_step() -> None:
    batches: Any = Recorded(bad=1)
    with Prefetcher(batches, 0, 5) as feed:
        assert feed.next() == "step 0"
        with pytest.raises(OSError, match="disk is gone"):
            feed.next()


def test_the_first_batch_again_and_again() -> None:
    batches: Any = Recorded()
    with Prefetcher(batches, 7, 10, first_only=True) as feed:
        assert [feed.next() for _ in range(3)] == ["step 0"] * 3


def test_it_begins_again_with_other_steps() -> None:
    with Prefetcher(Recorded(), 0, 1) as feed:  # type: ignore[arg-type]
        assert feed.next() == "step 0"
        feed.restart(4, 6)
        assert [feed.next(), feed.next()] == ["step 4", "step 5"]
