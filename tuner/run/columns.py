"""Columns of prepared rows that a model computes once, before the first step, on all processes of a launch."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tuner.checkpoint.open import CheckpointInfo
from tuner.data.building.cache import ColumnLevel, cache_path, valid
from tuner.data.building.columns import PART_ROWS, Builder, Columns, building, files_of, open_columns
from tuner.data.prepared import PackedRows, Row
from tuner.errors import DataError, MachineError, RecipeError, VerificationError, counted
from tuner.parallel.mesh import Mesh
from tuner.runtime.console import Console, clock
from tuner.runtime.files import hash_of
from tuner.runtime.process import Collective, any_rank, gloo_group
from tuner.setup.build import Assembly

RETRY_S = 1.0
"""Seconds between two looks at whether another launch is done with the same columns."""
State = Literal["there", "missing", "busy"]


@dataclass(frozen=True)
class ColumnsInfo:
    """The columns of a run, as a checkpoint and the run's record note them under the name of their level."""

    key: str
    weights: str
    """SHA-256 of the weights that computed them."""
    prepared_key: str
    files: Mapping[str, Any]
    """Size and SHA-256 of each."""

    @staticmethod
    def of(checkpoint: CheckpointInfo | None, level: ColumnLevel) -> "ColumnsInfo | None":
        """What a checkpoint says of the columns of a level; None where it names none."""
        noted = None if checkpoint is None else checkpoint.meta.get(level)
        return None if noted is None else ColumnsInfo(**noted)


def key_of(facts: Mapping[str, Any]) -> str:
    """The key of columns: a hash of all that decides them."""
    return hash_of(facts, 16)


def manifest_body(
    prepared_key: str, model: str, facts: Mapping[str, Any], splits: Mapping[str, PackedRows]
) -> dict[str, Any]:
    """What the manifest of columns says: which rows they are of, which model gave them, and all that decided them."""
    report: dict[str, Any] = {"train": None, "eval": None}
    for split, rows in splits.items():
        documents, tokens = int(rows.documents_per_row.sum()), int(rows.tokens_per_row.sum())
        report[split] = {"documents": documents, "tokens": tokens, "packed_rows": len(rows)}
    return {"prepared_key": prepared_key, "model": model, "facts": dict(facts), "report": report}


@dataclass(frozen=True)
class ColumnsSpec:
    """Which columns: where they are kept, of which rows by split, and what their manifest says besides."""

    cache_dir: Path
    level: ColumnLevel
    key: str
    splits: Mapping[str, PackedRows]
    body: Mapping[str, Any]
    wanted: Mapping[str, Any] | None = None
    """Sizes and hashes that the files must have, where they were there once."""

    @property
    def path(self) -> Path:
        """The directory."""
        return cache_path(self.cache_dir, self.level, self.key)


def attached(
    assembly: Assembly, columns: Mapping[str, Columns], attach: Callable[[PackedRows, Columns], PackedRows]
) -> Assembly:
    """The assembly with columns at its rows, those of each split as ``attach`` puts them."""
    prepared, held = assembly.prepared, assembly.held_out
    train = attach(prepared.train, columns.get("train", {}))
    rows = None if prepared.eval is None else attach(prepared.eval, columns.get("eval", {}))
    if held is not None and rows is not None:
        held = replace(held, rows=rows)
    prepared, batches = replace(prepared, train=train, eval=rows), replace(assembly.batches, rows=train)
    return replace(assembly, prepared=prepared, batches=batches, held_out=held)


@dataclass(frozen=True)
class Work:
    """How they are computed: what a batch gives, on which processes, and when to leave off."""

    values_of: Callable[[PackedRows, Row], Columns]
    """Called with one of the rows at a time, so that a value does not depend on the rows around it; as often on every
    rank, where the last calls may be for nothing."""
    mesh: Mesh
    console: Console
    is_stopping: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class ColumnSource:
    """A model that gives rows columns, and by what these are known."""

    level: ColumnLevel
    model: str
    """Its name."""
    facts: Mapping[str, Any]
    """All that decides the columns."""
    key: str
    weights: str
    """SHA-256 of the weights that the run's columns are computed with."""
    attach: Callable[[PackedRows, Columns], PackedRows]
    has_changed: Callable[[], bool]
    """Whether the model has other weights by now. Collective."""


def with_columns(
    assembly: Assembly, source: ColumnSource, cache_dir: Path, before: ColumnsInfo | None, work: Work
) -> tuple[Assembly, ColumnsInfo]:
    """The assembly with a model's columns at its rows, from the cache or computed, and what they are. Collective.

    A resumed run goes by what it had ``before``: its columns are found by their key whatever they would be called now,
    and computed again they must be the same. Raises VerificationError where they are gone or other ones, and
    KeyboardInterrupt where a signal came.
    """
    prepared, level = assembly.prepared, source.level
    splits = {"train": prepared.train} | ({} if prepared.eval is None else {"eval": prepared.eval})
    key, wanted = source.key, None
    if before is not None and before.prepared_key == prepared.key:
        key, wanted = before.key, before.files
    body = manifest_body(prepared.key, source.model, source.facts, splits)
    spec = ColumnsSpec(cache_dir, level, key, splits, body, wanted)
    if valid(spec.path, level) is None and source.has_changed():
        raise VerificationError(
            f"{spec.path} is gone, and {source.model} is not the model any more that computed it for this run",
            hint="restore one of them; or begin another run from the checkpoint: tuner train RECIPE --name NEW-NAME",
        )
    try:
        path, was_there = computed(spec, work)
    except VerificationError as error:
        raise VerificationError(
            error.message,
            hint="resume with the kernels, the number of threads, the versions and the parallel.tensor, sequence and "
            "expert that the run had (run.json)",
        ) from error
    files = files_of(path)
    if wanted is not None and files != wanted:
        raise VerificationError(f"{path} does not hold the {level} of this run", hint=f"remove it: rm -r {path}")
    rows = sum(map(len, splits.values()))
    work.console.say(level, f"{counted(rows, 'row')}{', computed before' if was_there else ''}: {path}")
    info = ColumnsInfo(key, source.weights, prepared.key, files)
    return attached(assembly, open_columns(path, level), source.attach), info


