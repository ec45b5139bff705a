"""The reference of a run: what the model gives each document before its first step, computed once and kept.

The policy is the reference then, so no second model is in memory, and the same kernels, autocast and shards compute
both. What a reference's columns are known by is everything that decides their bits.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tuner.data.batches import Batch, collate
from tuner.data.building.cache import cache_path, valid
from tuner.data.building.columns import Columns, files_of, open_columns
from tuner.data.prepared import PackedRows, PreparedData, Row
from tuner.errors import DataError, RecipeError, VerificationError, counted
from tuner.parallel.fsdp import sync_gradients
from tuner.run.columns import ColumnsInfo, ColumnsSpec, Work, computed, key_of, manifest_body
from tuner.run.preflight import Preflight
from tuner.runtime.console import Console
from tuner.runtime.environment import versions
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.build import Assembly
from tuner.setup.resolve import quantizer_facts
from tuner.setup.settled import rows_at_once
from tuner.train.step import TrainState, device_columns, reference_values

CHECKED_ROWS = 4
"""Rows of each split, for every process, of which the start is checked."""
DECIDING = ("tuner", "torch", "transformers", "peft", "liger-kernel", "triton")
"""Packages whose versions may change bits."""


def referred(ready: Preflight, assembly: Assembly, console: Console, is_stopping: Callable[[], bool]) -> Assembly:
    """What a launch trains with: the reference's columns are at its rows, and a run that begins is its reference.

    Collective. Raises what :func:`with_reference` and :func:`require_start` do.
    """
    if assembly.train_state.method.reference == "columns":
        before = None if ready.found is None else ColumnsInfo.of_meta(ready.found.manifest["meta"], "reference")
        work = Work(values_of(assembly), assembly.mesh, console, is_stopping)
        assembly = with_reference(assembly, ready.spec.cache_dir, before, work)
    if ready.found is None:
        with console.doing("comparing the model with its reference"):
            require_start(assembly, console)
    return assembly


def with_reference(assembly: Assembly, cache_dir: Path, before: ColumnsInfo | None, work: Work) -> Assembly:
    """The assembly with the reference's columns at its rows, from the cache or computed. Collective.

    The model must be as it is before the first step. A resumed run goes by what it had ``before``: its columns are
    found by their key whatever they would be called now, and computed again they must be the same. Raises
    VerificationError, RecipeError where documents are in pieces, and KeyboardInterrupt where a signal came.
    """
    prepared, root = assembly.prepared, assembly.train_state.root
    splits = {"train": prepared.train} | ({} if prepared.eval is None else {"eval": prepared.eval})
    weights = str(root.weights_hash)
    facts = key_facts(assembly)
    key, wanted = key_of(facts), None
    if before is not None and before.prepared_key == prepared.key:
        key, wanted = before.key, before.files
    body = manifest_body(prepared.key, assembly.resolved.recipe.model.name_or_path, facts, splits)
    spec = ColumnsSpec(cache_dir, "reference", key, splits, body, wanted)
    if before is not None and weights != before.weights and valid(spec.path, "reference") is None:
        raise VerificationError(
            f"{spec.path} is gone, and {assembly.resolved.recipe.model.name_or_path} is not the model any more that "
            "computed the reference of this run",
            hint="restore one of them; or begin another run from the checkpoint: tuner train RECIPE --name NEW-NAME",
        )
    root.train()
    path, was_there = _computed(spec, work)
    files = files_of(path)
    if wanted is not None and files != wanted:
        raise VerificationError(f"{path} does not hold the reference of this run", hint=f"remove it: rm -r {path}")
    rows = sum(map(len, splits.values()))
    work.console.say("reference", f"{counted(rows, 'row')}{', computed before' if was_there else ''}: {path}")
    info = ColumnsInfo(key, weights if before is None else before.weights, prepared.key, files)
    return replace(_attached(assembly, open_columns(path, "reference")), reference=info.as_meta())


def _computed(spec: ColumnsSpec, work: Work) -> tuple[Path, bool]:
    try:
        return computed(spec, work)
    except VerificationError as error:
        raise VerificationError(
            error.message,
            hint="resume with the kernels, the number of threads and the versions that the run had (run.json)",
        ) from error


def key_facts(assembly: Assembly) -> dict[str, Any]:
    """All that decides the bits of the reference's columns; the number of processes and the micro-batch do not."""
    recipe, device = assembly.resolved.recipe, assembly.train_state.step_config.device
    values = type(assembly.train_state.method).reference_values
    here: dict[str, Any] = {"device": assembly.resolved.facts.name}
    if device.type == "cpu":
        here |= {"threads": torch.get_num_threads(), "instructions": torch.backends.cpu.get_cpu_capability()}
    padding = assembly.train_state.root.padding
    if (quantizer := quantizer_facts(recipe)) is not None:
        here |= {"quantizer": quantizer}
    return {
        "weights": assembly.train_state.root.weights_hash,
        "config": hashlib.sha256(assembly.resolved.config.to_json_string().encode()).hexdigest(),
        "prepared": assembly.prepared.key,
        "values": f"{values.__module__}.{values.__qualname__}",
        "mismatched": assembly.train_state.method.mismatched,
        "precision": recipe.train.precision,
        "tf32": recipe.train.tf32,
        "deterministic": recipe.train.deterministic,
        "kernels": recipe.model.kernels,
        "attention": assembly.resolved.reasons.get("attention"),
        "compiled_for": None if padding is None else [padding.tokens, padding.longest],
        **here,
        "versions": {name: version for name, version in versions().items() if name in DECIDING},
    }


