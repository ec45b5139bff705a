"""Warnings are collected wherever they are said: by the console, by Python, by loggers, in any thread, by workers."""

import io
import logging
import sys
import threading
import warnings
from pathlib import Path

import pytest

from tests.data.building.worker_jobs import Echo
from tuner.data.building.pool import answers
from tuner.runtime.console import Console
from tuner.runtime.warned import Warned, collected, read_warned


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
