"""Verdicts of the proof at the start, kept in the cache by all that they depend on.

Whether documents are kept apart, and whether what trains is the model, is a matter of code: of the model's class and
config, of what is put into it, and of the kernels and libraries that compute it. The values of the weights are no part
of the key: `tuner prove RECIPE --weights` holds the model to its class with those that are there.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tuner.errors import TunerError
from tuner.runtime.environment import versions
from tuner.runtime.files import hash_of, keep_json, read_json
from tuner.stages import cache_root

if TYPE_CHECKING:
    from tuner.model.root import CausalLM
    from tuner.model.row_layout import Route
    from tuner.setup.resolve import Resolved

PROOFS = "proofs"
_SECTIONS = {"model": {"name_or_path", "revision", "init_from"}, "adapter": set[str](), "parallel": set[str]()}
"""Sections of the recipe that decide what is computed, without the keys that say where values come from."""
_INSTALLED = ("torch", "transformers", "peft", "tuner")
"""Packages whose version says what their code is; that of tuner itself is read, as it is being worked at."""
_CODE = ("model", "parallel", "setup")
"""Parts of it that compute a model."""
_known: dict[str, Verdict] = {}


@dataclass(frozen=True)
class Verdict:
    """How documents go through the decoder, and why not by the first way, where it is another one."""

    route: Route
    why_apart: str | None


def key_of(resolved: Resolved, root: CausalLM, longest: int, packed: bool) -> str:
    """The key of a verdict on this model."""
    recipe = resolved.recipe
    sections = {name: getattr(recipe, name).model_dump(mode="json", exclude=out) for name, out in _SECTIONS.items()}
    facts: dict[str, Any] = {
        "config": hashlib.sha256(root.model.config.to_json_string(use_diff=False).encode()).hexdigest(),
        "class": f"{type(root.model).__module__}.{type(root.model).__qualname__}",
        "sources": _sources(type(module) for module in root.modules()),
        "modules": hashlib.sha256(repr(_parts(root)).encode()).hexdigest(),
        **sections,
        "train": recipe.train.model_dump(mode="json", include={"precision", "tf32", "tiled_mlp", "device"}),
        "packing": recipe.data.packing, "packed": packed, "longest": longest, "from": root.layout.route,
        "method": recipe.method.kind, "new_tokens": len(resolved.new_ids), "versions": versions(),
        "device": resolved.facts.name, "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    return hash_of(facts, 32)


def known(key: str, cache: Path | None) -> Verdict | None:
    """The verdict that a launch before came to; None where there is none that can be read."""
    if key not in _known:
        with suppress(OSError, TunerError, ValueError, TypeError, KeyError):
            _known[key] = Verdict(**read_json(_path(key, cache))["verdict"])
    return _known.get(key)


def keep(key: str, verdict: Verdict, cache: Path | None) -> None:
    """Keep a verdict; where the cache cannot be written, for this process alone."""
    _known[key] = verdict
    keep_json(_path(key, cache), {"verdict": asdict(verdict)})


def _path(key: str, cache: Path | None) -> Path:
    return (cache_root() if cache is None else cache) / PROOFS / f"{key}.json"


def _parts(root: CausalLM) -> list[tuple[str, str, bool, list[tuple[str, tuple[int, ...], str]]]]:
    """Name, class and mode of each module, with the shapes and types of its own tensors."""
    found = []
    for name, module in root.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = [(key, tuple(tensor.shape), str(tensor.dtype)) for key, tensor in own]
        wrapped = "forward" in vars(module)
        found.append((name, f"{type(module).__module__}.{type(module).__qualname__}", wrapped, shapes))
    return found


def _sources(classes: Iterable[type]) -> str:
    """A hash of the code of modules whose package's version is not in the key: tuner's own, and that of any other."""
    files = {_file_of(kind) for kind in set(classes)}
    here = source_hash(_CODE)
    others = sorted(hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if file is not None)
    return hashlib.sha256("".join([here, *others]).encode()).hexdigest()


@functools.cache
def _file_of(kind: type) -> str | None:
    """The file of a class that belongs to no package whose version is known."""
    if kind.__module__.partition(".")[0] in _INSTALLED or kind.__module__ not in sys.modules:
        return None
    with suppress(TypeError, OSError):
        return inspect.getsourcefile(kind)
    return None


@functools.cache
def source_hash(parts: tuple[str, ...]) -> str:
    """Of the sources of these parts of tuner."""
    package = Path(__file__).resolve().parent.parent
    files = sorted(file for part in parts for file in (package / part).rglob("*.*") if "__pycache__" not in file.parts)
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
