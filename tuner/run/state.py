"""What a run leaves for later launches and commands: in its directory as a launch begins, and in every checkpoint the
facts of its manifest, what of them must stay, and its JSON state.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tuner.checkpoint.load import load_into
from tuner.checkpoint.open import CheckpointInfo
from tuner.config.load import LoadedRecipe, load_recipe, recipe_dict, recipe_yaml
from tuner.config.recipe import DataSection, TrainSection
from tuner.data.id_probes import ID_PROBES, read_probes, text_probes, write_probes
from tuner.errors import DataError, MachineError
from tuner.run.changes import STATE, pending, resets_of, sources_of_eval, starts_of, updates_of
from tuner.run.options import HandedOver, LaunchOptions
from tuner.run.parts.part import LaunchContext, Preflight
from tuner.rundir.checkpoints import APART, require_same_base, require_same_quantizer
from tuner.rundir.directory import RunDir, noted
from tuner.rundir.layout import EMA_PREFIX, INIT_REPORT, MODEL_CONFIG, MODEL_PREFIX, TOKENIZER
from tuner.runtime import files
from tuner.setup.build import Assembly, run_tensors
from tuner.setup.model import WeightFacts
from tuner.setup.resolve import Resolved, class_facts, manifest_facts, notes, quantizer_facts, recipe_again
from tuner.setup.specs import assembly_spec
from tuner.stages import shown


def begin_launch(
    ready: Preflight, assembly: Assembly, loaded: LoadedRecipe, options: LaunchOptions
) -> dict[str, Any]:
    """Fill the run directory and note the launch in its record, which is returned. Rank 0, under the run's lock."""
    run, record, found = ready.status.run, ready.status.record, ready.status.checkpoint
    if run.read_record() != record:
        raise MachineError(f"{run.path}: another launch used it meanwhile", hint="run the same command again")
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    run.logs.mkdir(exist_ok=True)
    run.sweep()
    if record is not None:
        is_own = found is not None and found.path.parent == run.checkpoints
        run.set_aside(found.step if found is not None and is_own else -1, str(record["run_id"]))
    resolved = assembly.resolved
    # How long and on how many processes is each launch's own affair.
    kept = recipe_again(resolved, {"train.stop_after": None}).model_copy(update={"parallel": loaded.recipe.parallel})
    begins = found is None or record is None
    if begins or not run.resolved_recipe.is_file():
        run.write_recipe(loaded.text, recipe_yaml(kept, notes=notes(resolved)))
    if begins or not (run.path / TOKENIZER).is_dir():
        write_tokenizer(run, assembly)
    if begins or not (run.path / MODEL_CONFIG).is_dir():
        write_model_config(run.path / MODEL_CONFIG, resolved)
    if (given := assembly.facts.given) is not None and "report" in given:
        files.write_atomic(run.path / INIT_REPORT, given["report"].encode())
    # Where the user works, before where the recipe is: a resumed run reads it from its own directory.
    work_dirs = [Path.cwd(), *([loaded.path.parent] if loaded.path is not None else [])]
    resets = ready.status.resets
    changed: dict[str, Any] = {"resets": [reset.as_state() for reset in resets]} if resets else {}
    if record is not None and (options.reset or _skips_others(run, record, kept.train)):
        changed["recipe"] = recipe_dict(kept)
    record = run.begin(record, _facts(ready, assembly, loaded, options.handed_over), work_dirs, changed)
    for part in ready.parts:
        part.write_facts(run.path)
    if "recipe" in record:  # for people and other commands; launches read the record
        files.write_atomic(run.resolved_recipe, recipe_yaml(load_recipe(record["recipe"]).recipe).encode())
    return record


def _skips_others(run: RunDir, record: Mapping[str, Any], kept: TrainSection) -> bool:
    """Whether the run leaves out other steps from here on, which a later launch is not to forget."""
    before = run.recipe(record)
    return before is not None and before.recipe.train.steps_to_skip != kept.steps_to_skip


def _facts(
    ready: Preflight, assembly: Assembly, loaded: LoadedRecipe, given: HandedOver | None
) -> dict[str, Any]:
    """What the record notes of this launch besides its command and versions."""
    found = ready.status.checkpoint
    return {
        "world_size": assembly.rank_info.world_size,
        "threads": torch.get_num_threads(),
        "device": assembly.resolved.facts.name,
        "cuda": torch.version.cuda,
        **noted(loaded, ready.status.run.path),
        "from_step": 0 if found is None else found.step,
        "began_from": shown(found.path) if found is not None and ready.status.record is None else None,
        "total_steps": assembly.timetable.plan.total_steps,
        **({"settled": dict(assembly.resolved.settled)} if assembly.resolved.settled else {}),
        **({} if assembly.reference is None else {"reference": dict(assembly.reference)}),
        **({} if assembly.teacher is None else {"teacher": dict(assembly.teacher)}),
        **({} if given is None else {"command": list(given.command)}),
    }


