"""Caches of tests: private, but for what transformers makes of tokenizers, which takes a second to ask."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHARED = "TUNER_TEST_TOKENIZERS"
"""The variable that names the directory of those answers, one for all tests and their processes."""

KEPT = 16
"""So many texts of YAML are remembered with their events, a tenth of a megabyte each."""


def new_cache(directory: Path) -> Path:
    """A cache directory without prepared data."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def share() -> None:
    """Have this process, and those forked from it, take answers from the shared directory, and give theirs to it."""
    from tuner.data.encoding import tokenizer_files

    context = tokenizer_files._LoadContext
    real = context.as_loaded

    def as_loaded(self: Any, files: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, Any]]:
        if SHARED not in os.environ:
            return real(self, files)
        key = self._key(files)
        shared, own = Path(os.environ[SHARED]) / key, self.cache_dir / "tokenizers" / key
        _same_files(shared, own)
        found = real(self, files)
        _same_files(own, shared)
        return found

    context.as_loaded = as_loaded  # type: ignore[method-assign]
    _remember_events()
    for name in ("cuda", "xpu", "mtia"):  # each seed keeps a picture of the stack for devices that nobody asks for
        if device := sys.modules.get(f"torch.{name}"):
            vars(device)["traceback"] = SimpleNamespace(format_stack=list)


def _remember_events() -> None:
    """Have the last texts that were YAML to their ends not be parsed again: a launch reads its run's recipe thrice."""
    from ruamel.yaml import YAML

    real, last = YAML.parse, dict[str, list[Any]]()

    def parse(self: YAML, stream: Any) -> Iterator[Any]:
        if stream not in last:
            found = []
            for event in real(self, stream):
                found.append(event)
                yield event
            last[stream] = found
            if len(last) > KEPT:
                del last[next(iter(last))]
        else:
            yield from last[stream]

    YAML.parse = parse


def _same_files(given: Path, taker: Path) -> None:
    """Give a directory's files a second name below another directory, unless that is there."""
    if taker.exists() or not given.is_dir() or taker.parent.is_symlink():
        return
    made = taker.parent / f".tmp-shared-{os.getpid()}"
    with suppress(OSError):  # a cache that cannot be written, or another process was first
        shutil.copytree(given, made, copy_function=os.link, ignore=shutil.ignore_patterns(".*"))
        made.rename(taker)
    shutil.rmtree(made, ignore_errors=True)
