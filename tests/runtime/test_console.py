"""What people see: lines, the bar, what is being done, and warnings, which are collected wherever they are said."""

import io
import logging
import os
import re
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.building.worker_jobs import Echo
from tuner.data.building.pool import answers
from tuner.runtime import activity
from tuner.runtime.activity import Activity
from tuner.runtime.console import Console, escape, one_line, wrapped
from tuner.runtime.warned import Warned, collected, read_warned


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


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(activity, "FRAME_S", 0.01)
    monkeypatch.setattr(activity, "APPEARS_S", 0.0)
    return Terminal()


def screen(text: str) -> list[str]:
    """What a terminal shows in the end of what it was sent."""
    lines, column = [""], 0
    for part in text.replace("\x1b[K", "\0"):
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
            column = 0
        elif part == "\0":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + part + lines[-1][column + 1 :]
            column += 1
    return lines


def wait_for(text: str, stream: io.StringIO) -> None:
    deadline = time.monotonic() + 10
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.005)


def test_a_terminal_shows_the_innermost_work_and_nothing_afterwards(terminal: Terminal) -> None:
    line = Activity(terminal)
    with line.doing("loading torch", at_once=True):
        assert "loading torch" in screen(terminal.getvalue())[0]  # before any time has passed
        with line.doing("reading 1 of 2") as doing:
            wait_for("reading 1 of 2", terminal)
            doing.update("reading 2 of 2")
            wait_for("reading 2 of 2", terminal)
    assert screen(terminal.getvalue()) == [""]
    assert "activity" not in {thread.name for thread in threading.enumerate()}


def test_other_lines_are_whole(terminal: Terminal) -> None:
    line = Activity(terminal)
    with line.doing("loading a model with a long name"):
        wait_for("loading", terminal)
        with line.aside():
            terminal.write("warning   short\n")
        terminal.write("a library's own\n")  # over the line, whose cursor is at its start
        with line.paused():
            before = len(terminal.getvalue())
            time.sleep(0.05)
            assert len(terminal.getvalue()) == before
    shown = screen(terminal.getvalue())
    assert shown[0] == "warning   short" and shown[1].startswith("a library's own") and shown[-1] == ""


def test_without_a_terminal_a_line_is_written_once_where_it_is_worth_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "FRAME_S", 0.01)
    stream = io.StringIO()
    line = Activity(stream)
    with line.doing("loading torch", at_once=True), line.doing("planning"):
        time.sleep(0.05)
    assert stream.getvalue() == "loading   torch\n"
    monkeypatch.setattr(activity, "WRITTEN_S", 0.03)
    with line.doing("evaluating 0 of 9 rows"):
        wait_for("\n", stream)
        time.sleep(0.05)
    assert stream.getvalue() == "loading   torch\nevaluating 0 of 9 rows\n"


def test_dumb_terminals_get_plain_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Activity(terminal).doing("loading torch", at_once=True):
        pass
    assert terminal.getvalue() == "loading   torch\n"


def test_a_forked_child_draws_nothing(terminal: Terminal) -> None:
    line = Activity(terminal)
    with line.doing("loading torch"):
        wait_for("loading", terminal)
        child = os.fork()
        if child == 0:
            line.forget()
            before = len(terminal.getvalue())
            with line.aside():
                time.sleep(0.05)
            os._exit(len(terminal.getvalue()) - before)
        assert os.waitpid(child, 0)[1] == 0


def test_a_closed_stream_ends_no_work(terminal: Terminal) -> None:
    line = Activity(terminal)
    with line.doing("loading torch", at_once=True):
        terminal.close()


def test_long_work_says_how_far_it_is_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FRAME_S", "WRITTEN_S", "AGAIN_S"):
        monkeypatch.setattr(activity, name, 0.01)
    stream = io.StringIO()
    with Activity(stream).doing("computing 0 of 9 rows") as doing:
        wait_for("0 of 9", stream)
        for count in (3, 6):
            doing.update(f"computing {count} of 9 rows")
            wait_for(f"{count} of 9", stream)
        monkeypatch.setattr(activity, "AGAIN_S", 1000.0)
        doing.update("computing 7 of 9 rows")
        time.sleep(0.1)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["0", "3", "6"]


def test_each_is_collected_once_from_any_thread() -> None:
    warned, said, stream = Warned(), list[str](), io.StringIO()
    console = Console(stream=stream, level="error")
    with collected(warned, said.append), warnings.catch_warnings():
        warnings.simplefilter("always")
        console.warn("one")
        thread = threading.Thread(target=lambda: (console.warn("two"), console.warn("one")))
        thread.start()
        thread.join()
        for _ in range(2):
            warnings.warn("on two\nlines", RuntimeWarning, stacklevel=1)
        Console(main=False).warn("of another rank")
    console.warn("after it")
    *first, last = warned.texts
    assert first == ["one", "two"]
    assert last.startswith("RuntimeWarning: on two lines (") and __file__ in last
    assert said == [f"warning: {last}"]


def test_loggers_count_where_they_reach_stderr() -> None:
    warned = Warned()
    logger, silent = logging.getLogger("test.loud"), logging.getLogger("test.silent")
    logger.propagate = silent.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    silent.addHandler(logging.NullHandler())
    try:
        with collected(warned, print):
            logger.warning("%s of %d", "one", 2)
            logger.info("no warning")
            silent.warning("nobody sees it")
    finally:
        logger.removeHandler(handler)
    assert warned.texts == ["one of 2"]
    assert logging.getLogRecordFactory() is logging.LogRecord


def test_a_file_keeps_them_for_another_process(tmp_path: Path) -> None:
    path = tmp_path / "warnings"
    assert read_warned(path) == []
    warned = Warned(path)
    assert [warned.add(text) for text in ("a\nb", "c", "c")] == [True, True, False]
    path.write_bytes(path.read_bytes() + b'"half')
    assert read_warned(path) == ["a\nb", "c"]


@pytest.mark.parametrize("workers", [1, 2])
def test_those_of_workers_are_passed_on(workers: int) -> None:
    warned, said = Warned(), list[str]()
    with collected(warned, said.append), warnings.catch_warnings():
        warnings.simplefilter("always")
        list(answers(Echo(), [("warn", "a library is odd")] * 4, workers))
    (text,) = warned.texts
    assert text.startswith("UserWarning: a library is odd (")
    assert said == [f"warning: {text}"]
