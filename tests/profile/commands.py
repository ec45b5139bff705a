"""Command lines of `tuner`, each in a process of its own, forked from one that has imported what all of them need."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

IMPORTED = ["tuner.cli.main", "tuner.profile.predict", "tuner.profile.launch", "tuner.profile.fit"]


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def tuner(*words: str, cwd: Path, stdin: str = "") -> Done:
    """Run one command line in a directory."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        (where / "in").write_text(stdin)
        process = server.Process(target=_run, args=(list(words), cwd, where, dict(os.environ)))
        process.start()
        process.join()
        assert process.exitcode is not None
        return Done(process.exitcode, (where / "out").read_text(), (where / "err").read_text())


def _run(words: list[str], cwd: Path, where: Path, environment: dict[str, str]) -> None:
    from tuner.cli.main import main

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, name in enumerate(("in", "out", "err")):
        handle = os.open(where / name, os.O_RDWR | os.O_CREAT)
        os.dup2(handle, number)
    sys.stdin = os.fdopen(0)  # multiprocessing had put another in its place
    main(words)
