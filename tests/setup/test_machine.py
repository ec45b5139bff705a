"""What is broken, missing or fine on a machine is told apart, and what is broken ends the command with 4."""

import errno
import fcntl
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import commands
from tuner.cli.doctor import table
from tuner.errors import MachineError
from tuner.setup import machine, machine_torch
from tuner.setup.machine import examine
from tuner.setup.machine_check import Check


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
