"""A part of the campaign that damages finished runs: commands name what is damaged, and what they say to type helps."""

import pytest

from tests.fixtures.damaged import ALL, LAST, Place
from tools import damaged_runs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(tmp_path_factory.mktemp("damaged"))
    made.set_up()
    return made


@pytest.mark.parametrize(
    ("state", "command"),
    [
        ("bit flipped", "export"),
        pytest.param("directory gone", "eval", marks=pytest.mark.slow),
        pytest.param("all bits flipped", "generate", marks=pytest.mark.slow),
        pytest.param("all checkpoints gone", "export", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_last_checkpoint_is_named_and_the_ways_on_work(place: Place, state: str, command: str) -> None:
    place.damage([state])
    said = place.ask(command)
    assert said.code == 3
    assert f"checkpoints/step-{LAST}" in said.last_line
    assert damaged_runs.ways_on(place, [state], command, said) == []
    assert place.content() == place.sha256


@pytest.mark.slow("state1")
@pytest.mark.parametrize(
    "state", [pytest.param(("record gone",), marks=pytest.mark.slow), ("directory gone", "record says running")]
)
def test_a_run_is_what_its_checkpoints_tell(place: Place, state: tuple[str, ...]) -> None:
    place.damage(state)
    assert place.ask("export").code == 0
    assert damaged_runs.judge_resume(place, state, place.ask("resume")) == []


def test_there_are_all_ways_to_damage_a_run() -> None:
    states = damaged_runs.states()
    assert len(states) == len(set(states)) >= 20
    assert {name for state in states for name in state} == set(ALL)
