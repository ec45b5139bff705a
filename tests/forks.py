"""Tests in several processes, forked once all tests are collected: imports and collection are paid for once.

    python -m pytest -p tests.forks --forks 5

Files are dealt in their order, the longest first, to whichever process is free, and the tests of a file stay together
with what they share. A process that dies fails the test that it was in, and another one takes its place.
"""

import gc
import os
import signal
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from tests.fixtures.cycles import leave_out
from tests.fixtures.forked import warm

LOOKS = (50_000, 20, 20)
"""After how many new objects cycles are looked for, and how much more rarely among older ones: tests end soon."""
FIRST = ("test_grouped_gradients.py", "test_parity.py")
"""Files of half a minute each: begun last, all others would wait for them."""
WORKER = "PYTEST_XDIST_WORKER"
"""The variable by which fixtures know that they are in one of several processes, as pytest-xdist names it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the number of processes. Thousands of tests are collected with nothing to look for among them."""
    gc.disable()
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run tests in N forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Deal the files out, and report what comes back as if it had happened here."""
    count: int = session.config.getoption("--forks")
    gc.set_threshold(*LOOKS)
    gc.enable()
    if not count or session.config.option.collectonly or session.testsfailed:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warm()
    gc.collect()
    leave_out()
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all, and what they share in it
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    files.sort(key=lambda items: items[0].path.name not in FIRST)
    _Deal(session, files).run(count)
    return True


@dataclass
class _Process:
    """A forked process, and the files that it has been given: it runs the first one and knows which one is next."""

    pid: int
    pipe: Connection
    files: deque[int] = field(default_factory=deque)
    has_all: bool = False
    test: str = ""


class _Deal:
    """The files that are left, and the processes that take them."""

    def __init__(self, session: pytest.Session, files: Sequence[list[pytest.Item]]) -> None:
        self._session, self._files = session, files
        self._left = deque(range(len(files)))
        self._processes: dict[Connection, _Process] = {}
        self._forked = 0

    def run(self, count: int) -> None:
        """Return once all files are done, or as many tests have failed as --maxfail allows."""
        try:
            for _ in range(count):
                self._fork()
            while self._processes and not self._session.shouldfail:
                for pipe in wait(list(self._processes)):
                    assert isinstance(pipe, Connection)
                    self._hear(self._processes[pipe])
        finally:
            for process in self._processes.values():
                os.kill(process.pid, signal.SIGKILL)
                os.waitpid(process.pid, 0)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)

    def _fork(self) -> None:
        here, there = Pipe()
        number, self._forked = self._forked, self._forked + 1
        pid = os.fork()
        if pid == 0:
            here.close()
            for pipe in self._processes:
                pipe.close()
            _work(self._session, self._files, there, number)
        there.close()
        process = self._processes[here] = _Process(pid, here)
        for _ in range(2):
            self._give(process)

    def _give(self, process: _Process) -> None:
        """One more file, or once the word that there is none."""
        if process.has_all:
            return
        index = self._left.popleft() if self._left else None
        process.has_all = index is None
        if index is not None:
            process.files.append(index)
        process.pipe.send(index)

    def _hear(self, process: _Process) -> None:
        hook = self._session.config.hook
        try:
            kind, value = process.pipe.recv()
        except (EOFError, OSError):
            self._ended(process)
            return
        if kind == "report":
            report = hook.pytest_report_from_serializable(config=self._session.config, data=value)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "test":
            process.test = value
        else:
            process.files.popleft()
            self._give(process)

    def _ended(self, process: _Process) -> None:
        """A process has closed its pipe: with all its files done, or in the middle of a test."""
        del self._processes[process.pipe]
        _, status = os.waitpid(process.pid, 0)
        if not process.files:
            return
        how = f"the process that ran it ended with {os.waitstatus_to_exitcode(status)}"
        file = self._files[process.files.popleft()]
        ids = [item.nodeid for item in file]
        at = ids.index(process.test) if process.test in ids else 0
        report = pytest.TestReport(ids[at], file[at].location, {}, "failed", how, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)
        self._files = [*self._files, file[at + 1 :]]
        self._left.extendleft([*([len(self._files) - 1] if file[at + 1 :] else []), *process.files])
        self._fork()


class _Reports:
    """Sends what becomes known of a test to the process that forked this one."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._pipe.send(("test", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))


def _work(session: pytest.Session, files: Sequence[list[pytest.Item]], pipe: Connection, number: int) -> None:
    """Run the files that come through the pipe, and leave without what the forking process does at its end."""
    code = 1
    try:
        config: Any = session.config
        os.environ[WORKER] = f"gw{number}"
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()  # into files of its own
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(_Reports(config, pipe))
        own = config._tmp_path_factory.getbasetemp() / f"fork-{number}"
        own.mkdir(mode=0o700)
        config._tmp_path_factory._basetemp = own
        for items, following in _pairs(files, pipe):
            for item, next_item in zip(items, [*items[1:], following], strict=True):
                config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            pipe.send(("file", None))
        code = 0
    finally:
        pipe.close()
        os._exit(code)


def _pairs(files: Sequence[list[pytest.Item]], pipe: Connection) -> Iterator[tuple[list[pytest.Item], Any]]:
    """Each file, and the first test of the one after it: pytest keeps what the two of them share."""
    index = pipe.recv()
    while index is not None:
        following = pipe.recv()
        yield files[index], None if following is None else files[following][0]
        index = following
