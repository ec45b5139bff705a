"""`tuner prove`: every layout of a recipe against one process, on a small model, in float32."""

import contextlib
import gc
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tuner.config.recipe import Recipe
from tuner.errors import LostRankError, MachineError, RecipeError, VerificationError, as_tuner_error
from tuner.prove.compare import LayoutProof, Verdict, unequal
from tuner.prove.layouts import ALONE, Layout, laid_out, layouts_of
from tuner.prove.training import Setting, train_layout, train_plain
from tuner.prove.twin import Twin, make_twin
from tuner.runtime.dist import RankInfo, log_name
from tuner.runtime.files import read_json, scratch_dir, write_json
from tuner.runtime.process import process_group
from tuner.runtime.spawn import local_store
from tuner.setup.specs import meta_model_of, step_config_of

STEPS = 20


@dataclass(frozen=True)
class Proven:
    """What was found of all layouts, in the order in which they were asked for."""

    proofs: tuple[LayoutProof, ...]
    assumptions: tuple[str, ...]

    @property
    def wrong(self) -> tuple[LayoutProof, ...]:
        """Those that are not what one process computes, or that failed."""
        return tuple(proof for proof in self.proofs if proof.verdict in {"unequal", "failed"})


def prove(recipe: Recipe, steps: int, layouts: Sequence[str], say: Callable[[str], None]) -> Proven:
    """Train a small model of a recipe's architecture in one process, then under each layout, and compare.

    ``layouts`` are names (:func:`~tuner.prove.layouts.parse`); none means the recipe's own and all known ones. ``say``
    gets a line for each that is done. Raises RecipeError where no small model can be made, and VerificationError where
    one process cannot train it.
    """
    if RankInfo.is_given():
        raise RecipeError("prove starts its processes itself", hint="run it without torchrun or srun")
    chosen = layouts_of(recipe.parallel, layouts)
    with scratch_dir("tuner-prove-") as place:
        (place / "model").mkdir()
        twin = make_twin(recipe, place / "model")
        setting = Setting(twin, steps, place)
        meta_model_of(twin.resolved(ALONE))  # imports its class: forked processes have it then
        found = {layout: proof for layout in chosen if (proof := refused(twin, layout)) is not None}
        if left := [layout for layout in chosen if layout not in found]:
            train_alone(setting)
            say("one process trained")
        for layout, proof in proofs_of(setting, left):
            found[layout] = proof
            say(f"{layout.name}: {proof.verdict}")
    return Proven(tuple(found[layout] for layout in chosen), twin.assumptions)


def refused(twin: Twin, layout: Layout) -> LayoutProof | None:
    """Why a layout is not possible for a model, or not supported, as far as shows before a process starts."""
    try:
        laid_out(twin.own, layout)  # where the small model leaves out what the recipe's rules refuse
        step_config_of(twin.resolved(layout), torch.device("cpu"), layout.rank_info(0))  # with its processes
    except (RecipeError, MachineError) as error:
        return LayoutProof(layout.name, layout.processes, "refused", cause=_reason(error))
    return None


def _reason(error: RecipeError | MachineError) -> str:
    """The reason alone, without where in a recipe that nobody wrote it stands."""
    problems = error.problems if isinstance(error, RecipeError) else ()
    return problems[0].message if problems else error.message


def train_alone(setting: Setting) -> None:
    """Train the small model in one process of its own. Raises VerificationError where that fails."""

    def work(job: int, rank: int) -> None:
        train_plain(setting)

    (setting.place / "alone").mkdir()
    for answer in in_processes(1, 1, work, setting.place / "alone"):
        if isinstance(answer, Failure):
            raise VerificationError(
                f"one process cannot train the small model: {answer.message}", hint="tuner train shows it on its own"
            )


def proofs_of(setting: Setting, layouts: Sequence[Layout]) -> Iterator[tuple[Layout, LayoutProof]]:
    """The proofs of layouts, those with as many processes one after the other in the same group."""
    for processes in sorted({layout.processes for layout in layouts}):
        some = [layout for layout in layouts if layout.processes == processes]
        place = Path(tempfile.mkdtemp(prefix=f"of-{processes}-", dir=setting.place))

        def work(job: int, rank: int, some: list[Layout] = some, place: Path = place) -> dict[str, Any]:
            return _answer(setting, some[job], rank, place)

        answers = in_processes(processes, len(some), work, place)
        yield from ((layout, _proof(layout, answer)) for layout, answer in zip(some, answers, strict=True))


def _answer(setting: Setting, layout: Layout, rank: int, place: Path) -> dict[str, Any]:
    try:
        figures, cause = train_layout(setting, layout, rank, place)
    except RecipeError as error:  # raised on every rank, before anything is computed
        return {"refused": _reason(error)}
    return {"figures": {name: str(value) for name, value in figures.items()}, "cause": cause}


