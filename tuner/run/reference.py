"""The reference of a run: what the model gives each document before its first step, computed once and kept; and whether
the run begins as its reference.

The policy is the reference then, so no second model is in memory, and the same kernels, autocast and shards compute
both. What a reference's columns are known by is everything that decides their bits.

Whether a run begins so is two questions, since two programs of one model may round otherwise, and a model that has
hardly moved may move the log-ratios by less than that. *Is it the same model?* has no tolerance: an adapter that is
switched off for the reference must add nothing, and columns must be what the model gives by the very program that
computed them. *Does the policy start there?* is asked of the forward that trains, and knows rounding
(:func:`allowed`).
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tuner.data.batches import Batch, collate
from tuner.data.building.columns import Columns
from tuner.data.prepared import PackedRows, Row
from tuner.errors import VerificationError, counted
from tuner.model.adapter import ADAPTER, lora_layers
from tuner.model.experts import LORA_B
from tuner.parallel.fsdp import sync_gradients
from tuner.parallel.layouts import whole
from tuner.parallel.mesh import Mesh
from tuner.run.columns import ColumnsInfo, ColumnSource, Work, key_of, with_columns, with_row_columns
from tuner.run.parts.part import Preflight
from tuner.runtime.console import Console
from tuner.runtime.environment import versions
from tuner.runtime.parts import local
from tuner.runtime.process import Collective, any_rank, gloo_group
from tuner.setup.build import Assembly
from tuner.setup.precision import Numerics
from tuner.setup.resolve import quantizer_facts
from tuner.setup.specs import assembly_spec
from tuner.train.step import TrainState, device_columns, reference_values

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
    return replace(assembly, reference=asdict(info))


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
        # Of what is computed again, and in which parts, the compiler fuses other operations, which round otherwise.
        "compiled_for": None if padding is None else [
            padding.tokens, padding.longest, spec.recompute, str(spec.recomputed_layers), spec.tiles,
        ],
        **here,
        **({} if (quantizer := quantizer_facts(resolved)) is None else {"quantizer": quantizer}),
        "versions": {name: version for name, version in versions().items() if name in DECIDING},
    }


def values_of(assembly: Assembly) -> Callable[[PackedRows, Row], Columns]:
    """What computes the reference of one row by the model as it is, and of its mismatched documents where a method has
    such.

    It raises VerificationError for a value that is not finite.
    """
    state = assembly.train_state

    def values(rows: PackedRows, row: Row) -> Columns:
        found = _by_the_same_program(state, collate([row]))
        if state.method.mismatched:
            others = _by_the_same_program(state, collate([rows.mismatched(row)]))
            found |= {f"{name}_mismatched": part for name, part in others.items()}
        for name, of_documents in found.items():
            if not np.isfinite(of_documents).all():
                raise VerificationError(
                    f"the {name} of document {int(row.documents[~np.isfinite(of_documents)][0])} is not finite",
                    hint="try train.precision: fp32; or look at the row: tuner prepare-data RECIPE --explain N",
                )
        return found

    return values


CHECKED_ROWS = 4
"""Rows of each split, for every process, of which the start is checked."""
UNIT = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4}
"""The largest relative error of one rounding to a type of products."""
ROUNDINGS = 32
"""Roundings that one token's log-probability is off by at most, in the type of products."""
SUM_ROUNDINGS = 8
"""And those of a document's sum over its tokens, which is float32 whatever products are."""
LENGTH_ROUNDINGS = 2.0**-17
"""By how much of itself a DoRA length may differ from that of its row, added up in another order in float32."""


class _Ratio(NamedTuple):
    """How far one document's log-ratio is from 0, in nats, and how far rounding lets it be."""

    where: str
    off: float
    allowed: float

    @property
    def is_wrong(self) -> bool:
        return not abs(self.off) <= self.allowed  # nor is what is not a number right


@dataclass(frozen=True)
class Rounding:
    """What decides by how much two programs of one model differ: the type of products, and over how many processes a
    layer's sums are divided."""

    unit: float
    processes: int

    @classmethod
    def of(cls, numerics: Numerics, mesh: Mesh) -> "Rounding":
        """Of a launch that computes so in these processes."""
        return cls(UNIT[numerics.products], mesh.tensor * mesh.sequence * mesh.expert)


