"""The facts about a run in every checkpoint, the tokenizer's files among them, and what of them must stay."""

from collections.abc import Collection
from typing import Any

from tuner.checkpoint.open import CheckpointInfo
from tuner.config.recipe import DataSection
from tuner.data.id_probes import ID_PROBES, read_probes, text_probes, write_probes
from tuner.errors import DataError
from tuner.run.changes import sources_of_eval
from tuner.rundir.directory import RunDir
from tuner.rundir.exports import APART
from tuner.rundir.layout import TOKENIZER
from tuner.rundir.same_base import require_same_base, require_same_quantizer
from tuner.runtime.files import file_entries, fsync_path, json_bytes, machine_errors, regular_size, sha256_file
from tuner.setup.build import Assembly
from tuner.setup.model import WeightFacts
from tuner.setup.resolve import class_facts, manifest_facts, quantizer_facts
from tuner.setup.specs import assembly_spec

GIVEN = "init_from"
"""Of a checkpoint's facts: what `model.init_from` gave the run when it began."""


def is_apart(assembly: Assembly) -> bool:
    """Whether the run's adapter cannot be merged: it is exported as it is."""
    if assembly_spec(assembly.resolved).trainable.adapter is None:
        return False
    from tuner.model.adapter import tied_layers  # with peft

    return bool(tied_layers(assembly.train_state.root.model))


def frozen_meta(assembly: Assembly) -> dict[str, Any]:
    """What a manifest says besides, by when it is written: of weights that are not trained, once they are hashed.

    Rank 0's to call.
    """
    teacher = _only_teacher(assembly)
    of_teacher = {} if teacher is None else {"teacher_hash": teacher.frozen_hash()}
    return {"frozen_hash": assembly.facts.frozen_hash(), **of_teacher}


def run_meta(assembly: Assembly) -> dict[str, Any]:
    """The facts that go into every checkpoint's manifest. Raises DataError, before any step, where they cannot."""
    meta = manifest_facts(assembly.resolved, with_licence=assembly.rank_info.is_main)
    if (left := assembly.facts.untouched) is not None:
        meta["model"]["untouched"] = dict(left)
    meta |= {
        **({APART: True} if is_apart(assembly) else {}),
        **({} if (given := assembly.facts.given) is None else {GIVEN: {n: given[n] for n in ("entries", "frozen")}}),
        "tokenizer_hash": assembly.tokenizer.hash,
        "data_key": assembly.prepared.key,
        **({} if assembly.reference is None else {"reference": dict(assembly.reference)}),
        **({} if assembly.teacher is None else {"teacher": dict(assembly.teacher)}),
        "data": {
            split: {
                "rows": len(rows),
                "tokens": int(rows.tokens_per_row.sum()),
                "trained_tokens": int(rows.trained_per_row.sum()),
            }
            for split, rows in (("train", assembly.prepared.train), ("eval", assembly.prepared.eval))
            if rows is not None
        },
        "world_size": assembly.rank_info.world_size,
    }
    try:
        json_bytes(meta)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{assembly.resolved.model_name}: its facts cannot be written into a checkpoint: {error}",
            hint="look for a value in its config.json that is no text, number, list or mapping",
        ) from error
    return meta


def _only_teacher(assembly: Assembly) -> WeightFacts | None:
    """The teacher in memory, where the run has no other: of versions each checkpoint's state says which it was."""
    return None if assembly.resolved.teacher is not None else assembly.teacher_facts


def require_same_data(
    found: CheckpointInfo, assembly: Assembly, section: DataSection, reset: Collection[str], other_data: bool
) -> None:
    """Check that base model, teacher, data and tokenizer are those of a checkpoint's run. Raises DataError.

    ``section`` names the data. `other_data` may differ from the run's; `reset` are the parts that the launch resets,
    which its hint goes on with. Collective.
    """
    require_same_base(found, assembly.facts.agreed_frozen_hash())
    meta = found.manifest["meta"]
    require_same_quantizer(found, quantizer_facts(assembly.resolved))
    code = class_facts(assembly.resolved).get("code", {})
    if code.get("sha256") != meta["model"].get("code", {}).get("sha256"):
        raise DataError(
            f"{found.path}: the code of model.use {code.get('use')} changed since this checkpoint was saved",
            hint="restore it, or start a new run with --name",
        )
    left = assembly.facts.untouched
    if left is not None and meta["model"].get("untouched") != left:
        raise DataError(
            f"{found.path}: what is not trained of {assembly.resolved.model_name} (images, sound) "
            "changed since this checkpoint was saved",
            hint="restore it, or name its commit: model.revision; or start a new run with --name",
        )
    teacher = _only_teacher(assembly)
    taught = None if teacher is None else teacher.agreed_frozen_hash()
    if taught is not None and meta.get("teacher_hash") != taught:
        raise DataError(
            f"{found.path}: the teacher changed since this checkpoint was saved ({meta.get('teacher_hash')} -> "
            f"{taught})",
            hint="restore it, or name its commit: method.teacher_revision; or start a new run with --name",
        )
    for key, now, what in (
        ("data_key", assembly.prepared.key, "data"),
        ("tokenizer_hash", assembly.tokenizer.hash, "tokenizer"),
    ):
        if meta.get(key) != now and not (other_data and key == "data_key"):
            of, ways = "", "restore it"
            if key == "data_key":
                of = f" of {', '.join(source.name for source in (*section.train, *sources_of_eval(section)))}"
                ways += f"; or train on the changed data from here: --reset {','.join([*reset, 'data'])}"
            raise DataError(
                f"{found.path}: the {what}{of} changed since this checkpoint was saved ({meta.get(key)} -> {now})",
                hint=f"{ways}; or start a new run with --name",
            )


def write_tokenizer(run: RunDir, assembly: Assembly) -> None:
    """Write the tokenizer's files, and probes of its ids: some of the prepared rows, and adversarial texts.

    Raises MachineError.
    """
    assembly.tokenizer.save(run.path / TOKENIZER)
    rows, path = assembly.prepared.path / ID_PROBES, run.path / ID_PROBES
    kept = read_probes(rows) if rows.is_file() else []
    with machine_errors(path):
        write_probes(path, [*kept, *text_probes(assembly.tokenizer)])
        fsync_path(path)


def tokenizer_meta(run: RunDir) -> dict[str, Any]:
    """What a checkpoint notes of them, so that an export can tell that they are still the same."""
    probes = run.path / ID_PROBES
    found = {ID_PROBES: {"size": regular_size(probes), "sha256": sha256_file(probes)}} if probes.is_file() else {}
    return {"tokenizer_files": file_entries(run.path / TOKENIZER), "id_probes": found}
