"""What a process is doing, read by another one; and the seconds before a first step, each phase its own."""

from pathlib import Path

import pytest

from tests.fixtures.tables import cases
from tuner.runtime import phase, startup


@pytest.fixture(autouse=True)
def _no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase, "_status", None)
    monkeypatch.setattr(phase, "_words", "")


def test_the_last_words_are_seen_in_the_file(tmp_path: Path) -> None:
    assert (phase.at(), phase.at_last(tmp_path / "board")) == ("", "")
    phase.enter("set-up")
    phase.publish(tmp_path / "board")
    assert phase.at() == phase.at_last(tmp_path / "board") == " at set-up"
    phase.enter("evaluation after step 12")
    phase.enter("step 13, data")
    assert phase.at_last(tmp_path / "board") == " at step 13, data"


def test_words_too_long_are_cut_between_characters(tmp_path: Path) -> None:
    phase.publish(tmp_path / "board")
    phase.enter("ä" * phase.STATUS_BYTES)
    assert phase.at_last(tmp_path / "board") == " at " + "ä" * (phase.STATUS_BYTES // 2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(startup.time, "monotonic", lambda: now[0])
    return now


def test_a_phase_inside_another_is_taken_off_it_and_all_add_up(clock: list[float]) -> None:
    startup.begin()
    clock[0] += 1  # other
    with startup.phase("weights"):
        clock[0] += 2
        with startup.phase("checks"):
            clock[0] += 4
        clock[0] += 8
    with startup.phase("weights"):
        clock[0] += 16
    startup.remark("it was known")
    startup.remark("it was known")
    seconds, remarks = startup.end()
    assert seconds == {"weights": 26.0, "checks": 4.0, "other": 1.0}
    assert list(seconds)[-1] == "other"
    assert startup.in_words(seconds, remarks) == "31 s: weights 26, checks 4, other 1; it was known"


def test_nothing_is_measured_outside_of_a_start(clock: list[float]) -> None:
    startup.begin()
    startup.end()
    with startup.phase("evaluation"):
        clock[0] += 5
    startup.remark("after")
    assert not startup.is_begun()
    startup.begin()
    assert startup.end() == ({"other": 0.0}, ())


def test_a_start_that_failed_leaves_nothing_to_the_next(clock: list[float]) -> None:
    startup.begin()
    with pytest.raises(ZeroDivisionError), startup.phase("plan"):
        clock[0] += 3
        raise ZeroDivisionError
    startup.begin()
    clock[0] += 1
    assert startup.end()[0] == {"other": 1.0}


def test_a_process_has_loaded_libraries_before_it_began() -> None:
    startup.begin(with_process=True)
    seconds, _ = startup.end()
    assert seconds["libraries"] > 0.05


@pytest.mark.parametrize(("seconds", "said"), cases(__file__, "in_words"))
def test_in_words(seconds: dict[str, float], said: str) -> None:
    assert startup.in_words(seconds) == said
