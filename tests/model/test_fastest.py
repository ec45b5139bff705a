"""The fastest way that is right: a table of stand-ins, and what is said of those that are not taken."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tuner.model.fastest import Candidate, Fastest, fastest, seconds_on

RIGHT = [torch.tensor([1.0, -2.0]), torch.tensor([3.0])]
OFF = [torch.tensor([1.0, -2.0]), torch.tensor([3.2])]
NAN = [torch.tensor([1.0, torch.nan]), torch.tensor([3.0])]


def candidate(name: str, results: Sequence[torch.Tensor] | str, took: float | str) -> Candidate:
    def given(value: Any) -> Any:
        if isinstance(value, str):
            raise RuntimeError(f"{value}\nand more")
        return value

    return Candidate(name, lambda: given(results), lambda: given(took))


def seconds(work: Any) -> float:
    took: float = work()
    return took


@pytest.mark.parametrize(
    ("others", "taken", "passed_over"),
    [
        ([("a", RIGHT, 0.5), ("b", RIGHT, 0.4)], "b", {}),
        ([("a", RIGHT, 0.98)], "usual", {}),
        ([("a", RIGHT, 2.0)], "usual", {}),
        ([("a", OFF, 0.01), ("b", RIGHT, 0.9)], "b", {"a": "its results differ by 6.7%"}),
        ([("a", NAN, 0.01)], "usual", {"a": "its results differ by nan%"}),
        ([("a", "no kernel image", 0.01), ("b", RIGHT, 0.5)], "b", {"a": "no kernel image"}),
        ([("a", RIGHT, "out of memory"), ("b", RIGHT, 0.5)], "b", {"a": "out of memory"}),
        ([("a", "", 0.01)], "usual", {"a": "and more"}),
        ([], "usual", {}),
    ],
)
def test_the_fastest_right_one_is_taken(others: list[tuple[Any, ...]], taken: str, passed_over: dict[str, str]) -> None:
    given = [candidate(*other) for other in others]
    found = fastest(candidate("usual", RIGHT, 1.0), given, 2e-2, seconds)
    assert (found.name, found.passed_over) == (taken, passed_over)
    right = {name: took for name, results, took in others if name not in passed_over}
    assert found.milliseconds == pytest.approx({"usual": 1e3, **{name: took * 1e3 for name, took in right.items()}})


def test_what_the_usual_way_raises_is_raised() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        fastest(candidate("usual", "out of memory", 1.0), [], 2e-2, seconds)


def test_it_is_said_in_a_few_words() -> None:
    found = Fastest("b", {"usual": 9.71, "b": 8.0}, {"a": "no kernel image"})
    assert str(found) == "b 8 ms, usual 9.71 ms, a passed over: no kernel image"


def test_work_is_timed_some_rounds_and_the_first_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times, calls = iter([9.0, 9.0, 0.3, 0.1, 0.2, 9.0, 0.2]), []
    clock = iter(value for took in times for value in (100.0, 100.0 + took))
    monkeypatch.setattr("tuner.model.fastest.time.perf_counter", lambda: next(clock))
    assert seconds_on(torch.device("cpu"))(lambda: calls.append(1)) == pytest.approx(0.2)
    assert len(calls) == 7
