"""How long a run still takes: counted out step by step, and weighed by what was measured."""

from hypothesis import given
from hypothesis import strategies as st

from tuner.run.tasks.console import Due, TimeLeft, due_steps
from tuner.train.plan import Cadence

PERIODS = st.lists(st.integers(1, 12), max_size=3).map(tuple)


@given(periods=PERIODS, after=st.integers(0, 60), last=st.integers(0, 60))
def test_due_steps_are_those_of_the_cadence(periods: tuple[int, ...], after: int, last: int) -> None:
    cadence = Cadence(periods)
    assert due_steps(periods, after, last) == sum(cadence.due_at(step) for step in range(after + 1, last + 1))


@given(
    evaluation=PERIODS,
    points=st.frozensets(st.integers(1, 20), max_size=3),
    saving=PERIODS,
    at_end=st.booleans(),
    always=st.booleans(),
    step=st.integers(0, 20),
)
def test_what_is_due_is_what_the_tasks_do(
    evaluation: tuple[int, ...], points: frozenset[int], saving: tuple[int, ...], at_end: bool, always: bool, step: int
) -> None:
    last, marks = 20, frozenset({7, 20})
    due = Due(last, Cadence(evaluation, at_steps=points), at_end, always, Cadence(saving), marks, at_end)
    evaluated = [s for s in range(step + 1, last + 1) if due.evaluation.due_at(s) or (s == last and at_end)]
    sampled = evaluated if always else [s for s in evaluated if s == last]
    saved = [s for s in range(step + 1, last) if due.saving.due_at(s) or s in marks]
    found = due.after(step)
    assert (found["evaluation"], found["samples"]) == (len(evaluated), len(sampled))
    assert found["save"] == len(saved) + (step < last and at_end)


def test_seconds_are_those_of_steps_and_of_what_is_between_them() -> None:
    due = Due(10, Cadence((5,)), True, False, Cadence((5,), 100.0), frozenset(), True)
    left = TimeLeft(due)
    assert left.seconds(0) is None
    for seconds in (9.0, 2.0, 4.0):  # the first step of a launch warms up
        left.stepped(seconds)
    assert left.seconds(0) == 30.0
    left.took |= {"evaluation": 7.0, "samples": 11.0, "save": 13.0}
    # Two evaluations, one with samples, the saves of steps 5 and 10; the clock asks for none within 55 s.
    assert left.seconds(0) == 30 + 2 * 7 + 11 + 2 * 13
    assert left.seconds(10) == 0
    left.took["evaluation"] = 70.0
    assert left.seconds(0) == 30 + 2 * 70 + 11 + 3 * 13  # of 181 s one save is the clock's
