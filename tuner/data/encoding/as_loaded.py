"""A tokenizer's files as transformers loads them: asked once for each tokenizer and version, and kept in the cache.

    <cache>/tokenizers/<files>/<version of transformers>-<format>/    answer.json, and the files it replaces

What transformers makes of a tokenizer is not what tokenizer.json says for many classes: `tuner.transformers_tokenizer`
asks it, in a process of its own. The answers of other versions stay next to each other: what changes from one version
to the next is seen.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tuner.data.encoding.template import TEMPLATE_FILE, TOOL_TEMPLATE_FILE
from tuner.errors import DataError, MachineError
from tuner.runtime.files import (
    TMP_PREFIX,
    discard_dir,
    file_entries,
    json_bytes,
    publish_dir,
    read_json,
    sweep,
    verify_entries,
    write_atomic,
)
from tuner.runtime.lock import FileLock

FORMAT = 1
"""Counts up when the same files and version would get another answer."""
_CHILD = "tuner.transformers_tokenizer"
_ANSWER = "answer.json"
# What AutoTokenizer reads of a config.json to choose the class.
_CHOOSING = ("model_type", "model_name", "tokenizer_class")


@dataclass(frozen=True)
class LoadedAs:
    """How transformers loads a tokenizer."""

    transformers: str
    """The version that was asked."""
    tokenizer_class: str
    changed: tuple[str, ...] | None
    """Parts of tokenizer.json that the class replaces by its own; None where there was no tokenizer.json."""
    other_versions: tuple[str, ...] = ()
    """Other versions of transformers that this cache has seen give other ids."""

    def facts(self) -> dict[str, Any]:
        """As a manifest holds it."""
        changed = None if self.changed is None else list(self.changed)
        return {
            "transformers": self.transformers,
            "class": self.tokenizer_class,
            "changed": changed,
            "other_versions": list(self.other_versions),
        }


def as_loaded(
    files: Mapping[str, bytes], config: bytes | None, model_config: bytes | None, cache_dir: Path
) -> tuple[dict[str, bytes], LoadedAs]:
    """The files with which every reader gets the tokenizer that transformers makes of `files`, and what that is.

    `config` is the config.json next to them, `model_config` that of the trained model, next to which they will be
    exported: both decide about the class. Files that are loaded as they are come back as they are. Raises DataError
    where transformers cannot load them, or not alike everywhere.
    """
    now = version("transformers")
    root = cache_dir / "tokenizers" / _key(files, config, model_config)
    directory = root / f"{now}-{FORMAT}"
    kept = _kept(directory)
    answer, replaced = kept if kept is not None else _ask(files, config, model_config, directory)
    merged = {name: content for name, content in {**files, **replaced}.items() if name not in answer["removed"]}
    changed = answer["changed"]
    loaded = LoadedAs(now, answer["class"], None if changed is None else tuple(changed), tuple(_others(root, answer)))
    return merged, loaded


def _key(files: Mapping[str, bytes], config: bytes | None, model_config: bytes | None) -> str:
    """A hash of everything that decides how the files are loaded, but for the version of transformers."""
    digest = hashlib.sha256()
    for name in sorted(files.keys() - {TEMPLATE_FILE, TOOL_TEMPLATE_FILE}):
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    own = _chosen_by(config, (*_CHOOSING, "transformers_version"))
    digest.update(json.dumps([own, _chosen_by(model_config, _CHOOSING)]).encode())
    return digest.hexdigest()[:16]


def _chosen_by(config: bytes | None, keys: tuple[str, ...]) -> list[Any] | None:
    if config is None:
        return None
    try:
        facts = json.loads(config)
    except (ValueError, RecursionError):
        return ["unreadable", hashlib.sha256(config).hexdigest()]
    return [facts.get(key) for key in keys] if isinstance(facts, dict) else ["no object"]


def _kept(directory: Path) -> tuple[dict[str, Any], dict[str, bytes]] | None:
    """The answer of a directory and the files in it; None where there is none or it is damaged."""
    with suppress(DataError, OSError, KeyError, TypeError, AttributeError):
        answer = read_json(directory / _ANSWER)
        verify_entries(directory, answer["files"], hash=True)
        return answer, {name: (directory / name).read_bytes() for name in answer["files"]}
    return None


def _ask(
    files: Mapping[str, bytes], config: bytes | None, model_config: bytes | None, directory: Path
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Ask transformers in a child process, and keep the answer where the cache can be written. Raises DataError."""
    with _locked(directory.parent) as is_kept:
        if is_kept and (kept := _kept(directory)) is not None:
            return kept  # another process asked meanwhile
        with tempfile.TemporaryDirectory(prefix=TMP_PREFIX, dir=directory.parent if is_kept else None) as name:
            job = Path(name)
            configs = {"source/config.json": config, "model.json": model_config}
            given = {**{f"source/{file}": content for file, content in files.items()}, **configs}
            for path, content in given.items():
                if content is not None:
                    (job / path).parent.mkdir(parents=True, exist_ok=True)
                    (job / path).write_bytes(content)
            answers = _answered(job)
            answer = {**read_json(answers / _ANSWER), "files": file_entries(answers, exclude=(_ANSWER,))}
            write_atomic(answers / _ANSWER, json_bytes(answer))
            replaced = {file: (answers / file).read_bytes() for file in answer["files"]}
            if is_kept:
                discard_dir(directory)
                publish_dir(answers, directory)
    return answer, replaced


def _answered(job: Path) -> Path:
    """Run the child on a job; the directory of its answer. Raises DataError with the child's reason."""
    # tiktoken would keep what it reads in a directory of a fixed name in /tmp.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TIKTOKEN_CACHE_DIR": ""}
    command = [sys.executable, "-m", _CHILD, str(job)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or [f"it ended with {result.returncode}"])[-1]
        raise DataError(f"the tokenizer cannot be loaded as its readers would load it: {reason}")
    return job / "answer"


@contextmanager
def _locked(root: Path) -> Iterator[bool]:
    """Hold the lock of a tokenizer's answers for the length of the block; false where nothing can be written there.

    The answer is then asked for again the next time. What killed processes left goes.
    """
    lock = FileLock(root / ".lock")
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock.acquire(wait=True)
        sweep(root)
    except (OSError, MachineError):
        lock.release()
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _others(root: Path, answer: Mapping[str, Any]) -> Iterator[str]:
    """Versions of transformers with other ids, of those whose answers are kept."""
    for path in sorted(root.glob(f"*-{FORMAT}/{_ANSWER}")):
        with suppress(DataError):
            if read_json(path).get("ids_sha256") != answer["ids_sha256"]:
                yield path.parent.name.removesuffix(f"-{FORMAT}")