def write_model_config(directory: Path, resolved: Resolved) -> None:
    """Write the model's config and its generation config. Raises MachineError, DataError for what is no JSON."""
    config = directory / "config.json"
    with files.machine_errors(config):
        resolved.config.save_pretrained(directory)
        files.fsync_path(config)
    # Its own save refuses settings that published models ship, such as a temperature without sampling.
    try:
        files.write_json(directory / "generation_config.json", resolved.generation.to_dict())
    except (TypeError, ValueError) as error:
        said = f"{resolved.model_name}/generation_config.json: cannot be written again: {error}"
        raise DataError(said, hint="take what is no plain value (Infinity, NaN) out of it") from error


GIVEN = "init_from"
"""Of a checkpoint's facts: what `model.init_from` gave the run when it began."""


def is_unmergeable(assembly: Assembly) -> bool:
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
        **({APART: True} if is_unmergeable(assembly) else {}),
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
        files.json_bytes(meta)
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
    which its hint repeats. Collective.
    """
    require_same_base(found, assembly.facts.agreed_frozen_hash())
    meta = found.manifest["meta"]
    require_same_quantizer(found, quantizer_facts(assembly.resolved))
    code = class_facts(assembly.resolved).get("code", {})
    if code.get("sha256") != meta["model"].get("code", {}).get("sha256"):
        said = f"{found.path}: the code of model.use {code.get('use')} changed since this checkpoint was saved"
        raise DataError(said, hint="restore it, or start a new run with --name")
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
    with files.machine_errors(path):
        write_probes(path, [*kept, *text_probes(assembly.tokenizer)])
        files.fsync_path(path)


def tokenizer_meta(run: RunDir) -> dict[str, Any]:
    """What a checkpoint notes of them, so that an export can tell that they are still the same."""
    probes = run.path / ID_PROBES
    facts = {"size": files.regular_size(probes), "sha256": files.sha256_file(probes)} if probes.is_file() else None
    found = {} if facts is None else {ID_PROBES: facts}
    return {"tokenizer_files": files.file_entries(run.path / TOKENIZER), "id_probes": found}


def run_state(context: LaunchContext, finished: bool) -> dict[str, Any]:
    """The JSON state of a checkpoint."""
    state = context.progress.as_state() | {"resets": [reset.as_state() for reset in context.resets]}
    for part in context.parts:
        state |= part.state(context.progress.step)
    return state | {"finished": finished}


def restore(context: LaunchContext, found: CheckpointInfo) -> None:
    """Put the run where a checkpoint says it was: this run's, or the one that it branches off from. Collective."""
    assembly, progress, resets = context.assembly, context.progress, context.resets
    reset_here = pending(resets, found.step)
    if STATE in reset_here:
        load_into(found, _named(assembly, MODEL_PREFIX), MODEL_PREFIX)
    else:
        if updates_of(found.state) > starts_of(resets_of(found.state)).updates:  # there was an update of it
            assembly.train_state.optimizer.allocate()
        averages = _named(assembly, EMA_PREFIX)
        others = {name: tensor for name, tensor in run_tensors(assembly.train_state).items() if name not in averages}
        load_into(found, others, exclude_prefix=EMA_PREFIX)
    if averages := _named(assembly, EMA_PREFIX):
        _restore_averages(context, averages, found)
    early = None if progress.early is None else replace(progress.early)
    progress.restore(found.state, None if assembly.keeps is None else assembly.keeps.metric)
    if "schedule" in reset_here:
        progress.early = early  # another course of the learning rate: counted from its first evaluation
    assembly.train_state.guard.restore(found.state["guard"])
    assembly.train_state.optimizer.set_step_count(updates_of(found.state) - starts_of(resets).updates)
    origin = ""
    if found.path.parent != context.run.checkpoints:  # another run's, which this one neither counts nor prunes
        progress.saved_step = progress.best = None
        origin = f", from {found.path}"
    context.console.say("resume", f"step {progress.step} of {progress.plan.total_steps}{origin}")
    if reset_here:
        context.console.say("reset", f"{', '.join(reset_here)}, after step {progress.step}")


def _restore_averages(context: LaunchContext, averages: Mapping[str, Any], found: CheckpointInfo) -> None:
    """Take over the averages of the weights, or begin them here where the checkpoint has none. Collective."""
    if any(name.startswith(EMA_PREFIX) for name in found.index()):
        load_into(found, averages, EMA_PREFIX)
        return
    for part in context.assembly.train_state.parts:
        part.restart()
    context.console.say("average", f"of the weights, from step {found.step} on: the checkpoint has none")


def _named(assembly: Assembly, prefix: str) -> dict[str, Any]:
    """The tensors of a run whose names begin so."""
    return {name: tensor for name, tensor in run_tensors(assembly.train_state).items() if name.startswith(prefix)}
