"""Ranks that are started, signalled, that fail, hang and die; and what the user is told."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import forked
from tests.fixtures.processes import wait_until_gone
from tests.fixtures.tables import cases
from tests.runtime.spawn_worker import work
from tuner.errors import DataError, LostRankError, MachineError, TunerError
from tuner.runtime import spawn
from tuner.runtime.dist import cores
from tuner.runtime.spawn import run_ranks
from tuner.runtime.warned import Warned, collected


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "GRACE_S", 0.7)


@pytest.fixture(autouse=True)
def _forked_ranks(request: pytest.FixtureRequest) -> None:
    """Spare each rank the start of an interpreter, but in the tests marked so."""
    if "fresh" not in request.fixturenames:
        request.getfixturevalue("forked_children")


@pytest.fixture
def fresh() -> None:
    """Have the test's ranks be interpreters of their own."""


def run(logs: Path, *actions: str, **job: Any) -> dict[str, Any]:
    return run_ranks(work, {"actions": actions, "ready": str(logs), **job}, len(actions), logs)


def failure(logs: Path, *actions: str) -> TunerError:
    with pytest.raises(TunerError) as raised:
        run(logs, *actions)
    return raised.value


@pytest.mark.usefixtures("fresh")
def test_ranks_know_their_place_and_meet_on_the_loopback_alone(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    found = run(tmp_path, "facts", "ok", "ok")
    threads = str(max(1, cores() // 3))
    assert found == {
        "RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", "OMP_NUM_THREADS": threads,
        "session": True, "at": ["0100007F"],
    }  # fmt: skip
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert "rank 1 prints" in (tmp_path / "rank1.log").read_text()


@pytest.mark.parametrize("action", ["warns, ok", "warns, data error", "warns, killed"])
def test_what_rank_0_warns_of_is_the_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str], action: str) -> None:
    warned = Warned()
    with collected(warned, print), contextlib.suppress(TunerError):
        run(tmp_path, action, "warns, ok")
    library, console = warned.texts
    assert library.startswith("UserWarning: from a library (") and "spawn_worker.py:" in library
    assert console == "rank 0 is odd"
    said = capfd.readouterr().err
    assert f"warning: {library}" in said
    assert "warning   rank 0 is odd" in said
    assert "rank 1" not in said


def test_one_ranks_error_is_the_runs_with_its_class_hint_and_code(tmp_path: Path) -> None:
    error = failure(tmp_path, "lost", "data error")
    assert type(error) is DataError
    assert (error.message, error.hint, error.exit_code) == ("rank 1: bad row", "mend it", 3)
    assert "DataError: bad row" in (tmp_path / "rank1.log").read_text()


def test_the_first_error_counts_not_what_follows_from_it(tmp_path: Path) -> None:
    error = failure(tmp_path, "late", "bug")
    assert error.message == "rank 1: ValueError: oops"
    assert error.exit_code == 1
    assert "rank1.log" in str(error.hint)


@pytest.mark.parametrize(("action", "message"), [("agreed", "rank 1: bad row"), ("same", "bad everywhere")])
def test_an_error_that_all_agree_on_is_told_once(tmp_path: Path, action: str, message: str) -> None:
    assert failure(tmp_path, action, action).message == message


@pytest.mark.usefixtures("fresh")
def test_a_killed_rank_is_named_and_the_others_end(tmp_path: Path) -> None:
    began = time.monotonic()
    error = failure(tmp_path, "killed", "hangs", "lost")
    assert isinstance(error, MachineError)
    assert error.message == "rank 0 was killed by SIGKILL"
    assert time.monotonic() - began < 30


def test_a_silent_rank_is_named_with_its_stack_in_the_log(tmp_path: Path) -> None:
    error = failure(tmp_path, "lost", "hangs")
    assert error.message.startswith("rank 1 stopped answering")
    assert "spawn_worker.py" in (tmp_path / "rank1.log").read_text()


@pytest.mark.parametrize(("action", "message"), cases(__file__, "what_the_failed_rank_was_doing_is_named"))
def test_what_the_failed_rank_was_doing_is_named(action: str, message: str, tmp_path: Path) -> None:
    assert failure(tmp_path, "lost at step 9, forward", action).message.startswith(message)


def test_where_all_are_lost_the_first_one_speaks(tmp_path: Path) -> None:
    assert type(failure(tmp_path, "lost", "lost")) is LostRankError


def send_when_ready(logs: Path, count: int, number: signal.Signals) -> None:
    def wait() -> None:
        while len([name for name in os.listdir(logs) if name.isdigit()]) < count:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


def test_the_first_signal_reaches_every_rank_once(tmp_path: Path) -> None:
    send_when_ready(tmp_path, 2, signal.SIGUSR1)
    assert run(tmp_path, "stops", "stops", stop_s=0.2) == {"signal": "SIGUSR1"}


def test_a_signal_that_no_rank_could_heed_is_an_interruption(tmp_path: Path) -> None:
    send_when_ready(tmp_path, 2, signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "deaf", "stops")


@pytest.mark.parametrize(
    ("code", "is_cut"), [(-signal.SIGTERM, True), (130, True), (-signal.SIGKILL, False), (1, False)]
)
def test_a_rank_that_a_signal_ended_before_it_listened_is_no_failure(code: int, is_cut: bool) -> None:
    assert spawn.End(0, code, 0.0, None).is_cut_short(signal.SIGTERM) == is_cut


TWICE = """
import sys
from tuner.runtime.spawn import run_ranks
from tests.runtime.spawn_worker import work
from pathlib import Path
job = {"actions": ["stops", "deaf"], "ready": sys.argv[1], "stop_s": 60}
run_ranks(work, job, 2, Path(sys.argv[1]))
"""


def test_the_second_signal_kills_every_rank(tmp_path: Path) -> None:
    process = forked.Popen([sys.executable, "-c", TWICE, str(tmp_path)], cwd=forked.ROOT, stderr=subprocess.DEVNULL)
    while not {"0", "1"} <= set(os.listdir(tmp_path)):
        time.sleep(0.01)
        assert process.poll() is None
    ranks = [int(os.readlink(tmp_path / name)) for name in ("0", "1")]
    os.kill(ranks[1], signal.SIGSTOP)  # so that the first signal does not end it
    for _ in range(100):  # two that come at once, on a busy machine, are one
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.3)
            break
    assert process.wait(0) == 130
    wait_until_gone(ranks)


@pytest.mark.usefixtures("fresh")
def test_ranks_stop_when_their_parent_is_gone(root: Path, tmp_path: Path) -> None:
    script = TWICE.replace('"deaf"', '"stops"').replace('"stop_s": 60', '"stop_s": 0')
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=root, stderr=subprocess.DEVNULL)
    while not {"0", "1"} <= set(os.listdir(tmp_path)):
        time.sleep(0.01)
        assert process.poll() is None
    process.kill()
    process.wait()
    wait_until_gone([int(os.readlink(tmp_path / name)) for name in ("0", "1")])