def allowed(rounding: Rounding, tokens: int, value: float) -> float:
    """Nats by which two programs of one model may differ in a document's log-probability of that ``value``.

    Each token's is off by some roundings of the type of products, to either side, so that those of a document grow with
    the root of its length; so do those of sums that several processes add up. The sum itself is float32.
    """
    of_tokens = ROUNDINGS * rounding.unit * math.sqrt(tokens * rounding.processes)
    return of_tokens + SUM_ROUNDINGS * UNIT["fp32"] * abs(value)


def require_start(assembly: Assembly, console: Console) -> None:
    """Check that the policy is its reference before the first step, by some rows of the first step and held-out ones.

    Collective; the model must be as it is before the first step, and stays so. Says how far from 0 log-ratios begin
    where they do not begin there. Raises VerificationError where the model is another one than its reference, and where
    a log-ratio is off by more than :func:`allowed`.
    """
    state, ranks = assembly.train_state, Collective(gloo_group())
    is_columns = state.method.reference == "columns"
    problems = [] if is_columns else _adapted_from_the_start(state)
    ratios: list[_Ratio] = []
    state.root.train()
    try:
        for split, batch in _checked(assembly):
            if is_columns:
                problems += _not_of_this_model(assembly, split, batch)
            ratios += _ratios(assembly, split, batch)
    finally:
        state.optimizer.zero_grad()
    problems += [f"{ratio.where} differs by {ratio.off:.3g}" for ratio in ratios if ratio.is_wrong]
    if found := list(dict.fromkeys(each for of_rank in ranks.on_all_ranks(lambda: problems) for each in of_rank)):
        raise _is_another(found, is_columns)
    every = [ratio for of_rank in ranks.on_all_ranks(lambda: ratios) for ratio in of_rank]
    most = max(((abs(ratio.off), ratio.allowed) for ratio in every), default=(0.0, 0.0))
    if most[0] > 0:
        console.say(
            "reference",
            f"log-ratios begin within {most[0]:.2g} of 0 ({assembly.resolved.numerics.precision} rounds; "
            f"more than {most[1]:.2g} would be another model)",
        )
    if is_columns:
        _warn_of_rounding(assembly, ranks, console)


def _is_another(found: list[str], is_columns: bool) -> VerificationError:
    return VerificationError(
        f"before the first step the model is not its reference: {found[0]}"
        + (f" (and {counted(len(found) - 1, 'other')})" if len(found) > 1 else ""),
        hint="remove the directory that the line `reference` names, and it is computed again"
        if is_columns
        else "write method.reference: columns, which the model at the start computes itself",
    )


def _checked(assembly: Assembly) -> Iterator[tuple[str, Batch]]:
    """The rows that are looked at, one at a time, on every rank as many."""
    checked = [("train", assembly.batches.rows, [int(i) for i in assembly.batches.row_ids(0)])]
    if assembly.held_out is not None:
        checked.append(("eval", assembly.held_out.rows, list(range(len(assembly.held_out.rows)))))
    size, own = assembly.mesh.data_size, assembly.mesh.data_rank
    for split, rows, ids in checked:
        for first in range(0, min(len(ids), CHECKED_ROWS * size), size):
            yield split, collate([rows.row(ids[min(first + own, len(ids) - 1)])])


@torch.no_grad()
def _adapted_from_the_start(state: TrainState) -> list[str]:
    """What of an adapter changes the model before the first step, of this rank's shards of it. Collective.

    LoRA begins with a B of zeros, and DoRA with the lengths that rows have.
    """
    model = state.root.model
    ups = (
        (name, own) for name, own in model.named_parameters() if name.endswith((f".lora_B.{ADAPTER}.weight", LORA_B))
    )
    found = [f"{name} is not 0" for name, own in ups if bool(local(own).count_nonzero())]
    for name, layer in lora_layers(model):
        if layer.lora_magnitude_vector:
            length = whole(layer.lora_magnitude_vector[ADAPTER].weight)
            weight = whole(layer.get_base_layer().weight.float())
            rows = torch.linalg.vector_norm(weight, dim=0 if layer.fan_in_fan_out else 1)
            off = float(((length - rows).abs() / rows.clamp_min(torch.finfo(rows.dtype).tiny)).max())
            if not off <= LENGTH_ROUNDINGS:
                found.append(f"lengths of {name} differ from those of its rows by {off:.2g} of them")
    return found