def values_of(assembly: Assembly) -> Callable[[PackedRows, Row], Columns]:
    """What computes the reference of one row by the model as it is, and of its mismatched documents where a method has
    such.

    It raises VerificationError for a value that is not finite.
    """
    state = assembly.train_state

    def values(rows: PackedRows, row: Row) -> Columns:
        found = _of_row(state, row)
        if state.method.mismatched:
            found |= {f"{name}_mismatched": part for name, part in _of_row(state, rows.mismatched(row)).items()}
        for name, of_documents in found.items():
            if not np.isfinite(of_documents).all():
                raise VerificationError(
                    f"the {name} of document {int(row.documents[~np.isfinite(of_documents)][0])} is not finite",
                    hint="try train.precision: fp32; or look at the row: tuner prepare-data RECIPE --explain N",
                )
        return found

    return values


def _of_row(state: TrainState, row: Row) -> Columns:
    with torch.no_grad():
        found = reference_values(state.root, state.method, collate([row]), state.step_config)
    return {name: tensor.float().cpu().numpy() for name, tensor in found.items()}


def _attached(assembly: Assembly, columns: Mapping[str, Columns]) -> Assembly:
    """The assembly with columns at its rows."""
    prepared, held = prepared_with(assembly.prepared, columns), assembly.held_out
    if held is not None and prepared.eval is not None:
        held = replace(held, rows=prepared.eval)
    batches = replace(assembly.batches, rows=prepared.train)
    return replace(assembly, prepared=prepared, batches=batches, held_out=held)


def prepared_with(prepared: PreparedData, columns: Mapping[str, Columns]) -> PreparedData:
    """The prepared data with columns by split, whose values lie row after row, at its rows."""
    held = prepared.eval
    return replace(
        prepared,
        train=with_row_columns(prepared.train, columns.get("train", {})),
        eval=None if held is None else with_row_columns(held, columns.get("eval", {})),
    )


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
        whole[name] = np.full(rows.document_count, np.nan, dtype=np.float32)
        whole[name][numbers] = values
    return rows.with_columns(whole)


def require_start(assembly: Assembly, console: Console) -> None:
    """Check that the policy gives some rows of the first step, and held-out ones, what the reference gives them.

    Raises VerificationError where any log-ratio is not exactly zero. Collective; the model must be as it is before the
    first step, and stays so.
    """
    state, ranks = assembly.train_state, Collective(gloo_group())
    of_step = assembly.batches.row_ids(0)
    checked = [("train", assembly.batches.rows, [int(i) for i in of_step])]
    if assembly.held_out is not None:
        checked.append(("eval", assembly.held_out.rows, list(range(len(assembly.held_out.rows)))))
    size, own = assembly.mesh.data_size, assembly.mesh.data_rank
    problems: list[str] = []
    state.root.train()
    try:
        for split, rows, ids in checked:
            for first in range(0, min(len(ids), CHECKED_ROWS * size), size):
                problems += _differences(assembly, split, collate([rows.row(ids[min(first + own, len(ids) - 1)])]))
    finally:
        state.optimizer.zero_grad()
    found = [problem for of_rank in ranks.on_all_ranks(lambda: problems) for problem in of_rank]
    if not found and state.method.reference == "columns":
        _warn_of_rounding(assembly, ranks, console)
    if found:
        where = "remove the directory that the line `reference` names, and it is computed again"
        other = "write method.reference: columns, which the model at the start computes itself"
        raise VerificationError(
            f"before the first step the model is not its reference: {found[0]}"
            + (f" ({len(found):,} documents)" if len(found) > 1 else ""),
            hint=where if state.method.reference == "columns" else other,
        )


def _warn_of_rounding(assembly: Assembly, ranks: Collective, console: Console) -> None:
    """Say where the first micro-batch, its rows together, begins with log-ratios that are not zero. Collective."""
    state = assembly.train_state
    batch = assembly.batches.step(0).micro[0]
    with torch.no_grad():
        wanted = device_columns(state.root, state.method, batch, state.step_config)
        found = reference_values(state.root, state.method, batch, state.step_config)
    ratios = [float((values - wanted[name]).abs().max()) for name, values in found.items() if len(values)]
    most = max((ratio for of_rank in ranks.on_all_ranks(lambda: ratios) for ratio in of_rank), default=0.0)
    if most > 0:
        rows = rows_at_once(assembly.resolved.recipe)
        console.warn(
            f"log-ratios of {rows} rows at once begin within {most:.2g} of 0, not at it: products of more rows round "
            "otherwise (train.micro_batch_size: 1 begins at 0)"
        )


def _differences(assembly: Assembly, split: str, batch: Batch) -> list[str]:
    """What of one row's documents the model gives otherwise than the reference, in the forward that trains."""
    state = assembly.train_state
    wanted = device_columns(state.root, state.method, batch, state.step_config)
    sync_gradients(state.root, True, state.step_config.accumulate_whole)
    with torch.enable_grad():
        found = reference_values(state.root, state.method, batch, state.step_config)
        # As in a step: under FSDP2 a forward with gradients is followed by a backward.
        (torch.stack([values.sum() for values in found.values()]).sum() * 0).backward()
    problems = []
    for name, values in found.items():
        ratios = (values.detach() - wanted[name]).cpu().numpy()
        for at in np.flatnonzero(~(ratios == 0)):
            problems.append(f"document {batch.documents[at]} of {split}: its {name} differs by {ratios[at]:.3g}")
    return problems


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
