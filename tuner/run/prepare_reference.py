"""The reference of a recipe computed without training: on the processes, and by the code, that training would have."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.config.load import LoadedRecipe
from tuner.data.building.spec import prepare_spec
from tuner.data.prepared import open_prepared
from tuner.errors import RecipeError
from tuner.run.columns import Work
from tuner.run.launch import Placement
from tuner.run.main import exactness
from tuner.run.options import JOB, HandedOver, Job, LaunchOptions
from tuner.run.reference import values_of, with_reference
from tuner.run.settle import Place, settle
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import process_group
from tuner.runtime.spawn import run_ranks
from tuner.runtime.stop import StopSignals
from tuner.setup.build import build
from tuner.setup.resolve import reference_of, resolve


def prepare_reference(loaded: LoadedRecipe, prepared: Path, console: Console, options: LaunchOptions) -> Path:
    """Compute the columns of the recipe's reference, or find them computed, for rows in ``prepared``: their directory.

    Raises RecipeError for a recipe whose reference is none, or computed in each step; TunerError children with the
    failing rank's message and exit code; KeyboardInterrupt, with what was computed until then kept.
    """
    recipe, place = loaded.recipe, Placement.of(loaded.recipe)
    if reference_of(recipe.method) is None:
        raise RecipeError(f"--reference: method.kind {recipe.method.kind} has no reference", hint="leave it out")
    place.check(loaded)
    spec = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
    settled = settle(loaded, {}, place.planned, Place.of(prepared, spec.cache_dir, False), console)
    loaded = replace(loaded, recipe=settled.of(recipe))
    if place.local == 1:
        return _computed(loaded, prepared, place.rank_info, console)
    given = HandedOver(prepared.absolute(), None, ())
    job = JOB.dump_python(Job.of(loaded, replace(options, handed_over=given)), mode="json")
    logs = Path(tempfile.mkdtemp(prefix="tuner-reference-"))
    says = f"starting {place.local} processes" if console.is_heard else ""
    found = run_ranks(reference_rank, job, place.local, logs, says)
    shutil.rmtree(logs)  # after a failure they stay: the error names them
    return Path(found["path"])


def reference_rank(work: dict[str, Any]) -> dict[str, Any]:
    """What each rank that `prepare_reference` starts does."""
    job, rank_info = JOB.validate_python(work), RankInfo.from_environment()
    assert job.options.handed_over is not None
    console = Console(rank_info.is_main, job.options.level)
    return {"path": str(_computed(job.loaded(), job.options.handed_over.prepared, rank_info, console))}


def _computed(loaded: LoadedRecipe, prepared: Path, rank_info: RankInfo, console: Console) -> Path:
    recipe = loaded.recipe
    spec = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
    resolved = resolve(recipe, spec.max_length, rank_info, spec.tokenizer.new_ids)
    if reference_of(resolved.recipe.method) != "columns":
        raise RecipeError(
            "--reference: this recipe's reference is computed in each step, with the adapter off",
            hint="leave it out, or write method.reference: columns",
        )
    joined = process_group(rank_info, resolved.facts.kind, recipe.parallel.timeout.seconds)
    with StopSignals() as signals, joined, exactness(resolved.recipe.train):
        with console.doing("loading model"):
            assembly = build(resolved, open_prepared(prepared), spec.tokenizer, rank_info)
        work = Work(values_of(assembly), assembly.mesh, console, lambda: signals.requested)
        found = with_reference(assembly, spec.cache_dir, None, work)
    assert found.reference is not None
    return spec.cache_dir / "reference" / str(found.reference["key"])