def computed(spec: ColumnsSpec, work: Work) -> tuple[Path, bool]:
    """The directory of the columns, and whether they were there; what is missing of them is computed. Collective.

    Rows are dealt to the ranks one by one, and each part is on the disk before the next one begins. Raises
    KeyboardInterrupt on every rank where one is asked to stop, VerificationError where they should be other ones.
    """
    ranks, held = Collective(gloo_group()), ExitStack()
    builders: list[Builder] = []  # rank 0's alone

    def take() -> State:
        try:
            builder = held.enter_context(building(spec.cache_dir, spec.level, spec.key))
        except MachineError as error:
            if error.__cause__ is not None:
                raise
            return "busy"
        builders.extend(() if builder is None else (builder,))
        return "missing" if builders else "there"

    with held:
        state: State = ranks.on_rank0(take)
        if state == "busy":
            work.console.say("waiting", f"another process is computing the same {spec.level}")
        while state == "busy":
            time.sleep(RETRY_S)
            if any_rank(work.is_stopping(), ranks.group):
                raise KeyboardInterrupt
            state = ranks.on_rank0(take)
        if state == "missing":
            _compute(spec, work, builders, ranks)
    return spec.path, state == "there"


def _compute(spec: ColumnsSpec, work: Work, builders: Sequence[Builder], ranks: Collective) -> None:
    """Compute the parts that are not there, and publish them all. Rank 0 has a builder. Collective."""
    parts = {split: -(-len(rows) // PART_ROWS) for split, rows in spec.splits.items()}
    every = [(split, number) for split, count in parts.items() for number in range(count)]
    has = ranks.on_rank0(lambda: [builders[0].has(split, number) for split, number in every])
    missing = [(split, number) for (split, number), there in zip(every, has, strict=True) if not there]
    total = sum(len(_rows_of(spec, split, number)) for split, number in missing)
    done, started = 0, time.monotonic()

    def so_far(rows: int) -> str:
        left = f", {clock((time.monotonic() - started) / rows * (total - rows))} left" if rows else ""
        return f"computing the {spec.level}: {rows:,} of {total:,} rows{left}"

    def add(split: str, number: int, found: Columns) -> None:
        builders[0].add(split, number, found)

    with work.console.doing(so_far(0)) as doing:
        for split, number in missing:
            taken = _rows_of(spec, split, number)
            tell = lambda more, before=done: doing.update(so_far(before + more))  # noqa: E731
            found = _part(spec.splits[split], taken, work, ranks, tell)
            ranks.on_rank0(partial(add, split, number, found))
            done += len(taken)
        ranks.on_rank0(lambda: builders[0].publish(parts, spec.body, spec.wanted))


def _rows_of(spec: ColumnsSpec, split: str, number: int) -> range:
    return range(number * PART_ROWS, min(len(spec.splits[split]), (number + 1) * PART_ROWS))


def _part(rows: PackedRows, taken: range, work: Work, ranks: Collective, tell: Callable[[int], None]) -> Columns:
    """The columns of some rows, on every rank; each rank computes every so-manieth of them. Collective.

    ``tell`` is called with how many of them are computed.
    """
    size, own, mine = work.mesh.data_size, work.mesh.data_rank, dict[int, Columns]()
    for first in range(0, len(taken), size):
        if any_rank(work.is_stopping(), ranks.group):
            work.console.say("stopping", "what is computed so far is kept: the same command takes it up")
            raise KeyboardInterrupt
        at = min(first + own, len(taken) - 1)
        mine[at] = work.values_of(rows, rows.row(taken[at]))
        tell(min(first + size, len(taken)))
    found = {at: values for of_rank in ranks.on_all_ranks(lambda: mine) for at, values in of_rank.items()}
    return {name: np.concatenate([found[at][name] for at in range(len(taken))]) for name in found[0]}


def with_row_columns(rows: PackedRows, columns: Columns) -> PackedRows:
    """The rows with columns whose values lie row after row, ``[segments of all rows]``, at their documents.

    Documents that no row holds have NaN. Raises RecipeError for documents in pieces, of which none is the whole.
    """
    numbers = rows.document_numbers
    if len(np.unique(numbers)) != len(numbers):
        raise RecipeError(
            "data.too_long: split gives pieces of documents, and a reference's values are those of whole ones",
            hint="write data.too_long: drop or truncate",
        )
    whole: dict[str, npt.NDArray[Any]] = {}
    for name, values in columns.items():
        whole[name] = np.full(len(rows.documents), np.nan, dtype=np.float32)
        whole[name][numbers] = values
    return rows.with_columns(whole)


def cached_columns(cache_dir: Path, info: ColumnsInfo) -> dict[str, Columns]:
    """The columns that a run noted, by split and name, every byte of which is checked.

    Raises DataError for damaged files, and where the cache lost them.
    """
    path = cache_path(cache_dir, "reference", info.key)
    if valid(path, "reference") is None:
        raise DataError(
            f"{path} is gone: what the run's reference gives its rows, against which they are measured",
            hint="restore it, or name the cache that has it: --data.cache_dir DIR; an export is measured without it",
        )
    columns = open_columns(path, "reference", verify=True)
    if files_of(path) != info.files:
        raise DataError(f"{path} does not hold the reference of this run", hint="restore it, or evaluate an export")
    return columns
