"""The launcher's variables."""

from typing import Any

import pytest

from tests.fixtures.tables import cases
from tuner.errors import MachineError
from tuner.runtime.dist import RankInfo, first_host, rendezvous, threads_per_rank

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM: Any = cases(__file__, "slurm")


def test_single_process() -> None:
    rank_info = RankInfo.from_environment({})
    assert rank_info == RankInfo(0, 1, 0, 1)
    assert rank_info.is_main


def test_torchrun_wins_over_slurm() -> None:
    assert RankInfo.from_environment({**SLURM, **TORCHRUN}) == RankInfo(3, 4, 1, 2)
    assert not RankInfo.from_environment(TORCHRUN).is_main


def test_slurm_steps_with_several_tasks_only() -> None:
    assert RankInfo.from_environment(SLURM) == RankInfo(5, 7, 1, 2)
    assert RankInfo.from_environment({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) == RankInfo()
    batch_script = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}
    assert RankInfo.from_environment(batch_script) == RankInfo()


@pytest.mark.parametrize(("name", "value", "words"), cases(__file__, "contradictions_are_refused"))
def test_contradictions_are_refused(name: str, value: str, words: str) -> None:
    with pytest.raises(MachineError, match=words):
        RankInfo.from_environment({**TORCHRUN, name: value})


def test_rendezvous() -> None:
    assert rendezvous({"MASTER_ADDR": "h", "MASTER_PORT": "1"}) == "env://"
    several = rendezvous({**SLURM, "SLURM_NNODES": "4"})
    assert several.startswith("tcp://gpu03:")
    assert 20_000 <= int(several.rpartition(":")[2]) < 30_000
    assert several == rendezvous({**SLURM, "SLURM_NNODES": "4", "SLURM_PROCID": "0"})
    assert rendezvous({**SLURM, "SLURM_STEP_NUM_NODES": "1"}).startswith("tcp://127.0.0.1:")
    with pytest.raises(MachineError, match="MASTER_ADDR"):
        rendezvous({})


@pytest.mark.parametrize(("nodes", "host"), cases(__file__, "first_host"))
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_every_rank_gets_a_thread() -> None:
    assert threads_per_rank(RankInfo(0, 4096, 0, 4096)) == 1
