"""The reference of a recipe computed without training: on the processes, and by the code, that training would have."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.config.load import LoadedRecipe
from tuner.config.methods import DistillMethod, Method
from tuner.data.building.cache import cache_path
from tuner.data.building.spec import prepare_spec
from tuner.data.prepared import open_prepared
from tuner.errors import RecipeError
from tuner.run import reference, teacher
from tuner.run.columns import Work
from tuner.run.launch import Placement
from tuner.run.options import JOB, HandedOver, LaunchOptions, RankJob
from tuner.run.parts.exactness import exactness
from tuner.run.settle import LaunchData, settle
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.spawn import run_apart
from tuner.runtime.stop import StopSignals
from tuner.setup.build import build
from tuner.setup.resolve import method_section, reference_of, resolve
from tuner.setup.specs import joined


def prepare_reference(loaded: LoadedRecipe, prepared: Path, console: Console, options: LaunchOptions) -> Path:
    """Compute the columns of the recipe's reference, or find them computed, for rows in ``prepared``: their directory.

    Raises RecipeError for a recipe whose reference is none, or computed in each step; TunerError children with the
    failing rank's message and exit code; KeyboardInterrupt, with what was computed until then kept.
    """
    recipe, place = loaded.recipe, Placement.of(loaded.recipe)
    if reference_of(recipe.method) is None and not keeps_teacher(recipe.method):
        raise RecipeError(f"--reference: method.kind {recipe.method.kind} has no reference", hint="leave it out")
    place.check(loaded)
    spec = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
    at = LaunchData.of(prepared, spec.cache_dir, False, starts=place.local > 1)
    settled = settle(loaded, {}, place.planned, at, console)
    loaded = replace(loaded, recipe=settled.of(recipe))
    if place.local == 1:
        return _computed(loaded, prepared, place.rank_info, console)
    given = HandedOver(prepared.absolute(), None, ())
    job = JOB.dump_python(RankJob.of(loaded, replace(options, handed_over=given)), mode="json")
    return Path(run_apart(reference_rank, job, place.local, "reference", console.is_heard)["path"])


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
    of_teacher = keeps_teacher(recipe.method)
    values_of, with_columns = (
        (teacher.values_of, teacher.with_teacher) if of_teacher else (reference.values_of, reference.with_reference)
    )
    if not of_teacher and reference_of(method_section(resolved)) != "columns":
        said = "--reference: this recipe's reference is computed in each step, with the adapter off"
        raise RecipeError(said, hint="leave it out, or write method.reference: columns")
    with StopSignals() as signals, joined(resolved, rank_info), exactness(resolved.numerics):
        with console.doing("loading model"):
            assembly = build(resolved, open_prepared(prepared), spec.tokenizer, rank_info)
        work = Work(values_of(assembly), assembly.mesh, console, lambda: signals.requested)
        found = with_columns(assembly, spec.cache_dir, None, work)
    noted = found.teacher if of_teacher else found.reference
    assert noted is not None
    return cache_path(spec.cache_dir, "teacher" if of_teacher else "reference", str(noted["key"]))


def keeps_teacher(method: Method) -> bool:
    """Whether a method learns from columns of a teacher's tokens."""
    return isinstance(method, DistillMethod) and method.top_k is not None
