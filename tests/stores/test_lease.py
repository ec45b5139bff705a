"""Who may publish: one launch, until its lease is given back, has run out, or its process is gone."""

import json
import time
from pathlib import Path

import obstore
import pytest
from obstore.store import MemoryStore

from tests.stores.conftest import Opened
from tuner.errors import MachineError
from tuner.stores.commit import LEASE


def put(store: MemoryStore, **facts: object) -> None:
    obstore.put(store, LEASE, json.dumps({"host": "other", "pid": 7, "epoch": 3, "number": 0, **facts}).encode())


def facts(store: MemoryStore) -> dict[str, object]:
    return dict(json.loads(bytes(obstore.get(store, LEASE).bytes())))


def test_a_lease_is_renewed_and_given_back(opened: Opened, store: MemoryStore, tmp_path: Path) -> None:
    with opened().lease(tmp_path, lock_is_free=True):
        first = facts(store)
        time.sleep(0.3)
        assert facts(store)["beat"] > first["beat"]  # type: ignore[operator]
    assert facts(store)["released"]
    said: list[str] = []
    with opened().lease(tmp_path, lock_is_free=False, on_wait=said.append):
        assert (facts(store)["epoch"], said) == (2, [])


def test_one_that_runs_out_is_taken_after_its_time(opened: Opened, store: MemoryStore, tmp_path: Path) -> None:
    put(store)
    said: list[str] = []
    start = time.monotonic()
    with opened().lease(tmp_path, lock_is_free=True, on_wait=said.append):
        assert time.monotonic() - start > 0.4
        assert facts(store)["epoch"] == 4
    assert said == ["waiting up to 0 s for the lease of other pid 7 to run out"]


def test_one_that_is_renewed_is_another_launch(opened: Opened, tmp_path: Path) -> None:
    with opened().lease(tmp_path, lock_is_free=True):
        with pytest.raises(MachineError, match=r"s3://bucket/run is in use by another launch, \S+ pid \d+"):
            opened().lease(tmp_path, lock_is_free=False).__enter__()
        with pytest.raises(MachineError, match="in use"):
            opened().lease(tmp_path / "other", lock_is_free=True).__enter__()


def test_one_of_a_process_that_is_gone_is_taken_at_once(opened: Opened, store: MemoryStore, tmp_path: Path) -> None:
    with opened().lease(tmp_path, lock_is_free=True):
        left = facts(store)
    put(store, **{**left, "released": False})
    said: list[str] = []
    with opened().lease(tmp_path, lock_is_free=True, on_wait=said.append):
        assert said == []


@pytest.mark.parametrize("damaged", [b"", b"{", b"[1]"])
def test_a_damaged_one_runs_out(opened: Opened, store: MemoryStore, tmp_path: Path, damaged: bytes) -> None:
    obstore.put(store, LEASE, damaged)
    with opened().lease(tmp_path, lock_is_free=True):
        assert facts(store)["epoch"] == 1


def test_one_that_was_removed_is_put_again(opened: Opened, store: MemoryStore, tmp_path: Path) -> None:
    with opened().lease(tmp_path, lock_is_free=True) as lease:
        obstore.delete(store, LEASE)
        lease.renew()
        assert facts(store)["owner"] == lease.owner
