"""The errors that end a command: each has one line for people, a hint, and an exit code."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


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


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun: `1 row`, `1,204 rows`; `many` is the plural where that is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def first_line(error: BaseException | str) -> str:
    """What an error says first, or its class where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class TunerError(Exception):
    """An expected failure: `message` says what went wrong, `hint` what to do about it."""

    exit_code: ExitCode = ExitCode.BUG

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a recipe: what, the key (`data.train.0.path`), and where it is written.

    `file`, `line` and `column` (from 1) are None where a flag or a mapping in Python gave the value.
    """

    message: str
    key: str = ""
    file: str | None = None
    line: int | None = None
    column: int | None = None
    text: str = ""
    """The problem on one line, as people see it."""

    @staticmethod
    def at(where: str, key: str, message: str) -> Problem:
        """The problem at a place as it is shown: `recipe.yaml:3:5`, `flag --optimizer.lr 3`, `recipe`."""
        flag = _FLAG.match(where)
        shown = "" if flag is not None and flag[1].replace("-", "_") == key else key
        text = "  ".join(part for part in (where, shown, message) if part)
        if flag is not None:
            return Problem(message, key or flag[1], text=text)
        place = _PLACE.fullmatch(where)
        if place is None:
            return Problem(message, key, text=text)
        return Problem(message, key, place[1], int(place[2]), int(place[3]), text)

    @property
    def position(self) -> tuple[int, int]:
        """Line and column in the file, by which problems are sorted; those of flags come last."""
        return (1 << 40, 0) if self.line is None else (self.line, self.column or 0)

    def document(self) -> dict[str, Any]:
        """The problem as a JSON document holds it."""
        return {
            "file": self.file, "line": self.line, "column": self.column, "key": self.key or None,
            "message": self.message,
        }

    def __str__(self) -> str:
        return self.text or self.message


_PLACE = re.compile(r"(?s)(.+):(\d+):(\d+)")
_FLAG = re.compile(r"flag --([\w.-]+)")


class RecipeError(TunerError):
    """A recipe, flag or argument that cannot be used; `problems` holds every one of them."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, hint: str | None = None, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message, hint)
        self.problems = problems or (Problem(message),)

    @staticmethod
    def of(problems: Iterable[Problem], hint: str | None = None) -> RecipeError:
        """One error of all problems, each on a line, in the order of the file."""
        found = tuple(sorted(problems, key=lambda problem: problem.position))
        count = counted(len(found), "problem")
        return RecipeError(f"{count} in the recipe\n" + "\n".join(f"  {one}" for one in found), hint, found)


class PluginError(TunerError):
    """Code of the user's own, named by the recipe, that is not there, does not fit or failed."""

    exit_code = ExitCode.USAGE


class DataError(TunerError):
    """Rows, prepared data or an artifact that are wrong or corrupt."""

    exit_code = ExitCode.DATA


class NoRowsError(DataError):
    """Sources without a single row to train on."""


class MachineError(TunerError):
    """The machine lacks something: disk, device, library, permission, network."""

    exit_code = ExitCode.ENVIRONMENT


class LostRankError(MachineError):
    """Another process of the run ended, or did not answer in time; that process reports the cause."""


class MemoryLimitError(TunerError):
    """Out of memory, predicted or real."""

    exit_code = ExitCode.MEMORY


class VerificationError(TunerError):
    """An artifact was written but does not equal what it was made from."""

    exit_code = ExitCode.VERIFICATION


class DivergedError(TunerError):
    """Training produced a loss or gradient that is not finite."""

    exit_code = ExitCode.DIVERGED


MACHINE_ERRORS = frozenset((
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.EIO,
    errno.ESTALE, errno.ENOLCK,
))  # fmt: skip


# Near a full card the first allocation that fails is often not one of torch's allocator, which has a class for it, but
# one of a library that torch calls: each has words of its own, in a bare RuntimeError or a child of it.
_NO_MEMORY = re.compile("|".join((
    r"can't allocate memory|not enough memory: you tried to allocate",  # torch, of the host's
    r"CUDA out of memory|CUDA(?: driver)? error: out of memory",
    r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
    r"CU(?:BLAS|SOLVER|SPARSE|DNN)_STATUS_\w*ALLOC(?:ATION)?_FAILED|CUFFT_ALLOC_FAILED",
    r"Triton Error \[CUDA\]: out of memory",
    r"Failed to CUDA (?:host )?\w*alloc|Cuda failure (?:\d+ )?'out of memory'",  # NCCL
)))  # fmt: skip
_NO_DETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception is a failed allocation: Python's, torch's on any device, or one of a library it calls."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None)


def memory_line(error: BaseException) -> str:
    """The line in which a failed allocation says so, as a person reads it; libraries bury it among others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(filter(_NO_MEMORY.search, lines), lines[0] if lines else type(error).__name__)


def space_hint(error: OSError) -> str | None:
    """What to do where nothing more can be written, by what it is that ran out; None for another error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "free disk space, or choose another directory for what is written there (output_dir, data.cache_dir, "
            "TMPDIR), then run the same command"
        )
    if error.errno != errno.EFBIG:
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return "the file system takes no file of this size: choose another directory, then run the same command"
    return f"files may have {limit:,} bytes here: raise that with ulimit -f unlimited, then run the same command"


def as_tuner_error(error: BaseException) -> TunerError:
    """Return what an exception means to people: its line, its hint and its exit code."""
    if isinstance(error, TunerError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return TunerError("interrupted")
    kind, first = type(error).__name__, (str(error).strip().splitlines() or [""])[0]
    if is_out_of_memory(error):
        hint = "lower train.micro_batch_size or data.max_length"
        return MemoryLimitError(f"out of memory: {memory_line(error)}", hint=hint)
    if isinstance(error, RuntimeError) and (found := _NO_DETERMINISTIC.search(str(error))):
        return MachineError(
            f"train.deterministic: {found[1]} has no deterministic kernel on this device",
            hint="write train.deterministic: false, or train on the CPU",
        )
    if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
        named = f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
        return MachineError(named, hint=space_hint(error))
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("tuner"):
        return MachineError(f"the library {error.name} is missing", hint=f"install it: pip install {error.name}")
    return TunerError(f"{kind}: {first}" if first else kind, hint="a bug in tuner; run with --debug to see where")


def rebuilt(kind: str, message: str, hint: str | None, exit_code: int) -> TunerError:
    """An error that another process reported: of the class that it was there, where that is one of these."""
    classes: list[type[TunerError]] = [*TunerError.__subclasses__(), LostRankError]
    error = next((cls for cls in classes if cls.__name__ == kind), TunerError)(message, hint)
    error.exit_code = ExitCode(exit_code)
    return error
