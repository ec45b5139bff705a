"""Weights that are read while a launch is planned: all of them, where that helps, and never to its harm."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import tuner.model.read_ahead
from tests.model.tiny import family_model
from tuner.model.build import ModelSpec
from tuner.model.read_ahead import begin_reading

ahead: Any = tuner.model.read_ahead


def saved(tmp_path: Path) -> Path:
    """A model in several files."""
    family_model("llama", tied=False).save_pretrained(tmp_path / "model", max_shard_size="40KB")
    return tmp_path / "model"


def _read(monkeypatch: pytest.MonkeyPatch, spec: ModelSpec) -> dict[str, set[int]]:
    """The blocks that are read of each file, none of which is cached."""
    found: dict[str, set[int]] = {}
    real = os.preadv

    def reads(file: int, buffers: Any, start: int) -> int:
        found.setdefault(Path(f"/proc/self/fd/{file}").resolve().name, set()).add(start)
        return real(file, buffers, start)

    monkeypatch.setattr(ahead, "_is_cached", lambda file, start: False)
    monkeypatch.setattr(ahead, "_BLOCK", 4096)
    monkeypatch.setattr(os, "preadv", reads)
    begin_reading(spec)
    for thread in threading.enumerate():
        if thread.name == "read ahead":
            thread.join()
    monkeypatch.undo()
    return found


def test_every_block_of_every_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved(tmp_path)
    files = sorted(directory.glob("*.safetensors"))
    wanted = {file.name: set(range(0, file.stat().st_size, 4096)) for file in files}
    assert len(wanted) > 1
    assert _read(monkeypatch, ModelSpec(str(directory))) == wanted


@pytest.mark.parametrize("why", ["drawn", "gone", "too large"])
def test_what_needs_no_reading_is_left_alone(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved(tmp_path)
    if why == "too large":
        monkeypatch.setattr(ahead, "host_memory", lambda: (1 << 40, 1000))
    if why == "gone":
        (directory / "model.safetensors.index.json").write_text("{}")
    assert _read(monkeypatch, ModelSpec(str(directory), random_init=why == "drawn")) == {}


def test_what_cannot_be_had_at_once_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10_000))
    with (tmp_path / "file").open("r+b") as file:
        assert not ahead._is_cached(file.fileno(), 1 << 20), "there is no such byte"
    with (tmp_path / "file").open("ab") as unreadable:
        assert not ahead._is_cached(unreadable.fileno(), 0)
