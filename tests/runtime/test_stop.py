"""Stop signals: asked, and heeded; and at once, at tuner's first line, in an import, with children under way."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.fixtures.processes import wait_until_gone
from tuner.runtime.stop import COUNTED_ABOVE, SIGNALS, StopSignals

SCRIPT = """
import time
from tuner.runtime.stop import StopSignals
with StopSignals(lambda name: print(name, flush=True)) as stop:
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
    command = [sys.executable, "-c", SCRIPT]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "stopped at once" in errors


def test_a_launchers_repetition_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setattr("tuner.runtime.stop.LAUNCHER_REPEAT_S", 60.0)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == "SIGINT"


def test_a_terminals_second_hangup_is_none() -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)  # would end the process
        assert stop.signal_name == "SIGHUP"


@pytest.mark.parametrize("number", SIGNALS)
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
    command = ["bash", "-c", 'trap "" INT HUP; exec "$@"', "-", sys.executable, "-c", SCRIPT]
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


# It signals itself in the middle of a module, whose importer would take an exception for a failure of its own.
LOADING = """
import os, subprocess, sys, time
from pathlib import Path
from tuner.runtime import stop
from tuner.runtime.files import scratch_dir

number, place = int(sys.argv[1]), Path(sys.argv[2])
(place / "library.py").write_text(f"import os; os.kill(os.getpid(), {number}); print('went on', flush=True)")
sys.path.insert(0, str(place))
stop.heed()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=len(sys.argv) > 3)
(place / "child").symlink_to(str(child.pid))
with scratch_dir("made-", place) as made, stop.undone(lambda: 1 / 0):
    (made / "file").touch()
    try:
        import library
    except BaseException as error:
        print(f"raised {error!r}", flush=True)
"""
# Python runs a module of this name first; the signal comes as the module at the path is about to begin.
AT_A_MODULE = """
import os, sys
def hook(event, given):
    if event == "exec" and given[0].co_filename.endswith(%r):
        os.kill(os.getpid(), %d)
sys.addaudithook(hook)
"""


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (environment.pop("first", ""), root)))
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_an_import_ends_the_process_its_children_and_its_directories(
    number: signal.Signals, tmp_path: Path
) -> None:
    session = ["own"] if number == signal.SIGTERM else []
    done = python("-c", LOADING, str(int(number)), str(tmp_path), *session)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")
    wait_until_gone([int(os.readlink(tmp_path / "child"))])
    assert not [*tmp_path.glob("made-*")]


@pytest.mark.parametrize(
    ("module", "number"),
    [("tuner/cli/__init__.py", signal.SIGTERM), ("typer/__init__.py", signal.SIGINT), ("cli/app.py", signal.SIGINT)],
)
def test_from_its_first_line_on_the_program_answers(module: str, number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_A_MODULE % (module, number))
    done = python("-m", "tuner", "--version", first=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_whoever_imports_it_keeps_the_signals() -> None:
    code = "import signal, tuner; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    assert python("-c", code).returncode == 0


def test_where_it_would_end_at_once_an_ignored_signal_stays_ignored() -> None:
    code = "import signal, os; from tuner.runtime.stop import heed; heed(); os.kill(os.getpid(), 2); print('on')"
    done = python("-c", f"import signal; signal.signal(2, signal.SIG_IGN); {code}")
    assert (done.returncode, done.stdout) == (0, "on\n")


# A process that is started while signals are held back is not hit before it can heed them.
STARTED = """
import os, subprocess, sys
from tuner.runtime import stop
child = "import signal, sys, time; sys.stdin.readline(); from tuner.runtime.stop import heed, let_through; heed()"
child += "; print('heeds', flush=True); let_through(); time.sleep(30)"
with stop.held_back():
    process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
process.terminate()
out, _ = process.communicate(b"go\\n")
print(out, process.returncode)
"""


def test_a_signal_to_a_process_that_starts_waits_until_it_is_heeded() -> None:
    assert python("-c", STARTED).stdout == "b'heeds\\n' 130\n"


def test_after_the_work_is_over_a_signal_changes_nothing() -> None:
    code = "import os; from tuner.runtime import stop as i; i.heed(); i.over(); os.kill(os.getpid(), 15); print(1)"
    assert python("-c", code).stdout == "1\n"
