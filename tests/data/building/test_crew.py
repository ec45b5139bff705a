"""The processes of a crew: divided from one that loaded the job, or each for itself; none stays when it ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.data import tiny
from tests.data.building.test_workers import gone, wait_until_gone
from tests.data.building.worker_jobs import Echo, Threaded
from tuner.data.building.crew import Crew
from tuner.data.building.encoded import EncodeJob
from tuner.data.building.workers import WorkerDiedError, answers


def command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def of(crew: Crew) -> list[int]:
    """The processes of a crew, once they are there."""
    for number, connection in enumerate(crew.connections):
        connection.send((1, number, ("sleep", 0)))
    return [connection.recv()[2][1] for connection in crew.connections]


@pytest.mark.parametrize("job", [Echo(), Threaded()], ids=["divided", "each for itself"])
def test_processes_end_with_their_crew(job: Echo) -> None:
    with Crew(job, 3) as crew:
        pids = of(crew)
        (first,) = {parent(pid) for pid in pids}
        assert parent(first) == os.getpid()
        assert len(set(pids)) == 3
        # A process with a thread is not divided: the thread would be missing, and what it holds locked.
        assert {"alone" in command(pid) for pid in pids} == {job != Echo()}
        os.kill(pids[1], signal.SIGKILL)
        assert crew.exit_code(1) == -9
        assert not gone(pids[0])
    wait_until_gone([first, *pids])


@pytest.mark.parametrize("job", [Echo(), Threaded()], ids=["divided", "each for itself"])
def test_a_death_is_seen_beside_processes_that_live(job: Echo) -> None:
    with pytest.raises(WorkerDiedError, match="exit code 3"):
        list(answers(job, [("sleep", 0.1), ("exit", 3), *range(9)], 2))


def test_a_crew_whose_first_process_is_killed() -> None:
    with Crew(Echo(), 2) as crew:
        pids = of(crew)
        first = parent(pids[0])
        os.kill(first, signal.SIGKILL)
        wait_until_gone([first])
        os.kill(pids[0], signal.SIGKILL)
        assert crew.exit_code(0) == -9
    wait_until_gone(pids)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_crew_that_is_not_needed(at_once: bool) -> None:
    crew = Crew(Echo(), 2)
    crew.end(at_once)
    crew.end(at_once=True)
    assert crew.exit_code(1) == (-9 if at_once else 0)


def test_nothing_that_encodes_starts_a_thread_before_processes_divide() -> None:
    before = children(os.getpid())
    job = EncodeJob(tiny.tokenizer(), "assistant", "refuse", stop_at_bad_row=True, much=True)
    with Crew(job, 2) as crew:
        for connection in crew.connections:
            connection.send((1, 0, ()))
            connection.recv()
        (first,) = children(os.getpid()) - before
        assert [command(pid) for pid in children(first)] == [command(first)] * 2
