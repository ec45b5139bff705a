"""The versions of a teacher that is still learning: which one a launch begins with, and how a newer one is taken."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.config.methods import DistillMethod
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.errors import DataError
from tuner.run.status import RunStatus
from tuner.rundir.exports import version_dirs
from tuner.rundir.teachers import TeacherEntry, Teachers, read_teachers
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.build import Assembly
from tuner.setup.model import assemble_teacher
from tuner.setup.teacher import check_teacher, files_read, incomplete, newest_teacher
from tuner.setup.weight_facts import WeightFacts


@dataclass
class TeacherVersions:
    """The versions of a run's teacher as far as a launch is, on every rank."""

    method: DistillMethod
    cache_dir: Path
    known: Teachers
    at_hand: TeacherEntry
    _files: frozenset[str] = frozenset()
    """The names of its config's and tokenizer's files; its directory may go once it is loaded."""
    passed_over: dict[str, str] = field(default_factory=dict)
    """Versions that were not whole when they were looked at, and what they lacked."""

    @property
    def path(self) -> Path:
        """The directory of the version at hand."""
        return Path(self.method.teacher) / self.at_hand.name

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
        others = tuple(each for each in self.known.entries if each.step != entry.step)
        self.at_hand = entry
        self.known = replace(self.known, entries=tuple(sorted((*others, entry), key=lambda each: each.step)))

    def look(self, step: int) -> TeacherEntry:
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
                return TeacherEntry(step, path.name, "")
            self.passed_over[path.name] = problem
        return self.at_hand

    def check(self, entry: TeacherEntry, student: TextTokenizer) -> None:
        """Check, on rank 0, that a version is there and reads the student's tokens. Raises DataError, RecipeError."""
        path = require_version(Path(self.method.teacher), entry)
        update: dict[str, Any] = {"teacher": str(path), "teacher_every": None}
        check_teacher(self.method.model_copy(update=update), student, self.cache_dir)

    def take(self, entry: TeacherEntry, assembly: Assembly) -> None:
        """Learn from another version from now on; the one before is freed first. Collective. Raises DataError."""
        state = assembly.train_state
        self.at_hand, state.method.teacher = entry, None
        gc.collect()  # a sharded module's hooks refer to it
        resolved = replace(assembly.resolved, teacher=str(self.path))
        state.method.teacher, facts = assemble_teacher(resolved, self.method, state.step_config)
        self.identify(facts)

    def noted(self, step: int) -> Teachers:
        """What is known now that a newer version was looked for after ``step``."""
        self.known = replace(self.known, looked=max(self.known.looked, step))
        return self.known


def begin_versions(method: DistillMethod, status: RunStatus, cache_dir: Path) -> TeacherVersions:
    """The versions as a launch begins with them: as rank 0 has them noted, or the newest one. Collective.

    Raises DataError where the one that the run had is gone, RecipeError where there is none.
    """
    step, directory = 0 if status.checkpoint is None else status.checkpoint.step, Path(method.teacher)

    def begun() -> Teachers:
        noted = _noted(status)
        if noted is None:
            noted = Teachers((TeacherEntry(step, newest_teacher(directory)[1].name, ""),), step)
        require_version(directory, noted.at(step))
        return noted

    known = Collective(gloo_group()).on_rank0(begun)
    return TeacherVersions(method, cache_dir, known, known.at(step))


def require_version(directory: Path, entry: TeacherEntry) -> Path:
    """The directory of a version that a run learned from. Raises DataError where it is gone."""
    path = directory / entry.name
    if not path.is_dir():
        raise DataError(
            f"{path} is gone, from which the run learned after step {entry.step}",
            hint="restore it, and have the teacher's run keep as many (export.keep) as the checkpoints reach back; "
            "or start a new run with --name",
        )
    return path


def _noted(status: RunStatus) -> Teachers | None:
    """The versions that a run has learned from, or the one that its checkpoint comes from; None where it begins."""
    noted = None if status.record is None else read_teachers(status.run.path)
    plain = None if status.checkpoint is None else status.checkpoint.state.get("teachers")
    return noted or (None if plain is None else Teachers.of(plain))
