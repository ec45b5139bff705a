"""The errors that end a command: each has one line for people, a hint, and an exit code."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The documented exit codes of every command."""

    OK = 0
    BUG = 1
    USAGE = 2
    DATA = 3
    ENVIRONMENT = 4
    MEMORY = 5
    VERIFICATION = 6
    DIVERGED = 7
    STOPPED = 75
    INTERRUPTED = 130


class TunerError(Exception):
    """An expected failure: `message` says what went wrong, `hint` what to do about it."""

    exit_code: ExitCode = ExitCode.BUG

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RecipeError(TunerError):
    """A recipe, flag or argument that cannot be used; `problems` lists every one of them, one line each."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, hint: str | None = None, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.problems = problems or (message,)


class PluginError(TunerError):
    """Code of the user's own, named by the recipe, that is not there, does not fit or failed."""

    exit_code = ExitCode.USAGE


class DataError(TunerError):
    """Rows, prepared data or an artifact that are wrong or corrupt."""

    exit_code = ExitCode.DATA


class MachineError(TunerError):
    """The machine lacks something: disk, device, library, permission, network."""

    exit_code = ExitCode.ENVIRONMENT


class MemoryLimitError(TunerError):
    """Out of memory, predicted or real."""

    exit_code = ExitCode.MEMORY


class VerificationError(TunerError):
    """An artifact was written but does not equal what it was made from."""

    exit_code = ExitCode.VERIFICATION


class DivergedError(TunerError):
    """Training produced a loss or gradient that is not finite."""

    exit_code = ExitCode.DIVERGED


class StoppedError(TunerError):
    """Stopped on request with a checkpoint saved: the run can be resumed."""

    exit_code = ExitCode.STOPPED
