"""Store directories in memory: of one store, any number of clients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from tuner.stores import directory, transfer
from tuner.stores.client import Client
from tuner.stores.directory import StoreDirectory

Opened = Callable[..., StoreDirectory]


class Faulty:
    """obstore, whose puts of keys with a word in them fail so many times, carried out or not."""

    exceptions = obstore.exceptions

    def __init__(self) -> None:
        self.word, self.left, self.carried_out = "", 0, False
        self.puts: list[str] = []
        self.broken = 0
        self.unconditional = False

    def put(self, store: Any, key: str, data: bytes, **words: Any) -> Any:
        self.puts.append(key)
        if self.unconditional:
            words.pop("mode", None)
        if self.left and self.word in key:
            self.left -= 1
            if self.carried_out:
                obstore.put(store, key, data, **words)
            raise obstore.exceptions.GenericError("HTTP error: error sending request")
        return obstore.put(store, key, data, **words)

    def get(self, store: Any, key: str, **words: Any) -> Any:
        if self.broken:
            self.broken -= 1
            raise obstore.exceptions.GenericError("HTTP error: request or response body error")
        return obstore.get(store, key, **words)

    def fail(self, word: str, times: int, carried_out: bool) -> None:
        self.word, self.left, self.carried_out = word, times, carried_out

    def __getattr__(self, name: str) -> Any:
        return getattr(obstore, name)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def library() -> Faulty:
    return Faulty()


@pytest.fixture
def opened(store: MemoryStore, library: Faulty, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """A directory of the store, at each call as another process has it; parts are small, and a lease soon runs out."""
    monkeypatch.setattr(transfer, "PART_BYTES", 1000)
    monkeypatch.setattr(transfer, "SMALL_BYTES", 100)
    monkeypatch.setattr(directory, "TTL_SECONDS", 0.4)
    return lambda local=(): StoreDirectory(Client("s3://bucket/run", store, library), local)


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A run with a checkpoint, a log, a link and a lock."""
    return filled(tmp_path / "stage", 1)


def filled(stage: Path, step: int) -> Path:
    """A stage as it is after a step."""
    checkpoint = stage / "checkpoints" / f"step-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(f"{step}")
    (checkpoint / "weights.bin").write_bytes(bytes([step]) * 2500)
    with (stage / "metrics.jsonl").open("a") as file:
        file.write(f"{step}\n")
    (stage / "lock").touch()
    (stage / "latest").unlink(missing_ok=True)
    (stage / "latest").symlink_to(f"checkpoints/step-{step}")
    return stage


def contents(directory: Path) -> dict[str, bytes]:
    """The files below a directory; links by where they lead."""
    return {
        path.relative_to(directory).as_posix(): bytes(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in directory.rglob("*")
        if path.is_symlink() or path.is_file()
    }
