"""The line that says what is being done: there in silence, out of the way of everything else, gone at the end."""

import io
import os
import threading
import time

import pytest

from tuner.runtime import activity
from tuner.runtime.activity import Activity


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


def test_a_closed_stream_is_no_error(terminal: Terminal) -> None:
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
