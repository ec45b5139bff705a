"""The run directory: what it holds, what is written down about its launches, and the recipe file that they came from.

A run resumes with its own copy of the recipe: whether the file has changed since is only said.
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.checkpoint.manifest import read_manifest, step_dirs
from tuner.config.load import LoadedRecipe, flatten, load_recipe
from tuner.config.yaml import Problems, read_yaml
from tuner.errors import DataError, RecipeError, TunerError
from tuner.rundir import layout
from tuner.rundir.layout import require_no_links
from tuner.rundir.run_json import SCHEMA, is_run, other_contents, read_record, record_is_gone, utc_now
from tuner.runtime.environment import command_line, environment, versions
from tuner.runtime.files import set_aside, sweep, unfinished, write_atomic, write_json
from tuner.runtime.git import SourceTree, source_tree


@dataclass(frozen=True)
class RunDir:
    """Paths of a run directory."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Committed checkpoints, `step-N` each."""
        return self.path / layout.CHECKPOINTS

    @property
    def logs(self) -> Path:
        """`rankN.log` of each process: its messages, with the time."""
        return self.path / layout.LOGS

    @property
    def record(self) -> Path:
        """`run.json`: status, and of each launch its start and end, command, environment, versions and source trees."""
        return self.path / layout.RECORD

    @property
    def resolved_recipe(self) -> Path:
        """The recipe without `auto`, with absolute paths."""
        return self.path / layout.RESOLVED_RECIPE

    def read_record(self) -> dict[str, Any] | None:
        """The run's record, or what its checkpoints say where it is missing; None where no run has started.

        Raises RecipeError for a directory of something else, DataError for one with links among its names.
        """
        if not self.path.exists():
            return None
        if not self.path.is_dir():
            raise RecipeError(f"{self.path} is not a directory", hint="choose another output_dir")
        require_no_links(self.path)
        if not self.record.is_file() and not record_is_gone(self.path):
            others = other_contents(self.path)
            if not others:
                return None
            raise RecipeError(
                f"{self.path} holds something else than a run ({min(others)})",
                hint="choose another name or output_dir; nothing was changed",
            )
        return read_record(self.path)

    def sweep(self) -> None:
        """Remove what killed launches left unfinished. Call it under the run's lock. Raises MachineError."""
        for directory in self._written_to():
            sweep(directory)

    def set_aside(self, after: int, run_id: str) -> None:
        """Rename the checkpoints after a step, none of which is valid: the steps are taken again from there.

        Call it under the run's lock. Raises MachineError.
        """
        for step, path in step_dirs(self.checkpoints):
            if step > after:
                set_aside(path, run_id)

    def leftovers(self) -> list[Path]:
        """What `sweep` would remove."""
        return [path for directory in self._written_to() for path in unfinished(directory)]

    def _written_to(self) -> list[Path]:
        launches = sorted((self.path / layout.LAUNCHES).glob("*"))
        return [self.path, self.checkpoints, self.path / layout.TOKENIZER, self.path / layout.MODEL_CONFIG, *launches]

    def recipe(self, record: Mapping[str, Any] | None) -> LoadedRecipe | None:
        """The recipe that its next launch resumes with; None where none was written down yet.

        After a reset that is the one in its record, which changes in one piece with what was reset; where its file is
        gone, the one that its newest checkpoint was saved with.
        """
        if record is not None and "recipe" in record:
            return replace(load_recipe(record["recipe"]), path=self.resolved_recipe)
        if self.resolved_recipe.is_file():
            return load_recipe(self.resolved_recipe)
        saved = self._recipe_of_checkpoint()
        return None if record is None or saved is None else replace(load_recipe(saved), path=self.resolved_recipe)

    def keeps_recipe(self, record: Mapping[str, Any] | None) -> bool:
        """Whether there is anything that its next launch resumes with."""
        return "recipe" in (record or {}) or self.resolved_recipe.is_file() or self._recipe_of_checkpoint() is not None

    def _recipe_of_checkpoint(self) -> dict[str, Any] | None:
        for _, path in step_dirs(self.checkpoints):
            with suppress(DataError):
                recipe = read_manifest(path, verify=True)["meta"].get("recipe")
                if isinstance(recipe, dict):
                    return recipe
        return None

    def begin(
        self, record: dict[str, Any] | None, launch_facts: Mapping[str, Any], work_dirs: Sequence[Path],
        changed: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Write down the start of a launch, and what it changed in the record itself; returns the record.

        Its `git` is the first working tree that holds one of `work_dirs`: the user's own. What differs there from the
        commit goes into `launches/N/git.diff`.
        """
        record = record or {"schema": SCHEMA, "status": "running", "run_id": os.urandom(8).hex(), "launches": []}
        record |= {"status": "running", **(changed or {})}
        record.pop("metrics", None)
        facts = {"started": utc_now(), "command": command_line(), "environment": environment(), "versions": versions()}
        git = self._keep_source(work_dirs, len(record["launches"]) + 1)
        record["launches"].append({**facts, "git": git, **launch_facts})
        write_json(self.record, record)
        return record

    def note_start(self, record: dict[str, Any], seconds: Mapping[str, float]) -> None:
        """Write down what a launch did before its first step, by seconds."""
        record["launches"][-1]["start_s"] = dict(seconds)
        write_json(self.record, record)

    def end(self, record: dict[str, Any], status: str, step: int, saved_step: int | None, why: str | None) -> None:
        """Write down how a launch ended, after which step, and of which step its newest checkpoint is."""
        record["launches"][-1]["ended"] = utc_now()
        self._note_end(record, status, step, saved_step, why)

    def close(self, record: dict[str, Any], step: int) -> None:
        """Write down that a run is finished whose newest launch was killed before it could."""
        self._note_end(record, "finished", step, step, "killed after its last save")

    def _note_end(
        self, record: dict[str, Any], status: str, step: int, saved_step: int | None, why: str | None
    ) -> None:
        record["status"] = status
        record["launches"][-1] |= {"status": status, "step": step, "saved_step": saved_step, "why": why}
        write_json(self.record, record)

    def _keep_source(self, work_dirs: Sequence[Path], launch: int) -> dict[str, Any] | None:
        """The facts of the user's source tree, with its diff in a file; None where there is none."""
        trees = (source_tree(directory) for directory in dict.fromkeys(work_dirs))
        tree: SourceTree | None = next((tree for tree in trees if tree is not None), None)
        if tree is None:
            return None
        kept: str | None = None
        if tree.diff:
            kept = f"{layout.LAUNCHES}/{launch}/{layout.SOURCE_DIFF}"
            (self.path / kept).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / kept, tree.diff, 0o600)  # it may hold what was not meant to be shared
        return {**tree.facts(), "diff": kept}

    def write_recipe(self, text: str, resolved: str) -> None:
        """Keep the recipe as given and as resolved."""
        write_atomic(self.path / layout.RECIPE, text.encode())
        write_atomic(self.resolved_recipe, resolved.encode())


