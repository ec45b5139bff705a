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
import torch

from tuner.data.batches import collate
from tuner.data.building.columns import Columns
from tuner.data.prepared import PackedRows, Row
from tuner.errors import VerificationError
from tuner.parallel.assemble import AssemblySpec
from tuner.run.columns import ColumnsInfo, ColumnSource, Work, key_of, with_columns, with_row_columns
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
    """The assembly with the reference's columns at its rows (:func:`~tuner.run.columns.with_columns`). Collective.

    The model must be as it is before the first step. Raises RecipeError where documents are in pieces.
    """
    weights, facts = str(assembly.facts.weights_hash), key_facts(assembly)
    had = weights if before is None else before.weights
    source = ColumnSource(
        "reference", assembly.resolved.model_name, facts, key_of(facts), had, with_row_columns, lambda: weights != had
    )
    assembly.train_state.root.train()
    assembly, info = with_columns(assembly, source, cache_dir, before, work)
    return replace(assembly, reference=info.as_meta())


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
