"""What a process is doing, read by another one."""

from pathlib import Path

import pytest

from tuner.runtime import phase


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
