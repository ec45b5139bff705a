"""The Python API: the functions that the commands call, given a recipe as a file, a shipped name or a mapping.

Each raises what its command reports, as children of TunerError. With ``quiet`` warnings alone go to stderr.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tuner.config.ladder import require_one_run
from tuner.config.load import LoadedRecipe, ReadRecipe, RecipeText, load_recipe, read_recipe
from tuner.config.numbers import parse_bytes
from tuner.config.overrides import Override
from tuner.errors import RecipeError
from tuner.runtime.before_torch import prepare_environment

if TYPE_CHECKING:
    from tuner.data.building.prepare import PreparedInfo
    from tuner.export.hub import PushReport
    from tuner.export.report import ExportReport
    from tuner.generate import Answer, Generator, Message, Sampling
    from tuner.profile.predict import Target
    from tuner.profile.prediction import Prediction
    from tuner.profile.search import Choice
    from tuner.prove.prove import Proven
    from tuner.run.options import RunResult
    from tuner.run.score import Score
    from tuner.run.score_tasks import TasksScore
    from tuner.run.verify import ResumeProof
    from tuner.rundir.record import Run
    from tuner.runtime.console import Console, Level
    from tuner.setup.machine_check import Check

__all__ = [
    "RecipeSource", "check_recipe", "doctor", "evaluate", "export_hf", "fit", "generate", "load_generator",
    "load_recipe", "prepare_data", "profile", "prove", "push", "resume", "runs", "score_tasks", "show_run", "train",
    "verify_resume",
]  # fmt: skip

RecipeSource = LoadedRecipe | Path | str | Mapping[str, Any]
"""A loaded recipe, a file's path, a shipped recipe's name, or a mapping with the recipe's keys."""
ResumeMode = Literal["auto", "must", "never"] | Path


def check_recipe(recipe: RecipeSource) -> tuple[Any, ...]:
    """Every problem of a recipe, as RecipeError's ``problems`` hold them; empty where there is none.

    Looked at are keys, files, templates, code and names of layers, as `tuner config check` does.
    """
    from tuner.setup.check import check_recipe as check_all

    try:
        check_all(ReadRecipe(recipe, ()) if isinstance(recipe, LoadedRecipe) else read_recipe(recipe))
    except RecipeError as error:
        return tuple(error.problems)
    return ()


def prepare_data(recipe: RecipeSource, quiet: bool = False) -> PreparedInfo:
    """Prepare the recipe's data, or find it prepared; progress goes to stderr.

    Raises RecipeError, DataError and MachineError as `tuner prepare-data` reports them.
    """
    from tuner.data.building.prepare import prepare
    from tuner.data.building.spec import prepare_spec

    found = _loaded(recipe).recipe
    spec = prepare_spec(found.model, found.tokenizer, found.data, found.method, found.seed)
    return prepare(spec, _console(found.logging.level, quiet))


def train(
    recipe: RecipeSource,
    resume: ResumeMode = "never",
    prepared: str | Path | None = None,
    dry_run: bool = False,
    reset: str | None = None,
    quiet: bool = False,
) -> RunResult:
    """Train the recipe in this process, as one of torchrun's or srun's, or in local ones; prepares missing data.

    `prepared` is a directory that `prepare_data` returned; `reset` names parts of a resumed run to reset, such as
    ``"schedule"``. Raises TunerError's children as `tuner train` reports them.
    """
    prepare_environment(os.environ)  # before torch is imported
    loaded = _loaded(recipe)
    start = _path(resume) if isinstance(resume, Path) else resume
    return _launched(loaded, start, None if prepared is None else _path(prepared), dry_run, reset, quiet)


def resume(
    run: str | Path,
    overrides: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    reset: str | None = None,
    quiet: bool = False,
) -> RunResult:
    """Resume a run from its newest valid checkpoint; a finished, whole one is returned as it is.

    `overrides` are keys that may change, such as ``{"train.stop_after": "100 steps"}``; `reset` allows more of them.
    """
    prepare_environment(os.environ)
    from tuner.run.status import resume_source

    return _launched(resume_source(_path(run), _overrides(overrides)), "must", None, dry_run, reset, quiet)


