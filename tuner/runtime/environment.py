"""What a launch ran on, by which versions, and how it was called: enough to do it again, and never a secret."""

import functools
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from tuner import __version__
from tuner.runtime.dist import cores

_LISTED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
PACKAGES: list[str] = _LISTED["packages"]
"""Whose versions are recorded, besides Python's and the program's own, whatever it is published as."""
VARIABLES: list[str] = _LISTED["variables"]
"""Variables that are recorded, besides those with one of the prefixes."""
PREFIXES = ("GLOO_", "GOMP_", "KMP_", "NCCL_", "OMP_", "TORCH_NCCL_", "TUNER_")
HIDDEN = "***"
_WORDS = (
    "token|api[_-]?key|apikey|key|secret|secrets|pass|password|passwd|passphrase|pwd|pw|pin|credentials?|creds?|auth|bearer"
    "|cookie|session|signature|private|webhook(?:[_-]url)?"
)
_SECRET = re.compile(rf"(?:^|[_.-])(?:{_WORDS})$", re.IGNORECASE)
"""A flag whose last word is that of a secret."""
_SECRET_VARIABLE = re.compile(rf"(?:^|_)(?:{_WORDS})\d*(?:_|$)", re.IGNORECASE)
"""A variable that has such a word anywhere."""
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
MOST_CHARACTERS = 2000
"""A longer value is cut."""


def environment() -> dict[str, Any]:
    """Python, platform, host, cores, and the variables that change what a training computes or how fast."""
    return {
        "python": platform.python_version(), "platform": platform.platform(), "host": socket.gethostname(),
        "cores": cores(), "variables": safe_variables(os.environ),
    }


def versions() -> dict[str, str]:
    """Package name -> version of those that are installed, `python` and `tuner`; imports none of the others."""
    return {"python": platform.python_version(), "tuner": __version__, **_installed()}


@functools.cache
def _installed() -> Mapping[str, str]:
    """Those of the packages; read once, since each is a large file of headers."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def safe_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Those variables of an allow-list that are set and whose names are not a secret's."""
    names = sorted(name for name in env if name in VARIABLES or name.startswith(PREFIXES))
    return {name: _cut(_USER_OF_URL.sub(HIDDEN, env[name])) for name in names if not _SECRET_VARIABLE.search(name)}


def python_path(env: Mapping[str, str]) -> str:
    """PYTHONPATH in such an environment for a process that is to import this very package."""
    package = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(dict.fromkeys([package, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]))


def command_line(words: Sequence[str] | None = None) -> list[str]:
    """The words of this process's command line; what follows a name such as `--hooks.0.options.token` is hidden."""
    shown: list[str] = []
    hide = False
    for word in sys.argv if words is None else words:
        name, equals, _ = word.partition("=")
        is_flag = word.startswith("-")
        if hide and not is_flag:
            shown.append(HIDDEN)
        elif is_flag and equals and _SECRET.search(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(_cut(_USER_OF_URL.sub(HIDDEN, word)))
        hide = is_flag and not equals and bool(_SECRET.search(name))
    return shown


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…"
