"""The beginning of a launch in the run directory: what every later command reads of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tuner.config.dump import recipe_dict, recipe_yaml
from tuner.config.load import load_recipe
from tuner.config.recipe import TrainSection
from tuner.errors import DataError, MachineError
from tuner.run.meta import write_tokenizer
from tuner.run.parts.part import Preflight
from tuner.rundir.directory import RunDir, noted
from tuner.rundir.layout import INIT_REPORT, MODEL_CONFIG, TOKENIZER
from tuner.runtime.files import fsync_path, machine_errors, write_atomic, write_json
from tuner.setup.build import Assembly
from tuner.setup.resolve import Resolved, notes, recipe_again
from tuner.stages import shown


def begin_launch(ready: Preflight, assembly: Assembly) -> dict[str, Any]:
    """Fill the run directory and note the launch in its record, which is returned. Rank 0, under the run's lock."""
    loaded, run = ready.before.loaded, ready.status.run
    record, found = ready.status.record, ready.status.checkpoint
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
        write_atomic(run.path / INIT_REPORT, given["report"].encode())
    # Where the user works, before where the recipe is: a resumed run reads it from its own directory.
    work_dirs = [Path.cwd(), *([loaded.path.parent] if loaded.path is not None else [])]
    resets = ready.status.resets
    changed: dict[str, Any] = {"resets": [reset.as_state() for reset in resets]} if resets else {}
    if record is not None and (ready.before.options.reset or _skips_others(run, record, kept.train)):
        changed["recipe"] = recipe_dict(kept)
    record = run.begin(record, _facts(ready, assembly), work_dirs, changed)
    for part in ready.parts:
        part.noted(run.path)
    if "recipe" in record:  # for people and other commands; launches read the record
        write_atomic(run.resolved_recipe, recipe_yaml(load_recipe(record["recipe"]).recipe).encode())
    return record


def _skips_others(run: RunDir, record: Mapping[str, Any], kept: TrainSection) -> bool:
    """Whether the run leaves out other steps from here on, which a later launch is not to forget."""
    before = run.recipe(record)
    return before is not None and before.recipe.train.steps_to_skip != kept.steps_to_skip


def _facts(ready: Preflight, assembly: Assembly) -> dict[str, Any]:
    """What the record notes of this launch besides its command and versions."""
    found, given = ready.status.checkpoint, ready.before.options.handed_over
    return {
        "world_size": assembly.rank_info.world_size,
        "threads": torch.get_num_threads(),
        "device": assembly.resolved.facts.name,
        "cuda": torch.version.cuda,
        **noted(ready.before.loaded, ready.status.run.path),
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
    with machine_errors(config):
        resolved.config.save_pretrained(directory)
        fsync_path(config)
    # Its own save refuses settings that published models ship, such as a temperature without sampling.
    try:
        write_json(directory / "generation_config.json", resolved.generation.to_dict())
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{resolved.model_name}/generation_config.json: cannot be written again: {error}",
            hint="take what is no plain value (Infinity, NaN) out of it",
        ) from error
