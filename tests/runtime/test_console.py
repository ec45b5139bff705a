"""What reaches the terminal."""

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.test_activity import Terminal
from tuner.runtime.console import Console, escape, one_line, wrapped


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


def test_a_bar_says_what_is_done_while_it_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = Console(stream=stream)
    assert console.is_live
    with console.progress("train", 3, estimates=False) as bar:
        bar.update(1, "loss 2.0")
        with console.doing("evaluating 1 of 9 rows") as doing:
            console.say("saved", "x")
            doing.update("evaluating 2 of 9 rows")
            bar._bar.refresh()  # type: ignore[union-attr]  # as rich does ten times a second
    shown = stream.getvalue()
    assert "train" in shown and "1/3" in shown
    assert shown.index("evaluating 1 of") < shown.index("evaluating 2 of") < shown.rindex("loss 2.0")


def test_what_is_done_is_said_to_those_who_listen_alone() -> None:
    for options in ({"main": False}, {"level": "warning"}, {}):
        console, stream = said(**options)
        with console.doing("loading torch", at_once=True) as doing:
            doing.update("loading model")
        assert stream.getvalue() == ("" if options else "loading   torch\n")


def test_lines_break_between_their_parts_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    Console(stream=stream).say("plan", "56 rows = 4 steps · micro-batch 1 x 8 x 1 process · " + "x" * 50 + " y")
    lines = stream.getvalue().split("\n")
    assert lines == [
        "\x1b[1mplan      \x1b[0m56 rows = 4 steps", "          micro-batch 1 x 8 x 1 process", f"          {'x' * 50}",
        "          y", "",
    ]  # fmt: skip


@given(text=st.text(), width=st.integers(20, 200))
def test_a_text_on_one_line_fits_and_keeps_an_end(text: str, width: int) -> None:
    whole = " ".join(text.split()) or repr(text)
    start, end = one_line(text, width), one_line(text, width, end=True)
    if len(whole) <= width:
        assert start == end == whole
    else:
        assert len(start) == len(end) == width
        assert whole.startswith(start[:-1]) and whole.endswith(end[1:]) and start[-1] == end[0] == "…"


@given(parts=st.lists(st.text("ab ", min_size=1), min_size=1), width=st.integers(20, 60))
def test_wrapping_loses_no_word(parts: list[str], width: int) -> None:
    lines = wrapped(" · ".join(parts), width)
    words = " ".join(lines).replace("·", " ").split()
    assert words == " ".join(parts).split()
    assert all(len(line) <= width or " " not in line for line in lines)


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
