"""Schedules of the user's own: their factors are used, drawn, and checked."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines
from tuner.cli.work.schedule import drawing, planned_schedule
from tuner.config.load import Override, load_recipe
from tuner.config.numbers import Duration
from tuner.config.recipe import Recipe
from tuner.config.schedules import CustomSchedule
from tuner.errors import PluginError, RecipeError
from tuner.train.plan import build_schedule, plan_steps

CODE = Path(__file__).with_name("own_schedules.py").read_text(encoding="utf-8")
ROWS = np.full(40, 100, dtype=np.int64)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path


def factors(directory: Path, name: str, total: int = 100, **options: Any) -> list[float]:
    section = CustomSchedule(use=f"{directory}/own.py:{name}", options=options)
    found = build_schedule(section, plan_steps(Duration.parse(f"{total} steps"), ROWS, 4), ROWS)
    return [found.factor(index) for index in range(total + 1)]


def test_functions_and_classes(workplace: Path) -> None:
    found = factors(workplace, "triangle", top=0.2)
    assert [found[i] for i in (0, 10, 20, 60, 100)] == [0, 0.5, 1, 0.5, 0]
    assert factors(workplace, "Steps", every=40)[39::20] == [1, 0.5, 0.5, 0.25]


def test_a_run_follows_it_from_the_first_step_on(workplace: Path) -> None:
    trainings.prepare(workplace, 1)
    flags = {"schedule__kind": "custom", "schedule__use": "own.py:triangle", "schedule__options": "{top: 0.5}"}
    flags |= {"train__duration": "6 steps", "train__global_batch_size": "2", "train__micro_batch_size": "2"}
    found = [line["lr"] for line in lines(launch(workplace, **flags).run_dir)]
    assert found == pytest.approx([1e-3 * min(i, 6 - i) / 3 for i in range(1, 7)])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("constant", {"value": 1.5}, "gave 1.5 at index 0, not a factor from 0 to 1"),
        ("constant", {"value": float("nan")}, "gave nan at index 0"),
        ("constant", {"value": "fast"}, "failed at index 0: ValueError"),
        ("stateful", {}, "at index 100"),
        ("ends", {}, r"failed at index 3: IndexError: .*own.py:\d+"),
        ("nothing", {}, "gave a NoneType, not a function of the index"),
        ("broken", {}, "could not be built: KeyError"),
        ("triangle", {"topp": 1}, "no option topp"),
        ("Steps", {}, "missing a required argument: 'every'"),
        ("round", {}, "has no round"),
    ],
)
def test_mistakes_are_named(workplace: Path, name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        factors(workplace, name, **options)


def test_a_schedule_that_does_not_fit_costs_no_preparation(workplace: Path) -> None:
    trainings.prepare(workplace, 1)
    with pytest.raises(PluginError, match="no option topp"):
        launch(workplace, schedule__kind="custom", schedule__use="own.py:triangle", schedule__options="{topp: 1}")
    assert not (workplace / "runs").exists()


def test_it_is_drawn(workplace: Path) -> None:
    trainings.prepare(workplace, 1)

    def recipe(duration: str) -> Recipe:
        flags = {"schedule.kind": "custom", "schedule.use": "own.py:triangle", "train.duration": duration}
        return load_recipe(workplace / "r.yaml", [Override(*item) for item in flags.items()], cwd=workplace).recipe

    found, _ = planned_schedule(recipe("200 steps"))
    lines = drawing(recipe("200 steps"), found, 80).splitlines()
    assert lines[1].lstrip().startswith("9.90e-04 ┤")
    assert lines[-1].split() == ["200", "0", "last", "step"]
    with pytest.raises(RecipeError, match="needs the number of steps, which is not known"):
        planned_schedule(recipe("3 epochs"))
