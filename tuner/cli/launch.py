"""`tuner launch`: a recipe started on a cluster."""

import os
from collections.abc import Sequence

from tuner.cli.command import Flags, Outcome, command, load_one_run
from tuner.config.load import LoadedRecipe
from tuner.errors import RecipeError
from tuner.submit import cluster

CACHE = ".tuner-cache"


@command("launch")
def launch(
    flags: Flags, recipe: str | None = None, on: str = "slurm", nodes: int = 1, gpus_per_node: int = 8,
    cpus: int | None = None, memory: str | None = None, time: str | None = None, image: str | None = None,
    volume: list[str] | None = None, env: list[str] | None = None, secret: list[str] | None = None,
    resource: list[str] | None = None, sbatch: list[str] | None = None, restarts: int | None = None,
    jobset: bool = False, dry_run: bool = False,
) -> Outcome:
    """Start the recipe's training on a cluster, or resume it: by sbatch, kubectl apply or ray job submit.

    Flags of the recipe go with it.
    """
    options = {
        "cpus": cpus, "memory": memory, "time": time, "image": image, "volume": volume, "env": env, "secret": secret,
        "resource": resource, "sbatch": sbatch, "restarts": restarts, "jobset": jobset or None,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    cluster.require_taken(on, given)
    loaded = load_one_run(recipe, flags)
    if loaded.path is None:
        raise RecipeError("a cluster reads the recipe from a file", hint="write it into one, and name that")
    volumes, variables = [cluster.Volume.of(text) for text in volume or ()], cluster.variables(env or ())
    warnings = []
    if on == "kubernetes":
        variables = {"TUNER_CACHE": f"{_volume_of_run(loaded, volumes).path}/{CACHE}"} | variables
        warnings = _not_on_volumes(loaded, volumes)
    typed = (each.flag if each.text is None else f"{each.flag}={each.text}" for each in flags)
    asked = cluster.Job(
        str(loaded.recipe.name), (str(loaded.path), *typed), os.getcwd(), nodes,
        gpus_per_node, cpus or 8, None if memory is None else cluster.bytes_of(memory),
        None if time is None else cluster.seconds_of(time), image, tuple(volumes), variables,
    )  # fmt: skip
    _require_whole(loaded, nodes * asked.processes)
    text = cluster.text_of(on, asked, given)
    if dry_run:
        return Outcome(text, warnings=warnings, is_text=True)
    return Outcome(cluster.send(on, text), warnings=warnings, is_text=True)


def _volume_of_run(loaded: LoadedRecipe, volumes: Sequence[cluster.Volume]) -> cluster.Volume:
    """The volume that keeps the run. Raises RecipeError where it would go with its pods."""
    kept = next((volume for volume in volumes if volume.holds(loaded.recipe.output_dir)), None)
    if kept is None:
        run = loaded.recipe.output_dir
        raise RecipeError(
            f"output_dir: {run} is on no volume, and would go with the pods",
            hint=f"write --volume runs:{os.path.dirname(run)}, with the name of your claim for runs",
        )
    return kept


def _not_on_volumes(loaded: LoadedRecipe, volumes: Sequence[cluster.Volume]) -> list[str]:
    recipe = loaded.recipe
    held_out = recipe.data.eval if isinstance(recipe.data.eval, tuple) else ()
    rows = [source.path for source in (*recipe.data.train, *held_out)]
    named = [path for path in (str(loaded.path), recipe.model.name_or_path, *rows) if path.startswith("/")]
    away = [path for path in dict.fromkeys(named) if not any(volume.holds(path) for volume in volumes)]
    return [f"on no volume, so it has to be in the image: {path}" for path in away]


def _require_whole(loaded: LoadedRecipe, processes: int) -> None:
    """Raise RecipeError, before a job waits in a queue for it, for groups or a written batch that do not divide."""
    parallel, batch = loaded.recipe.parallel, loaded.recipe.train.global_batch_size
    for key in ("tensor", "sequence", "expert"):
        if processes % (size := getattr(parallel, key)):
            raise RecipeError(
                f"parallel.{key}: {size} does not divide the {processes} processes", hint=f"write parallel.{key}: 1"
            )
    rows = max(1, processes // (parallel.tensor * parallel.sequence))
    if "train.global_batch_size" in loaded.origins and batch % rows:
        raise RecipeError(
            f"train.global_batch_size: {batch} rows do not divide into {processes} processes",
            hint=f"write train.global_batch_size: {-(-batch // rows) * rows}",
        )
