"""Columns of prepared rows that a model computes once, before the first step, on all processes of a launch."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tuner.checkpoint.open import CheckpointInfo
from tuner.data.building.cache import ColumnLevel, cache_path
from tuner.data.building.columns import PART_ROWS, Builder, Columns, building
from tuner.data.prepared import PackedRows, Row
from tuner.errors import MachineError
from tuner.parallel.mesh import Mesh
from tuner.runtime.console import Console, Updates, clock
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

    def as_meta(self) -> dict[str, Any]:
        """Its part of a manifest."""
        return asdict(self)

    @staticmethod
    def of(checkpoint: CheckpointInfo | None, level: ColumnLevel) -> "ColumnsInfo | None":
        """What a checkpoint says of the columns of a level; None where it names none."""
        noted = None if checkpoint is None else checkpoint.meta.get(level)
        return None if noted is None else ColumnsInfo(**noted)


def key_of(facts: Mapping[str, Any]) -> str:
    """The key of columns: a hash of all that decides them."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


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


def computed(spec: ColumnsSpec, work: Work) -> tuple[Path, bool]:
    """The directory of the columns, and whether they were there; what is missing of them is computed. Collective.

    Rows are dealt to the ranks one by one, and each part is on the disk before the next one begins. Raises
    KeyboardInterrupt on every rank where one is asked to stop, VerificationError where they should be other ones.
    """
    ranks, held = Collective(gloo_group()), ExitStack()
    builder: list[Builder | None] = [None]

    def take() -> State:
        try:
            builder[0] = held.enter_context(building(spec.cache_dir, spec.level, spec.key))
        except MachineError as error:
            if error.__cause__ is not None:
                raise
            return "busy"
        return "there" if builder[0] is None else "missing"

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
            _compute(spec, work, builder[0], ranks)
    return spec.path, state == "there"


def _compute(spec: ColumnsSpec, work: Work, builder: Builder | None, ranks: Collective) -> None:
    """Compute the parts that are not there, and publish them all. ``builder`` is rank 0's alone. Collective."""
    parts = {split: -(-len(rows) // PART_ROWS) for split, rows in spec.splits.items()}
    every = [(split, number) for split, count in parts.items() for number in range(count)]
    has = ranks.on_rank0(lambda: [_of(builder).has(split, number) for split, number in every])
    missing = [(split, number) for (split, number), there in zip(every, has, strict=True) if not there]
    total = sum(len(_rows_of(spec, split, number)) for split, number in missing)
    done, started = 0, time.monotonic()
    with work.console.doing(_so_far(spec, 0, total, 0.0)) as doing:
        for split, number in missing:
            taken = _rows_of(spec, split, number)
            tell = partial(_tell, doing, spec, done, total, started)
            found = _part(spec.splits[split], taken, work, ranks, tell)
            ranks.on_rank0(partial(_add, builder, split, number, found))
            done += len(taken)
        ranks.on_rank0(lambda: _of(builder).publish(parts, spec.body, spec.wanted))


def _add(builder: Builder | None, split: str, number: int, found: Columns) -> None:
    _of(builder).add(split, number, found)


def _rows_of(spec: ColumnsSpec, split: str, number: int) -> range:
    return range(number * PART_ROWS, min(len(spec.splits[split]), (number + 1) * PART_ROWS))


def _tell(doing: Updates, spec: ColumnsSpec, done: int, total: int, started: float, more: int) -> None:
    doing.update(_so_far(spec, done + more, total, time.monotonic() - started))


def _so_far(spec: ColumnsSpec, done: int, total: int, seconds: float) -> str:
    left = f", {clock(seconds / done * (total - done))} left" if done else ""
    return f"computing the {spec.level}: {done:,} of {total:,} rows{left}"


def _of(builder: Builder | None) -> Builder:
    assert builder is not None, "rank 0 has it"
    return builder


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
