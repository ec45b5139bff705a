"""A teacher's most probable tokens at every trained position, computed once before training, which loads no teacher.

The teacher reads the same packed rows as the student would. What it gives is known by its weights, the rows, and what
is kept of each distribution; who computes it, and with which kernels, only moves its last bits.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tuner.config.methods import DistillMethod
from tuner.data.batches import collate
from tuner.data.building.columns import Columns
from tuner.data.encoding.tokenizer_files import tokenizer_directory
from tuner.data.prepared import PackedRows, Row
from tuner.errors import RecipeError, VerificationError
from tuner.model.build import fetch_weights, model_config
from tuner.model.divergence import top_tokens
from tuner.model.root import CausalLM
from tuner.run.columns import ColumnsInfo, ColumnSource, Work, key_of, with_columns
from tuner.run.parts.part import Preflight
from tuner.runtime.console import Console
from tuner.runtime.device import to_device
from tuner.runtime.files import sha256_file
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.build import Assembly
from tuner.setup.model import assemble_teacher
from tuner.setup.resolve import method_section
from tuner.setup.teacher import teacher_model
from tuner.train.methods.distill import Distill


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
    return replace(assembly, teacher=info.as_meta())


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
        raise RecipeError(
            f"method.top_k: {method.top_k:,} tokens of a vocabulary of {vocabulary:,}",
            hint=f"write top_k: {vocabulary} or less",
        )
    return {
        "teacher": method.teacher,
        "weights": weights,
        "prepared": assembly.prepared.key,
        "precision": assembly.resolved.numerics.precision,
        "top_k": method.top_k,
        "temperature": method.temperature,
        "vocabulary": vocabulary,
    }


def _weights(method: DistillMethod) -> str:
    """SHA-256 over the teacher's config and weights as files, by rank 0. Collective."""

    def hashed() -> str:
        fetch_weights(teacher_model(method))
        directory = tokenizer_directory(method.teacher, method.teacher_revision)
        files = [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
        return hashlib.sha256("\n".join(sha256_file(path) for path in files).encode()).hexdigest()

    found: str = Collective(gloo_group()).on_rank0(hashed)
    return found


def _key(facts: Mapping[str, Any]) -> str:
    return key_of({name: value for name, value in facts.items() if name != "teacher"})  # wherever it lies


def values_of(assembly: Assembly) -> Callable[[PackedRows, Row], Columns]:
    """What computes the columns of one row. The teacher is built when the first row comes, on all ranks together.

    It raises VerificationError for a probability that is not finite.
    """
    method, step_config = method_of(assembly), assembly.train_state.step_config
    vocabulary = int(key_facts(assembly, "")["vocabulary"])
    count, small = method.top_k or 0, vocabulary <= 1 << 16
    built: list[CausalLM] = []

    def values(rows: PackedRows, row: Row) -> Columns:
        if not built:
            built.append(assemble_teacher(assembly.resolved, method, step_config).root)
        batch = collate([row])
        at = batch.trained_positions
        arrays = (batch.input_ids, batch.position_ids, at, batch.targets[at])
        ids, places, positions, targets = (to_device(array, step_config.device) for array in arrays)
        kept = partial(top_tokens, count=count, temperature=method.temperature, vocabulary=vocabulary)
        with torch.no_grad(), step_config.autocast():
            found = built[0](ids, places, batch.lengths, positions, targets, kept)
        columns: Columns = {name: tensor.cpu().numpy() for name, tensor in found.items()}
        columns["ids"] = columns["ids"].astype(np.uint16 if small else np.uint32)
        if not np.isfinite(columns["log_p"]).all():
            raise VerificationError(
                f"the teacher gives document {int(batch.documents[0])} a probability that is not finite",
                hint="try train.precision: fp32; or look at the row: tuner prepare-data RECIPE --explain N",
            )
        return columns

    return values
