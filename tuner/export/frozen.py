"""What training left as it was: the base model's tensors as training held them.

They are read from its published safetensors files, which are located and never loaded whole.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import PreTrainedModel

from tuner.checkpoint.storage import DTYPES, tensor_bytes
from tuner.errors import DataError
from tuner.export.quantized import QuantizedBase, quantized_base
from tuner.export.source import ExportSource
from tuner.export.tensors import (
    OpenFiles,
    TensorSource,
    file_tensor,
    grown_tensor,
    held_tensor,
    made_tensor,
    rounded_tensor,
)
from tuner.export.weights import base_model, frozen_dtype, some
from tuner.model.build import is_part
from tuner.model.freeze import Content, hash_of_frozen
from tuner.model.multimodal import names_in_files
from tuner.model.published import Published, assembled, published, state_names
from tuner.model.stored import stored_tensors, weights_directory
from tuner.rundir.checkpoints import require_same_base


class Frozen:
    """The model's tensors before training in the type in which training held them.

    They are read where they lie in the base model's files. Where these do not hold them (random weights) the model is
    built, in memory.
    """

    def __init__(
        self,
        source: ExportSource,
        plain: PreTrainedModel,
        files: OpenFiles,
        entries: Sequence[Published],
        base: QuantizedBase | None = None,
    ) -> None:
        """Find them; none is read. With ``base`` they are what training computed with, where it quantised them.

        Raises DataError for files that are damaged or absent.
        """
        self._plain, self._dtype, self._new_ids, self._base = plain, frozen_dtype(source), source.new_ids, base
        self._files: Mapping[str, TensorSource] = {}
        self._names: Mapping[str, str] = {}
        self._held: Mapping[str, torch.Tensor] = {}
        if not entries:
            return
        if not source.is_random and not source.given_frozen:
            found = published_tensors(files, source.name_or_path, source.revision)
            wanted = [target for entry in entries for target in entry.targets]
            names = _names_in_files(plain, wanted, found)
            if all(names.values()):
                self._names = {target: name for target, name in names.items() if name}
                self._files = {target: found[name] for target, name in self._names.items()}
                return
        state = state_names(base_model(source))
        if missing := [entry.name for entry in entries if entry.name not in state]:
            raise DataError(
                f"the base model changed since {source.checkpoint.path} was saved: it has no {some(missing)}",
                hint="restore it, or name its commit: model.revision",
            )
        self._held = {entry.name: state[entry.name].detach() for entry in entries}

    def tensor(self, entry: Published) -> TensorSource | None:
        """The tensor; None where the files hold it in parts or in another layout."""
        if entry.name in self._held:
            held = held_tensor(self._held[entry.name])
            return held if self._base is None or self._base.codes is not None else self._as_trained(entry, held)
        return self._as_trained(entry, next(iter(self.parts(entry).values()))) if entry.is_itself else None

    def parts(self, entry: Published) -> dict[str, TensorSource]:
        """What the files hold of it, by published name. Raises DataError for one of another shape than the model's."""
        return {target: self._part(entry.name, target, shape) for target, shape in entry.targets.items()}

    def assembled(self, entry: Published) -> TensorSource:
        """The tensor, made in memory of what the files hold of it."""
        parts = {target: part.whole() for target, part in self.parts(entry).items()}
        return self._as_trained(entry, held_tensor(assembled(self._plain, entry.name, parts)))

    def later(self, entry: Published) -> TensorSource:
        """The same, made when it is first read and dropped after its last slice."""
        tensor = next(tensor for name, tensor in state_names(self._plain).items() if name == entry.name)
        dtype = torch.float32 if self.is_quantized(entry) else next(iter(self.parts(entry).values())).dtype
        return made_tensor(tuple(tensor.shape), dtype, lambda: self.assembled(entry).whole())

    def is_quantized(self, entry: Published) -> bool:
        """Whether training computed with other values than the files hold, which are made of the whole tensor."""
        return self._base is not None and entry.name in self._base.names

    def _as_trained(self, entry: Published, held: TensorSource) -> TensorSource:
        return held if self._base is None else self._base.tensor(entry.name, held)

    def sha256(self, entry: Published) -> tuple[torch.dtype, tuple[int, ...], str]:
        """Type, shape and SHA-256 of the tensor's bytes, read a block at a time where it is in one piece."""
        source = self.tensor(entry) or self.assembled(entry)
        digest = hashlib.sha256()
        for block in source.blocks(source.dtype):
            digest.update(tensor_bytes(block))
        return source.dtype, source.shape, digest.hexdigest()

    def codes(self, entry: Published) -> dict[str, Content]:
        """What stands for a weight in the hash of the base where files hold its codes alone; else nothing."""
        (target, *others) = entry.targets
        if others or self._base is None or self._base.codes is None or entry.name not in self._base.names:
            return {}
        name = self._names[target]
        return self._base.contents(name, entry.name.removesuffix(".weight")) if self._base.codes.is_part(name) else {}

    def _part(self, name: str, target: str, shape: tuple[int, ...]) -> TensorSource:
        found = self._files[target]
        coded = None if self._base is None else self._base.stored(self._names[target], name, shape, self._dtype)
        if coded is not None:
            return coded
        grows = shape and found.shape and shape[1:] == found.shape[1:]  # a scalar has no rows
        if grows and self._new_ids.start <= found.shape[0] < shape[0] == self._new_ids.stop:
            found = grown_tensor(found, shape[0])
        if found.shape != shape:
            raise DataError(f"the base model's {target} has shape {list(found.shape)}, the model has {list(shape)}")
        return rounded_tensor(found, self._dtype) if found.dtype.is_floating_point else found


