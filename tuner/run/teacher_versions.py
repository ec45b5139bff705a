"""The versions of a teacher that is still learning: which one a launch begins with, and how a newer one is taken."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.config.methods import DistillMethod
from tuner.data.building.spec import PrepareSpec
from tuner.errors import DataError
from tuner.run.status import RunStatus
from tuner.rundir.exports import version_dirs
from tuner.rundir.versions import TakenVersion, TakenVersions, read_teachers, write_teachers
from tuner.runtime.console import Console
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.build import Assembly
from tuner.setup.model import WeightFacts, assemble_teacher
from tuner.setup.teacher import check_teacher, files_read, incomplete, newest_teacher
from tuner.train.plan import cadence
from tuner.train.progress import Progress


@dataclass
class TeacherVersions:
    """The versions of a run's teacher as far as a launch is, on every rank."""

    method: DistillMethod
    spec: PrepareSpec
    """With the student's tokenizer."""
    known: TakenVersions
    at_hand: TakenVersion
    label = "teacher"
    _files: frozenset[str] = frozenset()
    """The names of its config's and tokenizer's files; its directory may go once it is loaded."""

    @property
    def path(self) -> Path:
        """The directory of the version at hand."""
        return Path(self.method.teacher) / self.at_hand.name

    def begin(self, console: Console) -> None:
        """Say which version a launch begins with."""
        console.say(self.label, f"{self.path.name} of {self.path.parent}")

    def due(self, progress: Progress, assembly: Assembly) -> Sequence[int]:
        """Whether a newer one is looked for now."""
        tokens = assembly.prepared.train.tokens_per_row
        is_due = cadence(self.method.teacher_every, assembly.timetable.plan, tokens).due_at(progress.step)
        return [0] if is_due else []

    def as_state(self, step: int) -> dict[str, Any]:
        """Their part of a checkpoint's JSON state after ``step``."""
        return self.known.until(step).as_plain()

    def identify(self, teacher: WeightFacts | None) -> None:
        """Note the weights of the version at hand. Raises DataError where they are not those that the run had."""
        assert teacher is not None, "a run with versions has a teacher in memory"
        found = str(teacher.agreed_frozen_hash())
        if self.at_hand.sha256 and self.at_hand.sha256 != found:
            raise DataError(
                f"{self.path}: the teacher changed since the run learned from it ({self.at_hand.sha256} -> {found})",
                hint="restore it; or start a new run with --name",
            )
        self._files = files_read(self.path)
        entry = replace(self.at_hand, sha256=found)
        self.at_hand, self.known = entry, self.known.having(entry)

    def look(self, step: int, pass_over: Callable[[str], None]) -> TakenVersion:
        """The version to learn from after ``step``, on rank 0: as it was noted, or else the newest whole one.

        One that is still being copied is passed over: a later look may find it whole.
        """
        if step <= self.known.looked:
            return self.known.at(step)
        at_hand = int(self.at_hand.name.rpartition("-")[2])
        for number, path in version_dirs(Path(self.method.teacher)):
            if number <= at_hand:
                break
            if (problem := incomplete(path, self._files)) is None:
                return TakenVersion(step, path.name, "")
            pass_over(f"{path.name} is passed over: it {problem}")
        return self.at_hand

    def others(self, due: Sequence[int], step: int, say: Callable[[str], None]) -> dict[int, TakenVersion]:
        """The version to learn from, where it is another one and reads the student's tokens. On rank 0.

        Raises DataError, RecipeError.
        """
        entry = self.look(step, say)
        if entry == self.at_hand:
            return {}
        path = entry.require(Path(self.method.teacher) / entry.name)
        update: dict[str, Any] = {"teacher": str(path), "teacher_every": None}
        check_teacher(self.method.model_copy(update=update), self.spec.tokenizer, self.spec.cache_dir)
        return {0: entry}

    def take(self, others: Mapping[int, TakenVersion], assembly: Assembly, step: int) -> None:
        """Learn from another version from now on; the one before is freed first. Collective. Raises DataError."""
        state = assembly.train_state
        self.at_hand, state.method.teacher = others[0], None
        gc.collect()  # a sharded module's hooks refer to it
        resolved = replace(assembly.resolved, teacher=str(self.path))
        state.method.teacher, facts = assemble_teacher(resolved, self.method, state.step_config)
        self.identify(facts)

    def looked_after(self, due: Sequence[int], step: int) -> None:
        """What was found after ``step`` is final."""
        self.known = self.known.looked_after(step)

    def write(self, run_dir: Path) -> None:
        """Replace `teachers.json`."""
        write_teachers(run_dir, self.known)


def begin_versions(method: DistillMethod, status: RunStatus, spec: PrepareSpec) -> TeacherVersions:
    """The versions as a launch begins with them: as rank 0 has them noted, or the newest one. Collective.

    Raises DataError where the one that the run had is gone, RecipeError where there is none.
    """
    step, directory = 0 if status.checkpoint is None else status.checkpoint.step, Path(method.teacher)

    def begun() -> TakenVersions:
        plain = None if status.checkpoint is None else status.checkpoint.state.get("teachers")
        noted = read_teachers(status.run.path) or (None if plain is None else TakenVersions.of(plain))
        if noted is None:
            noted = TakenVersions((TakenVersion(step, newest_teacher(directory)[1].name, ""),), step)
        noted.at(step).require(directory / noted.at(step).name)
        return noted

    known = Collective(gloo_group()).on_rank0(begun)
    return TeacherVersions(method, spec, known, known.at(step))
