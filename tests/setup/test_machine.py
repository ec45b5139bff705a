"""What is broken, missing or fine on a machine is told apart, and what is broken ends the command with 4.

Machines with CUDA devices are looked at on a stand-in for them.
"""

import errno
import fcntl
import importlib.metadata
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures import commands
from tests.fixtures.cuda_stub import CudaStub, cuda_stub
from tests.fixtures.tables import cases
from tuner.cli.doctor import table
from tuner.errors import MachineError
from tuner.model import fastest
from tuner.model.fastest import WAY_TO_FLASH_4
from tuner.setup import machine, machine_torch
from tuner.setup.machine import examine
from tuner.setup.machine_check import Check
from tuner.setup.machine_torch import _kernels


def test_a_machine_that_works_has_nothing_broken(tmp_path: Path) -> None:
    found = list(examine(tmp_path / "not" / "yet"))
    names = {check.name for check in found}
    assert {"python", "device", "product", "processor", "memory", "C compiler", "kernels", "cache", "runs"} <= names
    assert [check for check in found if check.status == "broken"] == []
    assert all(check.fix for check in found if check.status == "missing")
    assert list(tmp_path.iterdir()) == [], "what was tried is gone"
    assert all(len(line) < 80 for line in table(found).splitlines())


def test_what_raises_is_broken_and_the_rest_is_still_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(kind: str) -> Any:
        raise MachineError("no such thing", hint="buy one")

    monkeypatch.setattr(machine_torch, "device_facts", fails)
    found = {check.name: check for check in examine(tmp_path)}
    device = found["device"]
    assert (device.status, device.found, device.fix) == ("broken", "no such thing", "buy one")
    assert "runs" in found


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EROFS])
def test_a_directory_that_cannot_lock_or_write(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (check,) = machine._place("runs", tmp_path, "run directories")
    assert check.status == "broken"
    assert ("no locks" in check.means) == (number == errno.ENOLCK)


def test_locks_that_do_not_hold_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    (check,) = machine._place("runs", tmp_path, "run directories")
    assert (check.status, "no locks" in check.means) == ("broken", True)


@pytest.mark.parametrize(("room", "status"), [(1 << 40, "ok"), (1 << 30, "warning")])
def test_little_room_is_a_warning(room: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: type("Usage", (), {"free": room}))
    (check,) = machine._place("runs", tmp_path, "run directories")
    assert check.status == status


def test_versions_are_held_against_the_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=99", "numpy>=1", "no-such-library>=1", 'wandb>=1; extra == "wandb"', "peft>=0.1"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    found = {check.name: check for check in machine._libraries()}
    assert {name: check.status for name, check in found.items()} == {
        "torch": "warning", "no-such-library": "broken", "peft": "ok",
    }  # fmt: skip
    assert "outside the tested range >=99" in found["torch"].means
    assert found["no-such-library"].fix == 'pip install "no-such-library>=1"'


def test_an_extra_names_what_it_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=2", 'one>=1; extra == "both"', 'two>=1; extra == "both"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    assert machine._packages("both") == "one two"


def test_the_command_ends_with_4_where_something_is_broken(tmp_path: Path) -> None:
    done = commands.tuner("doctor", "--json", cwd=tmp_path, TUNER_CACHE="/proc/nothing")
    found = commands.document(done, 4)
    assert found["error"]["message"] == "broken: cache"
    checks = {check["name"]: check for check in found["artifacts"]["checks"]}
    assert checks["cache"]["status"] == "broken" and checks["runs"]["status"] == "ok"


def test_the_table_says_what_to_do() -> None:
    text = table([Check("thing", "missing", "not installed", "it is slow", "pip install thing")])
    assert text.splitlines()[0].split() == ["-", "thing", "not", "installed"]
    assert text.splitlines()[2].strip() == "-> pip install thing"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaStub]:
    with cuda_stub() as stub:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
        monkeypatch.setattr(machine_torch, "LOCKED", 1 << 20)
        monkeypatch.setattr(machine_torch, "generation", lambda index: 9)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(machine_torch, "triton_problem", lambda: "there is no C compiler (gcc, clang)")
        yield stub


def found() -> dict[str, Check]:
    return {check.name: check for check in _kernels()}


def test_without_a_compiler_kernels_are_missing_and_nothing_is_broken(cuda: CudaStub) -> None:
    checks = found()
    kernels = checks["kernels"]
    assert (kernels.status, kernels.fix) == ("missing", "apt install g++ python3-dev; pip install triton")
    assert "there is no C compiler (gcc, clang)" in kernels.found
    assert checks["page-lock"].status == "ok" and cuda.locked == {}
    assert "launcher" not in checks, "a process of its own has no tasks beside it"


def test_kernels_that_fail_are_no_reason_not_to_train(monkeypatch: pytest.MonkeyPatch, cuda: CudaStub) -> None:
    monkeypatch.setattr(machine_torch, "triton_problem", lambda: None)
    kernels = found()["kernels"]  # there is no GPU here
    assert kernels.status == "warning" and kernels.found.startswith("liger fails on the GPU: ")


@pytest.mark.parametrize(
    ("major", "installed", "status", "shown", "fix"),
    [
        (9, ("flash_attn.cute.interface",), "ok", "flash attention 4: flash-attn-4 is installed", ""),
        (9, (), "missing", "flash attention 2, which torch brings", WAY_TO_FLASH_4),
        (12, ("flash_attn_interface",), "missing", "flash attention 2, which torch brings", WAY_TO_FLASH_4),
        (8, (), "ok", "flash attention 2: there is no later one for compute capability 8.x", ""),
    ],
)
@pytest.mark.usefixtures("cuda")
def test_which_attention_there_is(  # noqa: PLR0917 - a table
    major: int, installed: tuple[str, ...], status: str, shown: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastest, "_is_there", lambda module: module in installed)
    monkeypatch.setattr(machine_torch, "generation", lambda index: major)
    check = found()["attention"]
    assert (check.status, check.found, check.fix) == (status, shown, fix)


def test_a_refused_page_lock_is_a_warning(cuda: CudaStub) -> None:
    cuda.refuse = 801
    check = found()["page-lock"]
    assert (check.status, cuda.pending) == ("warning", {})
    assert check.found == "1 MiB of host memory cannot be page-locked (CUDA error 801)"


@pytest.mark.parametrize(
    ("environment", "release", "status", "shown"), cases(__file__, "how_memory_of_the_device_is_kept")
)
@pytest.mark.usefixtures("cuda")
def test_how_memory_of_the_device_is_kept(
    environment: dict[str, str], release: str, status: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "release", lambda: release)
    check = found()["allocator"]
    assert (check.status, check.found) == (status, shown)


@pytest.mark.parametrize(("visible", "status"), [(8, "ok"), (1, "ok"), (4, "broken")])
@pytest.mark.usefixtures("cuda")
def test_each_task_of_slurm_has_a_device(visible: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3"}
    for name, value in {**step, "SLURM_STEP_TASKS_PER_NODE": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert found()["launcher"].status == status


def test_gpus_that_do_not_reach_each_other_are_named(cuda: CudaStub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "links" not in found(), "one GPU has nobody to reach"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    links = found()["links"]
    assert (links.status, links.found) == (
        "ok", "4 GPUs, each reaches the others' memory: groups of 1, 2, 4 are possible"
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != {1, 3})
    links = found()["links"]
    assert links.status == "warning" and links.found.startswith("4 GPUs, of which 1 does not reach the memory of 3")