def require_same_frozen(source: ExportSource, plain: PreTrainedModel, names: Collection[str], files: OpenFiles) -> None:
    """Read the tensors of these names, which were not trained, and check their hash.

    It is that of :func:`tuner.model.freeze.frozen_hash`. Raises DataError where the base model is another one now.
    """
    entries = [entry for entry in published(plain) if entry.name in names] if names else []
    base = quantized_base(source, plain)
    frozen = Frozen(source, plain, files, entries, base if base is not None and base.codes is not None else None)
    stored = {entry.name: found for entry in entries if (found := frozen.codes(entry))}
    entries = [entry for entry in entries if entry.name not in stored]
    whole = [entry for entry in entries if frozen.tensor(entry) is not None]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        contents = dict(zip([entry.name for entry in whole], pool.map(frozen.sha256, whole), strict=True))
    contents |= {entry.name: frozen.sha256(entry) for entry in entries if entry.name not in contents}
    contents |= {name: content for found in stored.values() for name, content in found.items()}
    require_same_base(source.checkpoint, hash_of_frozen(contents))


def _names_in_files(
    plain: PreTrainedModel, targets: Iterable[str], found: Mapping[str, object]
) -> dict[str, str | None]:
    """What the files call each published tensor, with the name of the decoder or without; None where they lack it."""
    if is_part(plain):
        return names_in_files(plain, targets, found)
    prefix = f"{plain.base_model_prefix}."
    spelled = {target: (target, target.removeprefix(prefix), prefix + target) for target in targets}
    return {target: next((name for name in names if name in found), None) for target, names in spelled.items()}


def published_tensors(files: OpenFiles, name_or_path: str, revision: str | None) -> dict[str, TensorSource]:
    """Every tensor of a local directory's or a hub model's safetensors files, by its name there.

    Empty where the model has no such files. Raises DataError for a file that is damaged or absent.
    """
    found = {}
    for name, stored in stored_tensors(weights_directory(name_or_path, revision)).items():
        if stored.dtype not in DTYPES:
            raise DataError(f"{stored.file}: its header cannot be read: {stored.dtype} is no type of weights")
        found[name] = file_tensor(files, stored.file, stored.start, stored.shape, DTYPES[stored.dtype])
    return found
