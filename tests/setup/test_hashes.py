"""Hashes of frozen weights: the same from files that are known as from the weights, and known of no other file."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.fixtures.bits import flip_bit
from tests.fixtures.hashes import frozen_hash, weights_hash
from tests.model.tiny import family_model
from tuner.model.adapter import LoraSpec, add_lora
from tuner.model.build import ModelSpec, build_model
from tuner.model.freeze import Content, content_of
from tuner.setup import hashes
from tuner.setup.hashes import FrozenHash, known_weights_hash


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Content]]:
    """Every tensor that is read to be hashed. Files count as settled at once."""
    found: list[Content] = []

    def read(tensor: torch.Tensor, parts: Iterable[torch.Tensor]) -> Content:
        found.append(content_of(tensor, parts))
        return found[-1]

    monkeypatch.setattr(hashes, "content_of", read)
    monkeypatch.setattr(hashes, "SETTLED_NS", 0)
    yield found


@pytest.fixture
def files(tmp_path: Path) -> Path:
    family_model("llama", tied=False).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def adapted(files: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A model as it lies in its files, with an adapter."""
    model = build_model(ModelSpec(str(files)), dtype, 0)
    add_lora(model, LoraSpec(4, 8.0, 0.0, "all-linear"), seed=0)
    return model


def hashed(files: Path, cache: Path, dtype: torch.dtype = torch.bfloat16) -> str:
    model = adapted(files, dtype)
    found = FrozenHash(model, str(cache), "cpu")()
    assert found == frozen_hash(model)
    return str(found)


def test_weights_in_files_are_read_once(files: Path, tmp_path: Path, taken: list[Content]) -> None:
    first = hashed(files, tmp_path)
    assert len(taken) == len(list(family_model("llama", tied=False).parameters()))
    taken.clear()
    assert hashed(files, tmp_path) == first and not taken
    model = adapted(files)
    assert known_weights_hash(model, str(tmp_path)) == weights_hash(model)
    lora = [name for name in model.state_dict() if "lora_" in name]
    assert len(taken) == len(lora)  # what lies in no file


def test_weights_that_are_cast_are_read_each_time(files: Path, tmp_path: Path, taken: list[Content]) -> None:
    hashed(files, tmp_path, torch.float32)
    count = len(taken)
    hashed(files, tmp_path, torch.float32)
    assert len(taken) == 2 * count > 0


def test_a_file_that_was_changed_is_read_again(files: Path, tmp_path: Path, taken: list[Content]) -> None:
    first, weights = hashed(files, tmp_path), files / "model.safetensors"
    times = weights.stat()
    flip_bit(weights)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights.stat().st_size == times.st_size and weights.stat().st_mtime_ns == times.st_mtime_ns
    assert hashed(files, tmp_path) != first


def test_a_file_that_takes_the_place_of_one_that_is_hashed_is_not_known_by_it(
    files: Path, tmp_path: Path, taken: list[Content]
) -> None:
    model = adapted(files)
    shutil.rmtree(files)
    family_model("llama", tied=True).to(torch.bfloat16).save_pretrained(files)
    assert FrozenHash(model, str(tmp_path), "cpu")() == frozen_hash(model)
    assert hashed(files, tmp_path) != frozen_hash(model)


def test_a_file_that_was_just_written_is_not_kept(files: Path, tmp_path: Path) -> None:
    hashed(files, tmp_path)
    assert not (tmp_path / hashes.HASHES).exists()


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"file": {}, "sha256": {}}'])
def test_a_damaged_record_is_none(damage: bytes, files: Path, tmp_path: Path, taken: list[Content]) -> None:
    first = hashed(files, tmp_path)
    for record in (tmp_path / hashes.HASHES).iterdir():
        record.write_bytes(damage)
    assert hashed(files, tmp_path) == first


def test_what_goes_wrong_is_told_to_who_asks(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(tensor: torch.Tensor, parts: Iterable[torch.Tensor]) -> Content:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hashes, "content_of", unread)
    later = FrozenHash(adapted(files), str(tmp_path), "cpu")
    with pytest.raises(OSError, match="Input/output error"):
        later()


def test_nothing_waits_for_it_but_who_asks(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()

    def late(tensor: torch.Tensor, parts: Iterable[torch.Tensor]) -> Content:
        assert may_go_on.wait(60)
        return content_of(tensor)

    monkeypatch.setattr(hashes, "content_of", late)
    model = adapted(files)
    later = FrozenHash(model, str(tmp_path), "cpu")
    model.to(torch.float16)  # what becomes of the model meanwhile is nothing to it
    may_go_on.set()
    assert later() == frozen_hash(adapted(files))


ENDING = """
import sys, threading, torch
from tuner.setup import hashes; torch.set_num_threads(2)
begun, taken = threading.Event(), hashes.content_of
def at_the_end(*given):
    begun.set()
    threading.main_thread().join()
    print("a tensor", flush=True)
    return taken(*given)
hashes.content_of = at_the_end
frozen = [torch.nn.Parameter(torch.zeros(9), requires_grad=False) for _ in range(9)]
hashes.FrozenHash(torch.nn.ParameterList(frozen), sys.argv[1], "cuda")
assert begun.wait(60)
print("the end", flush=True)
"""


@pytest.mark.slow
def test_a_process_ends_with_the_tensors_at_work(tmp_path: Path) -> None:
    """Its threads are not ended within an operation of torch, which would end the process by SIGABRT."""
    words = [sys.executable, "-c", ENDING, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr, done.stdout[:8]) == (0, "", "the end\n")
    assert done.stdout.count("a tensor\n") in (1, 2)


def test_nothing_is_taken_of_a_model_that_is_trained_whole(files: Path, tmp_path: Path) -> None:
    assert FrozenHash(build_model(ModelSpec(str(files)), torch.bfloat16, 0), str(tmp_path), "cpu")() is None