FILE, SHA256 = "recipe_file", "recipe_sha256"
"""What a launch notes in the record of the file that its recipe was read from."""
SHOWN_KEYS = 3


def noted(loaded: LoadedRecipe, run_dir: Path) -> dict[str, str]:
    """What the record notes of a launch's recipe file; nothing of a mapping's, or of the run's own copy."""
    path = loaded.path
    if path is None or path.absolute().is_relative_to(run_dir.absolute()):
        return {}
    return {FILE: str(path.absolute()), SHA256: hashlib.sha256(loaded.text.encode()).hexdigest()}


def origin(record: Mapping[str, Any]) -> Path | None:
    """The recipe file of the newest launch that was given one, whether it is still there or not."""
    launches = [launch for launch in record["launches"] if isinstance(launch.get(FILE), str)]
    return Path(launches[-1][FILE]) if launches else None


def changed_keys(run_dir: Path, record: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The keys whose values a run's recipe file has changed since; None where it has not, or is gone or unreadable.

    Empty where they cannot be told: the run's copy is another launch's, or one of the two is no recipe any more.
    """
    file = origin(record)
    launches = [launch for launch in record["launches"] if FILE in launch]
    try:
        text = None if file is None else file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    if text is None or hashlib.sha256(text.encode()).hexdigest() == launches[-1].get(SHA256):
        return None
    copy = run_dir / layout.RECIPE
    if not copy.is_file() or hashlib.sha256(copy.read_bytes()).hexdigest() != launches[-1].get(SHA256):
        return ()
    before, after = _values(copy.read_bytes().decode()), _values(text)
    if before is None or after is None:
        return ()
    changed = tuple(sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key)))
    return changed or None  # a comment


def warn_of_changed_file(run_dir: Path, warn: Callable[[str], None]) -> None:
    """Warn where a run is resumed with its own recipe although the file that it came from says something else."""
    try:
        record = read_record(run_dir) if is_run(run_dir) else None
        keys = None if record is None else changed_keys(run_dir, record)
    except TunerError:
        return  # whoever needs the record reports what is wrong with it
    file = None if record is None else origin(record)
    if file is None or keys is None:
        return
    more = f" and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
    what = f" ({', '.join(keys[:SHOWN_KEYS])}{more})" if keys else ""
    warn(
        f"{file} has changed since the run was started{what}: the run resumes with its own recipe. To apply the "
        f"changed file: tuner train {file} --resume must (it names the --reset needed), or {another(file)} for another "
        "run"
    )


def another(recipe: Path) -> str:
    """The flag that makes another run of a recipe file: a name, unless the file itself says where its run goes."""
    try:
        text = recipe.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    says = re.search(r"^\s*output_dir\s*:", text, flags=re.MULTILINE)
    return "--output_dir NEW-DIRECTORY" if says else "--name NEW-NAME"


def _values(text: str) -> dict[str, Any] | None:
    problems = Problems()
    tree = read_yaml(text, "recipe.yaml", Path("/"), problems)
    return None if problems.found or not isinstance(tree.value, dict) else flatten(tree.plain())
