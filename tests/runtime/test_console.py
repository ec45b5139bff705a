"""What reaches the terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.runtime.console import Console, escape


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def said(**options: object) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(stream=stream, **options), stream  # type: ignore[arg-type]


def test_lines_are_aligned_and_never_wrapped() -> None:
    console, stream = said()
    console.say("model", "SmolLM2, " + "x" * 300)
    console.say("train", "one\ntwo [bold]not markup[/bold] :smile:")
    assert stream.getvalue() == (
        "model     SmolLM2, " + "x" * 300 + "\ntrain     one\n          two [bold]not markup[/bold] :smile:\n"
    )


def test_levels() -> None:
    console, stream = said(level="warning")
    console.debug("d")
    console.say("i", "info")
    console.warn("w")
    console.error("e\nf", "try g")
    assert stream.getvalue() == "warning   w\nerror: e\n  f\n  try g\n"


def test_other_ranks_are_quiet_but_for_errors() -> None:
    console, stream = said(main=False)
    console.say("a", "b")
    console.line("c")
    console.warn("d")
    console.error("rank 1: e")
    assert stream.getvalue() == "error: rank 1: e\n"


def test_a_log_keeps_what_was_said_with_the_time_whoever_says_it(tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    log.write_text("an earlier launch\n")
    console, stream = said(main=False, level="error")
    console.say("plan", "before")
    console.keep(log)
    console.line("a step")
    console.debug("left out")
    console.error("broken")
    first, *lines = log.read_text().splitlines()
    assert first == "an earlier launch"
    assert [line[22:] for line in lines] == ["plan      before", "a step", "error: broken"]
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  ", line) for line in lines)
    assert stream.getvalue() == "error: broken\n"


def test_control_characters_are_escaped() -> None:
    console, stream = said()
    console.say("row", "\x1b[2Jgone\r\x07\x9b\u202e\u2028\ud800 é ✓\ttab")
    assert stream.getvalue() == "row       \\x1b[2Jgone\\x0d\\x07\\x9b\\u202e\\u2028\\ud800 é ✓\\x09tab\n"


@given(text=st.text())
def test_escaped_text_has_no_control_characters_and_encodes(text: str) -> None:
    safe = escape(text)
    assert all(char >= " " and not "\x7f" <= char <= "\x9f" for char in safe)
    safe.encode()


def test_bars_need_a_terminal() -> None:
    console, stream = said()
    with console.progress("steps", 3) as bar:
        bar.update(1, "loss 2.0")
    assert stream.getvalue() == ""
    assert not console.is_live


def test_bars_and_lines_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = Console(stream=stream)
    assert console.is_live
    with console.progress("steps", 3) as bar:
        bar.update(3, "loss\x1b 2.0")
        console.say("saved", "x")
    assert "steps" in stream.getvalue()
    assert "3/3" in stream.getvalue()


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = Terminal()
    Console(stream=coloured).warn("x")
    assert "\x1b[33m" in coloured.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    Console(stream=plain).warn("x")
    assert "\x1b[33m" not in plain.getvalue()


def test_a_closed_stream_is_no_error() -> None:
    console, stream = said()
    stream.close()
    console.say("a", "b")
    console.error("c")
