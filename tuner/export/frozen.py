"""What training left as it was: the base model's tensors as training held them, read from its files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import PreTrainedModel

from tuner.errors import DataError
from tuner.export.base import published_rows
from tuner.export.published import Published, assembled, state_names
from tuner.export.rows import FileRows, GrownRows, HeldRows, OpenFiles, RoundedRows, Rows, blocks, read_all
from tuner.export.source import Source
from tuner.export.weights import base_model, frozen_dtype, some
from tuner.model.freeze import hash_of_frozen


class Frozen:
    """The model's tensors before training in the type in which training held them.

    They are read where they lie in the base model's files. Where these do not hold them (random weights) the model is
    built, in memory.
    """

    def __init__(self, source: Source, plain: PreTrainedModel, files: OpenFiles, entries: Sequence[Published]) -> None:
        """Find them; none is read. Raises DataError for files that are damaged or absent."""
        self._plain, self._dtype, self._new_ids = plain, frozen_dtype(source), source.new_ids
        self._files: Mapping[str, FileRows] = {}
        self._held: Mapping[str, torch.Tensor] = {}
        if not entries:
            return
        facts = source.model
        if facts.get("init") != "random":
            found = published_rows(files, str(facts["name_or_path"]), facts.get("revision"))
            prefix = f"{plain.base_model_prefix}."
            wanted = [target for entry in entries for target in entry.targets]
            names = {target: _known(target, prefix, found) for target in wanted}
            if all(names.values()):
                self._files = {target: found[name] for target, name in names.items() if name}
                return
        state = state_names(base_model(source))
        if missing := [entry.name for entry in entries if entry.name not in state]:
            raise DataError(
                f"the base model changed since {source.checkpoint.path} was saved: it has no {some(missing)}",
                hint="restore it, or name its commit: model.revision",
            )
        self._held = {entry.name: state[entry.name].detach() for entry in entries}

    def rows(self, entry: Published) -> Rows | None:
        """The tensor; None where the files hold it in parts or in another layout."""
        if entry.name in self._held:
            return HeldRows(self._held[entry.name])
        if not entry.is_itself:
            return None
        [rows] = self.parts(entry).values()
        return rows

    def parts(self, entry: Published) -> dict[str, Rows]:
        """What the files hold of it, by published name. Raises DataError for one of another shape than the model's."""
        return {target: self._part(target, shape) for target, shape in entry.targets.items()}

    def sha256(self, entry: Published) -> tuple[torch.dtype, tuple[int, ...], str]:
        """Type, shape and SHA-256 of the tensor's bytes, read a block at a time where it is in one piece."""
        rows = self.rows(entry)
        if rows is None:
            parts = {target: read_all(part) for target, part in self.parts(entry).items()}
            rows = HeldRows(assembled(self._plain, entry.name, parts))
        digest = hashlib.sha256()
        for block in blocks(rows, rows.dtype):
            digest.update(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return rows.dtype, rows.shape, digest.hexdigest()

    def _part(self, target: str, shape: tuple[int, ...]) -> Rows:
        rows: Rows = self._files[target]
        if shape[1:] == rows.shape[1:] and self._new_ids.start <= rows.shape[0] < shape[0] == self._new_ids.stop:
            rows = GrownRows(rows, shape[0])
        if rows.shape != shape:
            raise DataError(f"the base model's {target} has shape {list(rows.shape)}, the model has {list(shape)}")
        return RoundedRows(rows, self._dtype) if rows.dtype.is_floating_point else rows


def hash_of(frozen: Frozen, entries: Sequence[Published]) -> str | None:
    """What :func:`tuner.model.freeze.frozen_hash` gives for a model that holds these tensors beside trained ones."""
    whole = [entry for entry in entries if frozen.rows(entry) is not None]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        contents = dict(zip([entry.name for entry in whole], pool.map(frozen.sha256, whole), strict=True))
    contents |= {entry.name: frozen.sha256(entry) for entry in entries if entry.name not in contents}
    return hash_of_frozen(contents)


def _known(target: str, prefix: str, found: Mapping[str, object]) -> str | None:
    """The tensor's name in the files, which may leave out the name of the decoder or put it in front."""
    for name in (target, target.removeprefix(prefix), prefix + target):
        if name in found:
            return name
    return None
