"""llama.cpp's own answers about a file, from a process of its own with a limit to its time.

llama.cpp aborts its process over files that it does not like.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.errors import VerificationError
from tuner.runtime.files import json_bytes, read_json, write_new

SECONDS = 3600.0
"""How long the answers may take."""
ANSWERS = "answers.json"


def asked(directory: Path, model: Path, questions: Mapping[str, Any], seconds: float = SECONDS) -> dict[str, Any]:
    """Ask in a new process, with its files in ``directory``. Raises VerificationError where it does not answer."""
    job, answers = directory / "questions.json", directory / ANSWERS
    for path in (job, answers):
        path.unlink(missing_ok=True)
    write_new(job, json_bytes({"model": str(model), **questions}))
    command = [sys.executable, "-m", "tuner.export.gguf.llama_server", str(job)]
    with (directory / "llama.log").open("wb") as log:
        try:
            code = subprocess.run(command, stdout=log, stderr=log, timeout=seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            raise VerificationError(f"llama.cpp did not answer within {seconds:.0f} s; nothing was published") from None
    if code or not answers.is_file():
        raise VerificationError(
            f"llama.cpp cannot use the file: {said_in(directory / 'llama.log')}; nothing was published"
        )
    return read_json(answers)


def said_in(log: Path) -> str:
    """The line of a log that says what went wrong, else its last one."""
    lines = log.read_text(errors="replace").splitlines()
    why = next((line for line in lines if "error" in line.lower() or "GGML_ASSERT" in line), (lines or ["?"])[-1])
    of_template = next((f" {line}" for line in lines if line.startswith("Error: ")), "")
    return why.rpartition(" E ")[2].strip() + of_template  # without the time and the level