def _proof(layout: Layout, answer: Any) -> LayoutProof:
    if isinstance(answer, Failure):
        return LayoutProof(layout.name, layout.processes, "failed", cause=answer.message)
    if "refused" in answer:
        return LayoutProof(layout.name, layout.processes, "refused", cause=answer["refused"])
    figures = {name: float(value) for name, value in answer["figures"].items()}
    verdict: Verdict = "unequal" if unequal(figures) else "equal"
    return LayoutProof(layout.name, layout.processes, verdict, figures, answer["cause"])


POLL_S = 0.02
SILENT_S = 60.0
"""How long a collective waits for another process: steps of a small model take a fraction of a second."""
GRACE_S = 2 * SILENT_S
"""How long a group is waited for after one of its processes failed; the others notice by themselves before that."""

Work = Callable[[int, int], Any]
"""From the number of a job and a rank to plain values, the same on every rank."""


@dataclass(frozen=True)
class Failure:
    """A job that ended without an answer, in words."""

    message: str


def in_processes(processes: int, jobs: int, work: Work, place: Path) -> Iterator[Any | Failure]:
    """What ``work`` gives for each job in a group of so many processes, one after the other.

    A job that fails takes its group with it: the next ones get another. ``place`` is a directory of its own.
    """
    done = 0
    while done < jobs:
        group = _Group(processes, place / f"group-{done}")
        with group.started(range(done, jobs), work):
            while done < jobs:
                answer = group.answer(done)
                done += 1
                yield answer
                if isinstance(answer, Failure):
                    break


class _Group:
    """Forked processes that meet through a store of this process."""

    def __init__(self, processes: int, place: Path) -> None:
        self._processes, self._place = processes, place
        self._running: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._heard = self._held = -1

    @contextlib.contextmanager
    def started(self, jobs: Sequence[int], work: Work) -> Iterator[None]:
        """Have them run, and gone at the end."""
        self._place.mkdir()
        self._heard, self._held = os.pipe()  # its one end is open for as long as this process lives
        with local_store() as port:
            try:
                for rank in range(self._processes):
                    self._running[rank] = self._fork(rank, port, jobs, work)
                yield
            finally:
                self._end()
                os.close(self._heard)
                os.close(self._held)

    def answer(self, job: int) -> Any | Failure:
        """The answer of rank 0, once every rank has one; or the failure that came first."""
        path, failed_s = self._answer_path(job), None
        while not path.is_file():
            gone = self._gone()
            if failed_s is None and gone:
                failed_s = time.monotonic()
            if failed_s is not None and (not self._running or time.monotonic() - failed_s > GRACE_S):
                if path.is_file():  # it was written between the two looks
                    break
                return Failure(self._reason())
            time.sleep(POLL_S)
        return read_json(path)["answer"]

    def _answer_path(self, job: int) -> Path:
        return self._place / f"answer-{job}.json"

    def _error_path(self, rank: int) -> Path:
        return self._place / f"error-{rank}.json"

    def _gone(self) -> bool:
        """Whether any process ended otherwise than well; those that ended are no longer running."""
        for rank, pid in list(self._running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._running[rank]
                self._codes[rank] = os.waitstatus_to_exitcode(status)
        return len(self._running) < self._processes

    def _reason(self) -> str:
        """What the first rank to fail says; one that lost another says it only where nobody says more."""
        errors = [read_json(path) for rank in range(self._processes) if (path := self._error_path(rank)).is_file()]
        own = [error for error in errors if error["kind"] != LostRankError.__name__]
        if found := min(own or errors, key=lambda error: error["at_s"], default=None):
            return str(found["message"])
        rank, code = next(iter(self._codes.items()))
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"rank {rank} {how} and said nothing"

    def _end(self) -> None:
        for pid in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._running.values():
            os.waitpid(pid, 0)
        self._running.clear()

    def _fork(self, rank: int, port: int, jobs: Sequence[int], work: Work) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, none of which holds a lock of ours
            pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            self._as_rank(rank, port, jobs, work)
            code = 0
        except BaseException as error:  # noqa: BLE001 - the process ends here
            traceback.print_exc()
            known = as_tuner_error(error)
            said = {"kind": type(known).__name__, "message": f"rank {rank}: {known.message}", "at_s": time.monotonic()}
            write_json(self._error_path(rank), said)
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(code)

    def _as_rank(self, rank: int, port: int, jobs: Sequence[int], work: Work) -> None:
        """Be a rank: what it says goes to its log."""
        gc.freeze()  # the end of a group looks for cycles: among what is shared, that would copy it
        os.close(self._held)
        log = os.open(self._place / log_name(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        sys.stdout = sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ |= {"OMP_NUM_THREADS": "1"}
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with process_group(RankInfo(rank, self._processes, rank, self._processes), "cpu", SILENT_S):
            for job in jobs:
                if select.select([self._heard], [], [], 0)[0]:  # who forked this was killed: nobody reads answers
                    return
                answer = work(job, rank)
                if rank == 0:
                    write_json(self._answer_path(job), {"answer": answer})
