"""A teacher's most probable tokens at every trained position, computed once before training, which loads no teacher;
and the versions of one that is still learning: which a launch begins with, and how a newer one is loaded.

The teacher reads the same packed rows as the student would. What it gives is known by its weights, the rows, and what
is kept of each distribution; who computes it, and with which kernels, only moves its last bits.
"""

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tuner.config.methods import DistillMethod
from tuner.data.batches import collate
from tuner.data.building.columns import Columns
from tuner.data.building.spec import PrepareSpec
from tuner.data.encoding.tokenizer_files import tokenizer_directory
from tuner.data.prepared import PackedRows, Row
from tuner.errors import DataError, RecipeError, VerificationError
from tuner.model.build import fetch_weights, model_config
from tuner.model.divergence import top_tokens
from tuner.run.columns import ColumnsInfo, ColumnSource, Work, key_of, with_columns
from tuner.run.parts.part import Preflight
from tuner.run.status import RunStatus
from tuner.rundir.checkpoints import version_dirs
from tuner.rundir.versions import TakenVersion, TakenVersions, read_teachers, write_teachers
from tuner.runtime.console import Console
from tuner.runtime.device import to_device
from tuner.runtime.files import sha256_file
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.build import Assembly
from tuner.setup.model import WeightFacts, load_teacher
from tuner.setup.resolve import method_section
from tuner.setup.teacher import check_teacher, files_read, incomplete, newest_teacher, teacher_model
from tuner.train.methods.distill import Distill
from tuner.train.plan import cadence
from tuner.train.progress import Progress


def taught(ready: Preflight, assembly: Assembly, console: Console, is_stopping: Callable[[], bool]) -> Assembly:
    """What a launch trains with: the teacher's columns are at its rows. Collective. Raises as :func:`with_teacher`."""
    before = ColumnsInfo.of(ready.status.checkpoint, "teacher")
    work = Work(values_of(assembly), assembly.mesh, console, is_stopping)
    return with_teacher(assembly, ready.spec.cache_dir, before, work)


def with_teacher(assembly: Assembly, cache_dir: Path, before: ColumnsInfo | None, work: Work) -> Assembly:
    """The assembly with the teacher's columns at its rows (:func:`~tuner.run.columns.with_columns`). Collective.

    Those of a resumed run are found even where the teacher is not there any more. Raises RecipeError for more tokens
    than the vocabulary has.
    """
    section, method = method_of(assembly), assembly.train_state.method
    had = None if before is None or before.prepared_key != assembly.prepared.key else before.weights
    facts = key_facts(assembly, _weights(section) if had is None else had)
    source = ColumnSource(
        "teacher", str(facts["teacher"]), facts, _key(facts), str(facts["weights"]), PackedRows.with_trained,
        lambda: had is not None and _weights(section) != had,
    )  # fmt: skip
    assembly, info = with_columns(assembly, source, cache_dir, before, work)
    assert isinstance(method, Distill)
    method.vocabulary = int(facts["vocabulary"])
    return replace(assembly, teacher=asdict(info))


def method_of(assembly: Assembly) -> DistillMethod:
    """The section of the method."""
    method = method_section(assembly.resolved)
    assert isinstance(method, DistillMethod)
    return method


def key_facts(assembly: Assembly, weights: str) -> dict[str, Any]:
    """What the columns are known by. Raises RecipeError for more tokens than both vocabularies have."""
    method = method_of(assembly)
    own = int(assembly.resolved.config.get_text_config().vocab_size)
    vocabulary = min(own, int(model_config(teacher_model(method)).get_text_config().vocab_size))
    if method.top_k is not None and method.top_k > vocabulary:
        said = f"method.top_k: {method.top_k:,} tokens of a vocabulary of {vocabulary:,}"
        raise RecipeError(said, hint=f"write top_k: {vocabulary} or less")
    return {
        "teacher": method.teacher, "weights": weights, "prepared": assembly.prepared.key,
        "precision": assembly.resolved.numerics.precision,
        "top_k": method.top_k, "temperature": method.temperature, "vocabulary": vocabulary,
    }


