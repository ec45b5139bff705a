"""What made an artifact: package versions and the state of the source tree."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "tuner",
    "torch",
    "transformers",
    "peft",
    "liger-kernel",
    "tokenizers",
    "safetensors",
    "pyarrow",
    "numpy",
    "huggingface-hub",
    "pydantic",
)
GIT_TIMEOUT_S = 5.0


def versions() -> dict[str, str]:
    """Package name -> version of those that are installed, and `python`; imports none of them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(directory: Path) -> dict[str, Any] | None:
    """`{"commit": hex, "dirty": bool}` of the working tree that holds `directory`; None without git or a commit."""
    commit = _git(directory, "rev-parse", "HEAD")
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return {"commit": commit.strip(), "dirty": bool(changes.strip())}


def _git(directory: Path, *arguments: str) -> str | None:
    # A foreign repository's configuration may name programs to run (fsmonitor); none of them is wanted here.
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(directory), *arguments]
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeError):
        return None
    return done.stdout if done.returncode == 0 else None
