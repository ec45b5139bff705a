"""One export in a process of its own: the very command that a user would give, so that the bytes are the same."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.config.numbers import byte_text
from tuner.config.recipe import ExportSection
from tuner.errors import ExitCode, MachineError, TunerError, rebuilt
from tuner.rundir.checkpoints import CheckpointHold


@dataclass
class ExportProcess:
    """`tuner export-hf CHECKPOINT` with a run's settings; the checkpoint is not pruned while it is held."""

    held: CheckpointHold
    output: Path
    section: ExportSection
    base: str | None
    """What the adapter of a quantised base is merged into; None where there is no choice."""
    log: Path
    warn: Callable[[str], None]
    """Told of what the command warned of."""
    niceness: int
    """Above this process's own."""
    _process: subprocess.Popen[bytes] | None = None
    _ending: threading.Event = field(default_factory=threading.Event)

    def run(self) -> dict[str, Any]:
        """Export; returns the figures that the command reports. Raises the command's error, MachineError where killed.

        It blocks: call it in a thread of its own.
        """
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.held, self.log.open("ab") as log:
                if self._ending.is_set():
                    raise self._cut_short()
                self._process = subprocess.Popen(
                    self._command(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                )
                own = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, self._process.pid, own + self.niceness)  # its threads inherit it
                if self._ending.is_set():
                    self._process.terminate()
                out, _ = self._process.communicate()
        except OSError as error:
            raise MachineError(f"{self.output}: the export could not be started: {error.strerror or error}") from error
        return self._figures(out, self._process.returncode)

    def end(self) -> None:
        """End it: what it has written so far goes, what it has published stays."""
        self._ending.set()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def _command(self) -> list[str]:
        section = self.section
        words = [sys.executable, "-m", "tuner", "export-hf", str(self.held.path), "--output", str(self.output)]
        words += ["--dtype", section.dtype, "--adapter", section.adapter]
        words += ["--keep-fp32", ",".join(section.keep_fp32)] if section.keep_fp32 else []
        words += [] if self.base is None else ["--base", self.base]
        return [*words, "--shard-size", byte_text(section.shard_size), "--json"]

    def _figures(self, out: bytes, code: int) -> dict[str, Any]:
        if self._ending.is_set() or code == ExitCode.INTERRUPTED:
            raise self._cut_short()
        try:
            document = json.loads(out)
            for text in document.get("warnings", ()):
                self.warn(f"export of {self.output.name}: {text}")
            if code == 0:
                figures: dict[str, Any] = document["metrics"]
                return figures
            error = document["error"]
        except (ValueError, KeyError, TypeError):
            raise MachineError(
                f"{self.output}: the export ended with code {code} and said nothing",
                hint=f"its log: {self.log}; export it with: tuner export-hf {self.held.path}",
            ) from None
        raise rebuilt(error["type"], f"export of {self.output.name}: {error['message']}", error["hint"], code)

    def _cut_short(self) -> TunerError:
        error = MachineError(
            f"the export of {self.output.name} was cut short", hint=f"export it with: tuner export-hf {self.held.path}"
        )
        error.exit_code = ExitCode.INTERRUPTED
        return error
