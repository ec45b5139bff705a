"""Sources of weights that still change: a run, whose checkpoints are its versions, or a directory of `step-N`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.checkpoint.manifest import step_dirs
from tuner.config.recipe import InitFrom
from tuner.errors import RecipeError, TunerError
from tuner.init_from.sources import open_source
from tuner.rundir.layout import CHECKPOINTS


def newest_version(
    source: Path, than: Path | None = None, pass_over: Callable[[str], None] = lambda text: None
) -> Path:
    """The newest version that is whole; ``than``, the current one, where none is newer.

    A checkpoint's files are held against its manifest. ``pass_over`` is called with what is wrong with a newer one.
    Raises RecipeError where there is none at all.
    """
    of_run = source / CHECKPOINTS
    problem = ""
    for number, path in step_dirs(of_run if of_run.is_dir() else source):
        if than is not None and number <= int(than.name.rpartition("-")[2]):
            break
        try:
            open_source(path, hashes=True)
        except TunerError as error:
            problem = problem or f"; {path.name}: {error.message}"
            pass_over(f"{path} is passed over: {error.message}")
            continue
        return path
    if than is not None:
        return than
    raise RecipeError(
        f"{source} has no versions, so that nothing newer can come from it: it is neither a run with a checkpoint nor "
        f"a directory of step-N{problem}",
        hint="leave out every; or name a run that has saved, or its exports, such as runs/NAME/exports",
    )


def pinned(entries: Sequence[InitFrom], versions: Mapping[int, str]) -> dict[int, InitFrom]:
    """Entries by number, and each with a version as one of that path, which never changes."""
    fixed = {n: entries[n].model_copy(update={"path": path, "every": None}) for n, path in versions.items()}
    return dict(enumerate(entries)) | fixed


def versions_in(given: Mapping[str, Any]) -> dict[int, str]:
    """The paths of the entries of `model.init_from` by number, as a checkpoint notes what its run was given."""
    return {number: str(entry["path"]) for number, entry in enumerate(given["entries"])}
