"""The parts of a launch: asked at each moment, on every launch of a run; the spine names none of them."""

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.syntax import nodes, trees
from tests.contracts.test_import_law import imported_modules
from tests.fixtures import forked, trainings
from tests.fixtures.trainings import launch
from tuner.data.batches import StepBatches
from tuner.errors import RecipeError
from tuner.run.options import LaunchOptions, Resume
from tuner.run.parts.listed import PARTS, parts_of
from tuner.run.parts.part import LaunchRequest, Part, Preflight
from tuner.setup.build import Assembly
from tuner.train.prefetcher import BatchSource, Prefetcher
from tuner.train.progress import Progress

SPINE = ("main", "preflight", "state", "launch", "options")
OWNED = (
    "run.windows", "run.teacher", "run.reference", "run.tasks.windows", "run.tasks.versions",
    "run.bank", "rundir.windows", "rundir.versions", "setup.initial", "setup.teacher", "setup.mock",
    "setup.offloaded", "setup.host_states", "runtime.numa", "runtime.deterministic",
)  # fmt: skip
"""What a part works with."""
RUN = (
    "check", "prepare_data", "starts", "derivation", "after_plan", "around", "agree", "before_build", "after_build",
    "progress_created", "write_facts", "tasks", "before_steps", "source", "state", "facts",
)  # fmt: skip


class Noting(Part):
    """Notes the moments at which it is asked."""

    name = "noting"
    asked: list[str]

    def __getattribute__(self, name: str) -> Any:
        if name in RUN:
            type(self).asked.append(name)
        return super().__getattribute__(name)


class Counting(Part):
    """Keeps a count of its own in checkpoints, and reads it where the run is resumed."""

    found: list[int | None]

    def check(self, request: LaunchRequest) -> None:
        checkpoint = request.status.checkpoint
        type(self).found.append(None if checkpoint is None else checkpoint.state["counted"])

    def state(self, step: int) -> dict[str, int]:
        return {"counted": 7 * step}


Asked = Callable[[type[Part]], None]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Have the recipes but those of a run named another ask for one more part, the last."""
    return lambda kind: monkeypatch.setitem(PARTS, kind, lambda recipe: not recipe.output_dir.endswith("another"))


def test_a_part_is_asked_at_each_moment_in_this_order(tmp_path: Path, asked: Asked) -> None:
    trainings.prepare(tmp_path, 1, layers=1)
    asked(Noting)
    Noting.asked = []
    launch(tmp_path, LaunchOptions(dry_run=True))
    assert list(dict.fromkeys(Noting.asked)) == ["check", "prepare_data", "starts", "derivation", "after_plan"]
    Noting.asked = []
    launch(tmp_path, train__stop_after="1 step")
    assert tuple(dict.fromkeys(Noting.asked)) == RUN
    Noting.asked = []
    launch(tmp_path, train__stop_after="1 step", output_dir="another")
    assert Noting.asked == [], "this recipe does not ask for it"


def test_what_a_part_notes_is_in_the_checkpoint_and_there_for_the_next_launch(tmp_path: Path, asked: Asked) -> None:
    trainings.prepare(tmp_path, 1, layers=1)
    asked(Counting)
    Counting.found = []
    launch(tmp_path, train__stop_after="2 steps")
    launch(tmp_path, "must", train__stop_after="1 step")
    assert Counting.found == [None, 14]


class Drawing(Part):
    """Makes the rows of each step when it comes, from where its own draws are: they follow from no number of a step."""

    waited_s = 0.0

    def progress_created(self, ready: Preflight, assembly: Assembly, progress: Progress) -> None:
        checkpoint = ready.status.checkpoint
        self._batches, self._state = assembly.batches, 1 if checkpoint is None else checkpoint.state["drawn"]

    def source(self, prepared: Prefetcher) -> BatchSource:
        return self

    def step(self, index: int) -> StepBatches:
        self._state = self._state * 48271 % (2**31 - 1)
        return self._batches.step(self._state % trainings.STEPS_PER_EPOCH)

    def state(self, step: int) -> dict[str, int]:
        return {"drawn": self._state}


def test_rows_that_a_part_makes_continue_where_they_were(tmp_path: Path, asked: Asked) -> None:
    trainings.prepare(tmp_path, 1, layers=1)

    def outcome(run: str, resume: Resume = "never") -> dict[str, Any]:
        return trainings.outcome(launch(tmp_path, resume, output_dir=run, train__duration="8 steps").run_dir)

    prepared = outcome("prepared")
    asked(Drawing)
    unbroken = outcome("unbroken")
    launch(tmp_path, output_dir="broken", train__duration="8 steps", train__stop_after="5 steps")
    assert unbroken == outcome("broken", "must") != prepared
    assert len(unbroken["log"]) == 8


def test_a_part_can_refuse_before_anything_is_built(tmp_path: Path, asked: Asked) -> None:
    trainings.prepare(tmp_path, 1, layers=1)

    class Refusing(Counting):
        def check(self, request: LaunchRequest) -> None:
            raise RecipeError("not like this")

    asked(Refusing)
    with pytest.raises(RecipeError, match="not like this"):
        launch(tmp_path)
    assert not (tmp_path / "runs").exists()


def test_the_spine_of_a_launch_names_no_part() -> None:
    known = trees()
    assert {f"tuner.run.{name}" for name in SPINE} <= set(known)
    for name in SPINE:
        imported = imported_modules(known[f"tuner.run.{name}"], known)
        parts = {module for module in imported if module.startswith("tuner.run.parts")}
        assert parts <= {"tuner.run.parts", "tuner.run.parts.listed", "tuner.run.parts.part"}, name
        owned = {each for each in imported if any(f"{each}.".startswith(f"tuner.{own}.") for own in OWNED)}
        assert owned == set(), name


def test_windows_are_deleted_with_their_files_and_two_lines() -> None:
    """The key of the recipe and the line of PARTS, with their imports: what divides data is asked of no one else."""
    known = trees()
    own = {name for name in known if "windows" in name.split(".")}
    outside = set(known) - own
    assert {name for name in outside if imported_modules(known[name], known) & own} == {
        "tuner.config.recipe", "tuner.run.parts.listed"
    }  # fmt: skip
    read = {name for name in outside for node in nodes(known[name], ast.Attribute) if node.attr == "windows"}
    assert read == {"tuner.evals.task", "tuner.evals.harness", "tuner.run.parts.listed"}  # of a text, and the line


def test_every_part_has_a_file_of_its_own_and_is_listed() -> None:
    files = {name for name in trees() if name.startswith("tuner.run.parts.")}
    listed = [part.__module__ for part in PARTS]
    assert sorted(listed) == sorted(files - {"tuner.run.parts.listed", "tuner.run.parts.part"})


def test_a_launch_loads_nothing_of_the_parts_that_it_has_not(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("model: {name_or_path: m}\ndata: {train: rows.jsonl}\n")
    recipe = trainings.loaded(tmp_path).recipe
    kept = {type(part).__name__ for part in parts_of(recipe)}
    assert kept == {"OwnCode", "Kernels", "Reference", "Offload", "MockBatch"}
    unused = [f"tuner.{name}" for name in OWNED if name != "run.reference"]
    code = f"{forked.LOADED_AGAIN}; import tuner.run.main; print([name for name in {unused!r} if name in sys.modules])"
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
