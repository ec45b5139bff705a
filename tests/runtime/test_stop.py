"""Stop signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tuner.runtime.stop import COUNTED_ABOVE, StopSignals

SCRIPT = """
import sys, time
from tuner.runtime.stop import StopSignals
with StopSignals(lambda name: print(name, flush=True), repeat_s=float(sys.argv[1])) as stop:
    print("ready", flush=True)
    while not stop.requested: time.sleep(0.01)
    time.sleep(20)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_the_first_signal_asks_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    names: list[str] = []
    with StopSignals(names.append) as stop:
        assert not stop.requested
        assert stop.signal_name is None
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.signal_name == number.name
    assert names == [number.name]
    assert signal.getsignal(number) is before


def test_the_second_signal_ends_the_process_at_once(root: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, "0"]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "stopped at once" in errors


def test_a_launchers_repetition_counts_once() -> None:
    with StopSignals(repeat_s=60.0) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == "SIGINT"


def test_a_terminals_second_hangup_is_none() -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)  # would end the process
        assert stop.signal_name == "SIGHUP"


@pytest.mark.parametrize("number", StopSignals.SIGNALS)
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), number)
            assert not stop.requested
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_background_job_under_nohup_stops_at_sigterm_alone(root: Path) -> None:
    command = ["bash", "-c", 'trap "" INT HUP; exec "$@"', "-", sys.executable, "-c", SCRIPT, "0"]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "SIGTERM\n"
        process.kill()


def test_below_a_process_that_counts_every_signal_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COUNTED_ABOVE, "1")
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # would end the process
        assert stop.signal_name == "SIGTERM"


def test_outside_the_main_thread_nothing_changes() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def enter() -> None:
        with StopSignals() as stop:
            assert not stop.requested

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
