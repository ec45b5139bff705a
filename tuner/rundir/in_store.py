"""Runs, exports and models in object stores: fetched to their stage before they are read, published from there.

A stage on which a launch of this machine works is read as it is: it is newer than its store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tuner.checkpoint.manifest import STEP, step_name
from tuner.errors import MachineError, RecipeError
from tuner.rundir.layout import CHECKPOINTS, EXPORTS, LATEST, LOCK, LOGS, STOP
from tuner.rundir.model_path import Which
from tuner.rundir.run_json import hold, is_run
from tuner.runtime.lock import FileLock, is_locked
from tuner.stages import shown, url_of

if TYPE_CHECKING:
    from tuner.stores.directory import StoreDirectory

Extent = Literal["look", "model", "all"]
"""What is fetched of a run: all but its checkpoints and exports, of these the one that is meant, or everything."""
LOCAL = (LOCK, STOP)
"""Of a run's names those that are of one machine."""
Say = Callable[[str, str], None]


def bring(path: Path, say: Say, extent: Extent = "all", which: Which = "newest") -> bool:
    """Fetch what a path under the stages stands for; of any other path, and of what no store has, nothing.

    Returns whether it was published by this program. Raises MachineError where the store cannot be read, with the URL
    and the cause.
    """
    if url_of(path) is None:
        return False
    of_run = path.parent.parent if path.parent.name in (CHECKPOINTS, EXPORTS) else None
    for place in (path, of_run):
        if place is None or url_of(place) is None:
            continue
        directory = opened(place)
        commit = directory.newest()
        if commit is None:
            continue
        names = _meant(commit.files, path.relative_to(place), extent, which)
        directory.fetch(place, None if names is None else names.__contains__)
        if not place.is_dir():
            message = f"{directory.url}: a launch on this machine has not ended, whose stage was removed"
            raise MachineError(message, hint="wait until its processes are gone, and run the same command again")
        if (said := _set_aside(directory)) is not None:
            say("store", said)
        return True
    return False


def bring_exactly(path: Path) -> str | None:
    """Make a run's stage what its store has, however new it is, on a machine where another one's stage decides.

    Its own logs stay. Returns what is to be said of what was set aside. Raises MachineError.
    """
    directory = opened(path)
    directory.fetch(path, exact_but=LOGS)
    return _set_aside(directory)


def _set_aside(directory: StoreDirectory) -> str | None:
    at = directory.set_aside
    return None if at is None else f"what {directory.url} does not have of its stage is in {at}"


def bring_inputs(inputs: Mapping[str, Sequence[Path]], say: Say) -> None:
    """Fetch what a recipe reads of stores, by its keys: runs, exports and models, and the objects of its data.

    Raises RecipeError for a place where the store has nothing, MachineError where it cannot be read.
    """
    if not inputs:
        return
    from tuner.stores.objects import fetch_objects

    for key, path in ((key, path) for key, paths in inputs.items() for path in paths):
        if key.startswith("model.") and bring(path, say, "model"):
            continue
        if not fetch_objects(shown(path), lambda text: say("store", text)):
            raise RecipeError(f"{key}: {shown(path)}: the store has nothing there", hint="correct its name")


def publish(path: Path) -> None:
    """Publish a stage, of a run or an export, as its store's newest commit, where anything in it differs.

    An export that lies in its run is published there, next to what the store has of the run; by its launch, where the
    run is in use. Nothing of a path that is no stage. Raises MachineError, by which nothing in the stage is lost.
    """
    if url_of(path) is None:
        return
    of_run = path.parent.name == EXPORTS and is_run(path.parent.parent)
    place = path.parent.parent if of_run else path
    if of_run and is_locked(place / LOCK):
        return
    directory, inside = opened(place), [""]
    if of_run and (commit := directory.newest()) is not None:  # else none of the run is there yet
        inside = [f"{EXPORTS}/{path.name}/"]
        if max(_steps(commit.files, EXPORTS), default=0) <= max(_steps(inside, EXPORTS), default=-1):
            inside.append(f"{EXPORTS}/{LATEST}")
    beside = path.with_name(f".{path.name}.publishing")  # an export's own names are its own
    with hold(place) if is_run(place) else FileLock(beside, wait=False):
        if directory.differs(place, tuple(inside)):
            with directory.lease(place, lock_is_free=True):
                if "" in inside:
                    directory.require_based(place)
                directory.publish(directory.snapshot(place, {}, tuple(inside)))


def not_published(path: Path, error: MachineError) -> MachineError:
    """The error of a stage that could not be published: nothing is lost."""
    again = f"all of it is in {path}; when the store can be written, publish it with: tuner resume {url_of(path)}"
    return MachineError(f"not published: {error.message}", hint=f"{error.hint}      {again}" if error.hint else again)


def opened(path: Path) -> StoreDirectory:
    """The directory in a store that a stage stands for. Raises MachineError without the library."""
    url = url_of(path)
    assert url is not None, "the stage of a directory in a store"
    from tuner.stores.directory import StoreDirectory  # which others do without

    return StoreDirectory.open(url, LOCAL)


def _meant(files: Iterable[str], inside: Path, extent: Extent, which: Which) -> frozenset[str] | None:
    """The names that are fetched of a run's files; None for all."""
    is_part = inside != Path()
    if extent == "all" or (extent == "model" and which == "best" and not is_part):
        return None
    files = list(files)
    if not any(name.startswith(f"{CHECKPOINTS}/") for name in files):
        return None
    newest = max(_steps(files, CHECKPOINTS), default=0) if which == "newest" else which
    chosen = str(inside) if is_part else f"{CHECKPOINTS}/{step_name(int(newest))}" if extent == "model" else None
    left = (f"{CHECKPOINTS}/", f"{EXPORTS}/")
    return frozenset(
        name for name in files if not name.startswith(left) or (chosen is not None and name.startswith(f"{chosen}/"))
    )


def _steps(names: Iterable[str], top: str) -> list[int]:
    """The steps whose checkpoints or exports, below `top`, any of a run's files are of."""
    return [int(found[1]) for name in names if (found := STEP.match(name.partition(f"{top}/")[2]))]