def evaluate(
    model: str | Path,
    recipe: RecipeSource | None = None,
    overrides: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Score:
    """Measure the loss of a run, a checkpoint or a Hugging Face directory on held-out rows, of each source and of all.

    The rows are those of `recipe`, by default of the run's own.
    """
    prepare_environment(os.environ)
    from tuner.run.score import find_trained, run_recipe, score
    from tuner.runtime.dist import RankInfo

    console = _console("info", quiet)
    trained = find_trained(_path(model), console)
    loaded = load_recipe(run_recipe(trained), _overrides(overrides)) if recipe is None else _loaded(recipe)
    if recipe is not None and overrides:
        raise RecipeError("overrides are of the run's own recipe; give load_recipe(recipe, overrides) in place of both")
    return score(trained, loaded, RankInfo.from_environment(), console)


def score_tasks(
    model: str | Path,
    tasks: Sequence[str] = ("recipe",),
    recipe: RecipeSource | None = None,
    overrides: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    quiet: bool = False,
) -> TasksScore:
    """Score a run, a checkpoint or a Hugging Face directory on tasks: files, ``lm_eval:NAME``, ``FILE.py:NAME``.

    ``"recipe"`` means those of `recipe`, by default of the run's own; the results of items go to `output`.
    """
    prepare_environment(os.environ)
    from tuner.run.score import find_trained
    from tuner.run.score_tasks import own_recipe, with_tasks
    from tuner.run.score_tasks import score_tasks as score
    from tuner.runtime.dist import RankInfo

    console = _console("info", quiet)
    trained = find_trained(_path(model), console)
    changes = with_tasks(_overrides(overrides), tasks)
    if isinstance(recipe, LoadedRecipe):
        loaded = recipe if not changes else load_recipe(RecipeText(recipe.text, "recipe"), changes, recipe.directory)
    else:
        loaded = own_recipe(trained, changes) if recipe is None else load_recipe(recipe, changes)
    place = None if output is None else _path(output)
    return score(trained, loaded, RankInfo.from_environment(), console, place)


def load_generator(model: str | Path, base: str | None = None, quiet: bool = False) -> Generator:
    """Load a run, a checkpoint, a Hugging Face directory or a hub name once, to answer many prompts."""
    prepare_environment(os.environ)
    from tuner.generate import load_generator as load

    name = str(_path(model)) if Path(model).expanduser().exists() else str(model)
    console = _console("info", quiet)
    return load(name, base=base, warn=console.warn)


def generate(
    model: str | Path | Generator,
    prompts: str | Sequence[str | Sequence[Message]],
    sampling: Sampling | None = None,
    system: str | None = None,
    quiet: bool = False,
) -> list[Answer]:
    """Answer prompts, each a text or a list of messages, through the chat template of a model's tokenizer."""
    prepare_environment(os.environ)
    from tuner.generate import Generator, Prompt, Sampling

    generator = model if isinstance(model, Generator) else load_generator(model, quiet=quiet)
    chosen, before = sampling or Sampling(), ({"role": "system", "content": system},) if system else ()
    answers = []
    for prompt in [prompts] if isinstance(prompts, str) else prompts:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        shown = str(messages[-1]["content"]) if messages else ""
        answers.append(generator.generate(Prompt(shown, messages=(*before, *messages)), chosen))
    return answers


def profile(
    recipe: RecipeSource, device: str | None = None, processes: str | None = None, memory: str | None = None
) -> Prediction:
    """Predict the memory and time of a recipe, as `tuner profile` does: for `device`, such as ``"h100-80g"``."""
    from tuner.profile.choose import predict_settled

    found = _loaded(recipe)
    return predict_settled(found, _target(found, device, processes, memory))[1]


def fit(
    recipe: RecipeSource,
    memory: str | None = None,
    device: str | None = None,
    processes: str | None = None,
    quiet: bool = False,
) -> list[Choice]:
    """Find settings that fit into so much memory for each process, such as ``"24GiB"``, the fastest first.

    Without ``memory`` it is that of the device. Raises MemoryLimitError where nothing fits.
    """
    from tuner.profile.fit import fit as find
    from tuner.setup.settled import with_whole_batches

    found, console = _loaded(recipe), _console("info", quiet)
    target = _target(found, device, processes, memory)
    whole = with_whole_batches(found, target.rank_info.world_size).recipe
    return find(whole, target, lambda line: console.say("tried", line)).choices


def prove(recipe: RecipeSource, steps: int = 20, layouts: Sequence[str] = (), quiet: bool = False) -> Proven:
    """Hold layouts of a recipe against one process, on a small model of its architecture and this machine's CPU.

    ``layouts`` are names such as ``"fsdp2+tp2"``; without any, the recipe's own and all known ones are proven. The
    result's ``wrong`` holds those that are not what one process computes.
    """
    prepare_environment(os.environ)
    from tuner.prove.prove import prove as prove_layouts

    found, console = _loaded(recipe).recipe, _console("info", quiet)
    require_one_run(found.ladder)
    return prove_layouts(found, steps, layouts, lambda line: console.say("proven", line))


def verify_resume(run: str | Path, steps: int = 2, quiet: bool = False) -> ResumeProof:
    """Prove that a run resumes exactly on this machine. Raises VerificationError with the first difference."""
    prepare_environment(os.environ)
    from tuner.run.verify import verify_resume as prove

    return prove(_path(run), steps, _console("info", quiet))


def runs(directory: str | Path = "runs") -> list[Run]:
    """The runs at or below a directory, oldest first; those whose record cannot be read are left out."""
    from tuner.rundir.record import find_runs

    return find_runs(_path(directory))[0]


def show_run(run: str | Path) -> dict[str, Any]:
    """A run's figures as `tuner runs show` gives them: status, steps, losses, tokens, seconds."""
    from tuner.rundir.record import read_run, summary

    return summary(read_run(_path(run)))


def export_hf(  # noqa: PLR0913, PLR0917 - one parameter for each option
    path: str | Path,
    output: str | Path | None = None,
    dtype: Literal["auto", "bf16", "fp32"] = "auto",
    adapter: Literal["merge", "keep"] = "merge",
    shard_size: str | int = "5GB",
    step: int | Literal["newest", "best"] = "newest",
    base_model: str | None = None,
    text_only: bool = False,
    base: Literal["auto", "original", "quantized"] = "auto",
    weights: str = "trained",
) -> ExportReport:
    """Write a checkpoint of a run, or the checkpoint given, to `output` (default `<run>/exports/step-N`), verified.

    A kept adapter goes to `step-N-adapter` and names `base_model`, by default what it was trained from; the language
    model of a multimodal checkpoint alone (`text_only`) to `step-N-text`. An adapter of a quantised base is merged into
    `base`, by default the one that answers closer to the trained model, and both divergences are reported. `dtype` is
    by default bf16, or fp32 where rounding would cost more than a fifth of what training changed. `weights` are
    `trained`, `ema` (the run's average) or `mean:N` (that of the last N checkpoints), next to them. The same
    checkpoint and options give the same bytes; a target that holds them already is left alone. Raises
    RecipeError for a target that holds something else, DataError for a corrupt checkpoint, MachineError for a full
    disk and VerificationError, with nothing published, where the export is not the trained model.
    """
    from tuner.export.hf import run_export
    from tuner.export.plan import ExportOptions, plan_export
    from tuner.export.source import Weights

    target = None if output is None else _path(output)
    shard_bytes, which = parse_bytes(shard_size), Weights.parse(weights)
    options = ExportOptions(dtype, adapter, shard_bytes, base_model, text_only, base, which)
    return run_export(plan_export(_path(path), target, options, step=step))


def push(path: str | Path, repo: str, private: bool = False, quiet: bool = False) -> PushReport:
    """Upload a verified export, or the newest one of a run, to the hub's repository `repo`, ``"owner/name"``.

    Raises MachineError without a token, and where the hub cannot be reached or refuses.
    """
    from tuner.export.hub import find_export, plan_push
    from tuner.export.hub import push as upload

    console = _console("info", quiet)
    return upload(plan_push(find_export(_path(path)), repo), private, say=console.warn)


def doctor(directory: str | Path = ".") -> list[Check]:
    """Try what tuner needs of this machine; a check whose status is ``broken`` is of something that is needed."""
    from tuner.setup.machine import examine

    return list(examine(_path(directory)))


def _launched(
    loaded: LoadedRecipe, start: ResumeMode, prepared: Path | None, dry_run: bool, reset: str | None, quiet: bool
) -> RunResult:
    from tuner.run.changes import parse_reset
    from tuner.run.options import LaunchOptions
    from tuner.run.status import nothing_to_do, status_of
    from tuner.runtime.console import Console
    from tuner.runtime.dist import RankInfo

    level = _level(loaded.recipe.logging.level, quiet)
    options = LaunchOptions(start, prepared, dry_run=dry_run, reset=parse_reset(reset), level=level)
    main = RankInfo.from_environment().is_main
    status = status_of(loaded, options, Console(main, level), hashes=main)
    if (finished := nothing_to_do(status, loaded.recipe.export)) is not None:
        return finished
    from tuner.run.launch import launch

    return launch(loaded, options, status=status)


def _target(loaded: LoadedRecipe, device: str | None, processes: str | None, memory: str | None) -> Target:
    from tuner.run.measure import target_of

    require_one_run(loaded.recipe.ladder)
    return target_of(loaded.recipe, device, processes, memory)


def _overrides(values: Mapping[str, Any] | None) -> list[Override]:
    """Values by dotted key as the command line has them."""
    from tuner.config.dump import flow

    return [Override(key, value if isinstance(value, str) else flow(value)) for key, value in (values or {}).items()]


def _loaded(recipe: RecipeSource) -> LoadedRecipe:
    from tuner.rundir.base_model import require_base_model

    loaded = recipe if isinstance(recipe, LoadedRecipe) else load_recipe(recipe)
    require_base_model(loaded.recipe.model.name_or_path, loaded.origins.get("model.name_or_path", "recipe"))
    return loaded


def _console(level: Level, quiet: bool) -> Console:
    from tuner.runtime.console import Console
    from tuner.runtime.dist import RankInfo

    return Console(RankInfo.from_environment().is_main, _level(level, quiet))


def _level(level: Level, quiet: bool) -> Level:
    return "warning" if quiet and level in ("debug", "info") else level


def _path(path: str | Path) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))