def _not_of_this_model(assembly: Assembly, split: str, batch: Batch) -> list[str]:
    """Documents of a row whose columns are not what the model gives by the program that computed them. Collective."""
    state = assembly.train_state
    wanted = _read(device_columns(state.root, state.method, batch, state.step_config))
    found = _by_the_same_program(state, batch)
    differs = not all(np.array_equal(values, wanted[name]) for name, values in found.items())
    if not any_rank(differs, gloo_group()):  # a forward of one rank alone would wait for the shards of the others
        return []
    again = _by_the_same_program(state, batch)
    rounding = Rounding.of(assembly.resolved.numerics, assembly.mesh)
    problems = []
    for name, values in found.items():
        # Kernels that do not repeat their own bits are held to what rounding explains.
        repeats = np.array_equal(values, again[name])
        for at, value in enumerate(values):
            off = float(value - wanted[name][at])
            most = 0.0 if repeats else allowed(rounding, int(batch.trained_per_document[at]), float(value))
            if not abs(off) <= most:
                problems.append(f"document {batch.documents[at]} of {split}: its {name} differs by {off:.3g}")
    return problems


def _by_the_same_program(state: TrainState, batch: Batch) -> Columns:
    with torch.no_grad():
        return _read(reference_values(state.root, state.method, batch, state.step_config))


def _read(columns: Mapping[str, torch.Tensor]) -> Columns:
    return {name: values.float().cpu().numpy() for name, values in columns.items()}


def _ratios(assembly: Assembly, split: str, batch: Batch) -> list[_Ratio]:
    """The log-ratios of a row's documents, in the forward that trains."""
    state = assembly.train_state
    wanted = device_columns(state.root, state.method, batch, state.step_config)
    sync_gradients(state.root, True, state.step_config.accumulate_whole)
    with torch.enable_grad():
        found = reference_values(state.root, state.method, batch, state.step_config)
        # As in a step: under FSDP2 a forward with gradients is followed by a backward.
        (torch.stack([values.sum() for values in found.values()]).sum() * 0).backward()
    rounding = Rounding.of(assembly.resolved.numerics, assembly.mesh)
    ratios = []
    for name, values in found.items():
        given, off = values.detach().cpu(), (values.detach() - wanted[name]).cpu()
        for at, (value, ratio) in enumerate(zip(given.tolist(), off.tolist(), strict=True)):
            most = allowed(rounding, int(batch.trained_per_document[at]), value)
            ratios.append(_Ratio(f"document {batch.documents[at]} of {split}: its {name}", ratio, most))
    return ratios


def _warn_of_rounding(assembly: Assembly, ranks: Collective, console: Console) -> None:
    """Say where the first micro-batch, its rows together, begins with log-ratios that are not zero. Collective."""
    if (rows := assembly.batches.micro_batch_size) == 1:
        return
    state = assembly.train_state
    batch = assembly.batches.step(0).micro[0]
    with torch.no_grad():
        wanted = device_columns(state.root, state.method, batch, state.step_config)
        found = reference_values(state.root, state.method, batch, state.step_config)
    ratios = [float((values - wanted[name]).abs().max()) for name, values in found.items() if len(values)]
    most = max((ratio for of_rank in ranks.on_all_ranks(lambda: ratios) for ratio in of_rank), default=0.0)
    if most > 0:
        console.warn(
            f"log-ratios of {rows} rows at once begin within {most:.2g} of 0, not at it: products of more rows round "
            "otherwise (train.micro_batch_size: 1 begins at 0)"
        )
