"""Hashes of weights: of those that are not trained, during the first step, and known from a launch before.

Checkpoints do not hold these, and note their hash: a save and a resumption need it, a first step does not. A tensor
that lies in a file as it was read has the hash of the file's bytes there, which is kept in the cache and holds for as
long as the file is the same one, by its inode, size and times.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tuner.errors import TunerError
from tuner.model.freeze import Content, all_tensors, content_of, frozen_tensors, hash_of_frozen
from tuner.runtime.files import keep_json, read_json
from tuner.stages import cache_root

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tuner.model.unread import InFile, UnreadWeights

HASHES = "hashes"
SETTLED_NS = 2_000_000_000
"""A file that changed less than that ago may change again without another time of change: clocks of files tick."""


class FrozenHash:
    """SHA-256 of what of a model is not trained (:func:`~tuner.model.freeze.frozen_tensors`), once it is called.

    A thread computes it from now on, of the tensors as they lie in the host's memory: they may go to a device
    meanwhile. A process that ends without it waits for the tensor at work alone. On a CPU, whose cores train, it takes
    one of them.
    """

    def __init__(
        self, model: PreTrainedModel, cache: str | None, device_type: str, unread: UnreadWeights | None = None
    ) -> None:
        self._tensors, self._hashed = frozen_tensors(model)
        self._unread = unread
        self._cache, self._threads = cache, 1 if device_type == "cpu" else torch.get_num_threads()
        self._taken: Future[dict[str, Content]] = Future()
        threading.Thread(target=self._take, name="hash").start()

    def __call__(self) -> str | None:
        """Wait for it; None where all is trained. Raises what taking it raised."""
        return hash_of_frozen(self.contents())

    def contents(self) -> Mapping[str, Content]:
        """What it is made of, by name."""
        return self._taken.result()

    def _take(self) -> None:
        try:
            contents = _contents(self._tensors, self._cache, self._threads, self._unread)
            self._taken.set_result({**contents, **self._hashed})
        except BaseException as error:  # noqa: BLE001 - who asks gets it
            self._taken.set_exception(error)
        self._tensors, self._unread = {}, None  # else a model in the host's memory would stay there


def known_weights_hash(model: PreTrainedModel, cache: str | None, unread: UnreadWeights | None = None) -> str:
    """SHA-256 of all weights of a model, by what is known of the files."""
    return str(hash_of_frozen(_contents(all_tensors(model), cache, torch.get_num_threads(), unread)))


def _contents(
    tensors: Mapping[str, torch.Tensor], cache: str | None, threads: int, unread: UnreadWeights | None
) -> dict[str, Content]:
    """Type, shape and hash of each tensor; of those in files they are kept for the next launch."""
    if not tensors:
        return {}
    from tuner.model.unread import in_files  # a training in full goes without

    kept = (cache_root() if cache is None else Path(cache)) / HASHES
    places: dict[str, tuple[InFile, ...]] = {name: (place,) for name, place in in_files(tensors).items()}
    for name, tensor in tensors.items():
        if unread is not None and (pieces := unread.pieces(tensor)) is not None:
            places[name] = tuple(piece.place for piece in pieces)
    files = {path: _File.of(path) for path in {place.path for of_one in places.values() for place in of_one}}
    known = {path: {} if file is None else file.known(kept) for path, file in files.items()}
    found = {
        name: Content(tensors[name].dtype, tuple(tensors[name].shape), sha256)
        for name, of_one in places.items()
        if (sha256 := _same({known[place.path].get(_key_of(tensors[name], of_one)) for place in of_one})) is not None
    }
    rest = {name: tensor for name, tensor in tensors.items() if name not in found}
    taken = _taken(rest, threads, unread)
    new: dict[str, dict[str, str]] = {}
    for name in taken.keys() & places.keys():
        for place in places[name]:
            new.setdefault(place.path, {})[_key_of(tensors[name], places[name])] = taken[name].sha256
    for path, hashes in new.items():
        if (file := files[path]) is not None:
            file.keep(kept, known[path] | hashes)
    return found | taken


def _same(hashes: set[str | None]) -> str | None:
    """The hash that all files of a tensor keep; None where one knows none, or another."""
    return hashes.pop() if len(hashes) == 1 else None


def _key_of(tensor: torch.Tensor, places: Sequence[InFile]) -> str:
    """Under what the hash of a tensor is kept that lies in these places: the bytes of one, or all in their order."""
    if len(places) == 1:
        return f"{places[0].start}+{places[0].nbytes}"
    told = f"{tensor.dtype} {list(tensor.shape)} {[(place.path, place.start, place.shape) for place in places]}"
    return hashlib.sha256(told.encode()).hexdigest()


def _taken(tensors: Mapping[str, torch.Tensor], threads: int, unread: UnreadWeights | None) -> dict[str, Content]:
    """The contents of tensors, by so many threads. RuntimeError once the main thread has ended, which waits for them.

    They are no daemons: Python ends one of these where it next takes the lock of the interpreter, and within an
    operation of torch, whose C++ must not be unwound there, that ends the process by SIGABRT.
    """
    waiting, found = list(tensors.items()), dict[str, Content]()
    problems: list[BaseException] = []

    def take() -> None:
        try:
            while not problems:
                if not threading.main_thread().is_alive():
                    raise RuntimeError("the process is ending")
                name, tensor = waiting.pop()
                found[name] = content_of(tensor, [tensor] if unread is None else unread.in_order(tensor))
        except IndexError:  # none is left
            return
        except BaseException as error:  # noqa: BLE001 - raised below
            problems.append(error)

    others = [threading.Thread(target=take, name="hash") for _ in range(threads - 1)]
    for other in others:
        other.start()
    take()
    for other in others:
        other.join()
    if problems:
        raise problems[0]
    return found


@dataclass(frozen=True)
class _File:
    """A file as it is now."""

    path: str
    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    """When its inode was changed, which nobody can set back."""

    @staticmethod
    def of(path: str) -> _File | None:
        """None of one that is not there any more under its name."""
        with suppress(OSError):
            found = os.stat(path)
            return _File(path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        return None

    def known(self, cache: Path) -> dict[str, str]:
        """The hashes that were kept of this file, by the bytes that they are of."""
        with suppress(OSError, TunerError, KeyError, AttributeError):
            noted = read_json(self._record(cache))
            if noted["file"] == asdict(self):
                return {str(where): str(sha256) for where, sha256 in noted["sha256"].items()}
        return {}

    def keep(self, cache: Path, hashes: Mapping[str, str]) -> None:
        """Keep hashes that were taken since, unless it was changed meanwhile or just before."""
        if _File.of(self.path) != self or time.time_ns() - self.changed_ns < SETTLED_NS:
            return
        keep_json(self._record(cache), {"file": asdict(self), "sha256": dict(hashes)})

    def _record(self, cache: Path) -> Path:
        return cache / f"{hashlib.sha256(self.path.encode()).hexdigest()[:32]}.json"