def _weights(method: DistillMethod) -> str:
    """SHA-256 over the teacher's config and weights as files, by rank 0. Collective."""

    def hashed() -> str:
        fetch_weights(teacher_model(method))
        directory = tokenizer_directory(method.teacher, method.teacher_revision)
        files = [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
        return hashlib.sha256("\n".join(sha256_file(path) for path in files).encode()).hexdigest()

    return Collective(gloo_group()).on_rank0(hashed)


def _key(facts: Mapping[str, Any]) -> str:
    return key_of({name: value for name, value in facts.items() if name != "teacher"})  # wherever it lies


def values_of(assembly: Assembly) -> Callable[[PackedRows, Row], Columns]:
    """What computes the columns of one row. The teacher is built when the first row comes, on all ranks together.

    It raises VerificationError for a probability that is not finite.
    """
    method, step_config = method_of(assembly), assembly.train_state.step_config
    vocabulary = int(key_facts(assembly, "")["vocabulary"])
    count, small = method.top_k or 0, vocabulary <= 1 << 16
    built = cache(lambda: load_teacher(assembly.resolved, method, step_config).root)

    def values(rows: PackedRows, row: Row) -> Columns:
        batch = collate([row])
        at = batch.trained_positions
        arrays = (batch.input_ids, batch.position_ids, at, batch.targets[at])
        ids, places, positions, targets = (to_device(array, step_config.device) for array in arrays)
        kept = partial(top_tokens, count=count, temperature=method.temperature, vocabulary=vocabulary)
        with torch.no_grad(), step_config.autocast():
            found = built()(ids, places, batch.lengths, positions, targets, kept)
        columns: Columns = {name: tensor.cpu().numpy() for name, tensor in found.items()}
        columns["ids"] = columns["ids"].astype(np.uint16 if small else np.uint32)
        if not np.isfinite(columns["log_p"]).all():
            raise VerificationError(
                f"the teacher gives document {int(batch.documents[0])} a probability that is not finite",
                hint="try train.precision: fp32; or look at the row: tuner prepare-data RECIPE --explain N",
            )
        return columns

    return values


@dataclass
class TeacherVersions:
    """The versions of a run's teacher as far as a launch is, on every rank."""

    method: DistillMethod
    spec: PrepareSpec
    """With the student's tokenizer."""
    known: TakenVersions
    current: TakenVersion
    label = "teacher"
    _files: frozenset[str] = frozenset()
    """The names of its config's and tokenizer's files; its directory may go once it is loaded."""

    @property
    def path(self) -> Path:
        """The directory of the current version."""
        return Path(self.method.teacher) / self.current.name

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
        """Note the weights of the current version. Raises DataError where they are not those that the run had."""
        assert teacher is not None, "a run with versions has a teacher in memory"
        found = str(teacher.agreed_frozen_hash())
        if self.current.sha256 and self.current.sha256 != found:
            raise DataError(
                f"{self.path}: the teacher changed since the run learned from it ({self.current.sha256} -> {found})",
                hint="restore it; or start a new run with --name",
            )
        self._files = files_read(self.path)
        entry = replace(self.current, sha256=found)
        self.current, self.known = entry, self.known.having(entry)

    def look(self, step: int, pass_over: Callable[[str], None]) -> TakenVersion:
        """The version to learn from after ``step``, on rank 0: as it was noted, or else the newest whole one.

        One that is still being copied is passed over: a later look may find it whole.
        """
        if step <= self.known.looked:
            return self.known.at(step)
        current = int(self.current.name.rpartition("-")[2])
        for number, path in version_dirs(Path(self.method.teacher)):
            if number <= current:
                break
            if (problem := incomplete(path, self._files)) is None:
                return TakenVersion(step, path.name, "")
            pass_over(f"{path.name} is passed over: it {problem}")
        return self.current

    def others(self, due: Sequence[int], step: int, say: Callable[[str], None]) -> dict[int, TakenVersion]:
        """The version to learn from, where it is another one and reads the student's tokens. On rank 0.

        Raises DataError, RecipeError.
        """
        if (entry := self.look(step, say)) == self.current:
            return {}
        path = entry.require(Path(self.method.teacher) / entry.name)
        update: dict[str, Any] = {"teacher": str(path), "teacher_every": None}
        check_teacher(self.method.model_copy(update=update), self.spec.tokenizer, self.spec.cache_dir)
        return {0: entry}

    def take(self, others: Mapping[int, TakenVersion], assembly: Assembly, step: int) -> None:
        """Learn from another version from now on; the one before is freed first. Collective. Raises DataError."""
        state = assembly.train_state
        self.current, state.method.teacher = others[0], None
        gc.collect()  # a sharded module's hooks refer to it
        resolved = replace(assembly.resolved, teacher=str(self.path))
        state.method.teacher, facts = load_teacher(resolved, self.method, state.step_config)
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
            noted = TakenVersions((TakenVersion(step, newest_teacher(directory).name, ""),), step)
        noted.at(step).require(directory / noted.at(step).name)
        return noted

    known = Collective(gloo_group()).on_rank0(begun)
    return TeacherVersions(method, spec, known, known.at(step))
