"""The reference of a run: what the model gives each document before its first step, computed once and kept.

The policy is the reference then, so no second model is in memory, and the same kernels, autocast and shards compute
both. What a reference's columns are known by is everything that decides their bits.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tuner.data.batches import collate
from tuner.data.building.cache import cache_path, valid
from tuner.data.building.columns import Columns, files_of, open_columns
from tuner.data.prepared import PackedRows, Row
from tuner.errors import DataError, RecipeError, VerificationError, counted
from tuner.parallel.assemble import AssemblySpec
from tuner.run.columns import ColumnsInfo, ColumnsSpec, Work, attached, computed, key_of, manifest_body
from tuner.run.parts.part import Preflight
from tuner.run.reference_start import require_start
from tuner.runtime.console import Console
from tuner.runtime.environment import versions
from tuner.setup.build import Assembly
from tuner.setup.resolve import quantizer_facts
from tuner.setup.specs import assembly_spec
from tuner.train.step import TrainState, reference_values

DECIDING = ("tuner", "torch", "transformers", "peft", "liger-kernel", "triton")
"""Packages whose versions may change bits."""


def referred(ready: Preflight, assembly: Assembly, console: Console, is_stopping: Callable[[], bool]) -> Assembly:
    """What a launch trains with: the reference's columns are at its rows, and a run that begins is its reference.

    Collective. Raises what :func:`with_reference` and :func:`require_start` do.
    """
    if assembly.train_state.method.reference == "columns":
        before = ColumnsInfo.of(ready.status.checkpoint, "reference")
        work = Work(values_of(assembly), assembly.mesh, console, is_stopping)
        assembly = with_reference(assembly, ready.spec.cache_dir, before, work)
    if ready.status.checkpoint is None:
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
    weights = str(assembly.facts.weights_hash)
    facts = key_facts(assembly)
    key, wanted = key_of(facts), None
    if before is not None and before.prepared_key == prepared.key:
        key, wanted = before.key, before.files
    body = manifest_body(prepared.key, assembly.resolved.model_name, facts, splits)
    spec = ColumnsSpec(cache_dir, "reference", key, splits, body, wanted)
    if before is not None and weights != before.weights and valid(spec.path, "reference") is None:
        raise VerificationError(
            f"{spec.path} is gone, and {assembly.resolved.model_name} is not the model any more that "
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
    assembly = attached(assembly, open_columns(path, "reference"), with_row_columns)
    return replace(assembly, reference=info.as_meta())


def _computed(spec: ColumnsSpec, work: Work) -> tuple[Path, bool]:
    try:
        return computed(spec, work)
    except VerificationError as error:
        raise VerificationError(
            error.message,
            hint="resume with the kernels, the number of threads, the versions and the parallel.tensor, sequence and "
            "expert that the run had (run.json)",
        ) from error


def key_facts(assembly: Assembly) -> dict[str, Any]:
    """All that decides the bits of the reference's columns.

    Processes that compute a layer together add its sums up in another order, so their number does; how many hold the
    rows or the shards of the weights does not, nor does the micro-batch.
    """
    resolved, mesh, device = assembly.resolved, assembly.mesh, assembly.train_state.step_config.device
    spec = assembly_spec(resolved)
    values = type(assembly.train_state.method).reference_values
    here: dict[str, Any] = {"device": resolved.facts.name}
    if device.type == "cpu":
        here |= {"threads": torch.get_num_threads(), "instructions": torch.backends.cpu.get_cpu_capability()}
    together = {"tensor": mesh.tensor, "sequence": mesh.sequence, "expert": mesh.expert}
    here |= {axis: size for axis, size in together.items() if size > 1}
    padding = assembly.train_state.root.parts.padding
    return {
        "weights": assembly.facts.weights_hash,
        "config": hashlib.sha256(resolved.config.to_json_string().encode()).hexdigest(),
        "prepared": assembly.prepared.key,
        "values": f"{values.__module__}.{values.__qualname__}",
        "mismatched": assembly.train_state.method.mismatched,
        **asdict(resolved.numerics),
        "kernels": spec.kernels,
        "attention": resolved.reasons.get("attention"),
        "compiled_for": None if padding is None else [padding.tokens, padding.longest, *_program(spec)],
        **here,
        **({} if (quantizer := quantizer_facts(resolved)) is None else {"quantizer": quantizer}),
        "versions": {name: version for name, version in versions().items() if name in DECIDING},
    }


def _program(spec: AssemblySpec) -> list[Any]:
    """What a compiled layer's program depends on besides its sizes: what of it is computed again, and in which parts.

    The compiler fuses another set of operations for each, which rounds otherwise.
    """
    return [spec.recompute, str(spec.recomputed_layers), spec.tiles]


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
