"""The rules of a ladder: OLMo-core's rates, marks and batches, and where a rule has no steps to give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.tables import cases
from tuner.config.ladder import LadderSection, PowerLaw, short_count
from tuner.errors import RecipeError
from tuner.ladder.rules import beta2, peak_lr, step_plan, target_batch_tokens
from tuner.ladder.rungs import micro_tokens_of, solve

RATES = {60: 0.002859, 100: 0.002411, 190: 0.001947, 370: 0.001559, 1000: 0.001119, 7000: 0.000585, 13000: 0.000476}


@pytest.mark.parametrize(("millions", "rate"), RATES.items())
def test_rates_are_those_of_olmo_core(millions: int, rate: float) -> None:
    assert peak_lr(LadderSection(), millions * 10**6) == pytest.approx(rate, abs=5e-7)


def test_marks_of_190m_are_those_of_olmo_core() -> None:
    """Ends of the periods, and before their decays; half a multiple first, then doubled."""
    found = step_plan(LadderSection(), 190_000_000, 524288)
    assert found.ends == (3624, 7248, 14496, 28992)
    assert found.decays == (3261, 6885, 13771, 27542)
    assert found.periods == (3624, 3624, 7248, 14496) and found.total_steps == 28992
    assert found.warmup_steps == 362
    marks = found.marks((0.5, 1.0, 2.0, 4.0), 524288)
    assert [(mark.multiple, mark.phase, mark.step) for mark in marks[:3]] == [
        (0.5, "pre-decay", 3261), (0.5, "post-decay", 3624), (1.0, "pre-decay", 6885),
    ]  # fmt: skip
    assert marks[-1].tokens == 28992 * 524288


def test_the_rate_falls_between_the_marks() -> None:
    """The schedule that a rung gets begins to fall at the first mark of a period, and has fallen at the second."""
    import numpy as np

    from tuner.config.numbers import Duration
    from tuner.config.schedules import WsdPeriodsSchedule
    from tuner.train.plan import build_schedule, plan_steps

    found = step_plan(LadderSection(), 190_000_000, 524288)
    section = WsdPeriodsSchedule(
        periods=tuple(Duration.parse(f"{steps} steps") for steps in found.periods), decay=Duration.parse("10%")
    )
    plan = plan_steps(Duration.parse(f"{found.total_steps} steps"), np.full(4, 8192), 64)
    schedule = build_schedule(section, plan, np.full(4, 8192))
    for before, end in zip(found.decays, found.ends, strict=True):
        assert schedule.factor(before) == 1.0 and schedule.factor(before + 1) < 1.0
        assert schedule.factor(end) == 0.0


def test_beta2_is_smaller_from_a_batch_on() -> None:
    section = LadderSection()
    assert [beta2(section, tokens) for tokens in (524287, 524288)] == [0.99, 0.95]
    assert beta2(section.model_copy(update={"beta2": "recipe"}), 1) is None
    own = section.model_copy(update={"lr": "recipe", "batch_tokens": "recipe"})
    assert peak_lr(own, 10**6) is None and target_batch_tokens(own, 10**6, of_recipe=4096) == 4096


def test_rules_are_keys() -> None:
    section = LadderSection.model_validate(
        {"sizes": ["3M"], "tokens": "2 * N", "multiples": [1, 3], "decay": "20%", "warmup_tokens": "600K"}
    )
    found = step_plan(section, 3_000_000, 30_000)
    assert (found.ends, found.decays, found.warmup_steps) == ((200, 600), (160, 520), 20)


def test_a_period_without_steps_is_refused() -> None:
    with pytest.raises(RecipeError, match="100,000 parameters have no steps for the period that ends at 0.5"):
        step_plan(LadderSection(), 100_000, 2_000_000)


@pytest.mark.parametrize(("text", "parameters", "number", "written"), cases(__file__, "laws_are_read_and_written"))
def test_laws_are_read_and_written(text: str | int, parameters: int, number: float, written: str) -> None:
    law = PowerLaw.parse(text)
    assert law.of(parameters) == pytest.approx(number)
    assert str(law) == written and PowerLaw.parse(str(law)) == law


@pytest.mark.parametrize("text", ["", "N^2", "20 N * N", "0 * N", "-3", "(N / 0)^2", "2 * (N / 1M)^(1/0)", "import os"])
def test_what_is_no_law_is_refused(text: str) -> None:
    with pytest.raises((ValueError, ZeroDivisionError)):
        PowerLaw.parse(text)


def test_counts_are_short() -> None:
    counts = [999, 1000, 104_832, 999_600, 190_000_000, 1_340_000_000]
    assert [short_count(count) for count in counts] == ["999", "1K", "105K", "1M", "190M", "1.34B"]


ROW = 8192


@pytest.mark.parametrize(
    "golden", cases(__file__, "batches_are_those_of_olmo_core"), ids=lambda golden: f"{golden[0] // 10**6}M"
)
def test_batches_are_those_of_olmo_core(golden: tuple[int, int, int, int, int, int, int, float]) -> None:
    parameters, least, target, micro, tokens, processes, accumulation, off = golden
    aimed = target_batch_tokens(LadderSection(), parameters, of_recipe=0)
    batch = solve(aimed, micro_tokens_of(parameters, ROW), ROW, least, 64)
    assert (aimed, batch.micro_tokens, batch.tokens) == (target, micro, tokens)
    assert (batch.processes, batch.accumulation, round(100 * batch.off, 1)) == (processes, accumulation, off)
    assert (batch.warning is not None) == (off > 10)
    if batch.warning is not None:
        assert f"{off} %" in batch.warning and f"{target:,}" in batch.warning


@given(
    target=st.integers(1, 10**8),
    row=st.integers(1, 2**15),
    rows=st.integers(1, 64),
    least=st.integers(1, 64),
    more=st.integers(0, 512),
)
def test_a_solved_batch_divides_and_is_near(target: int, row: int, rows: int, least: int, more: int) -> None:
    batch = solve(target, rows * row, row, least, least + more)
    assert batch.micro_tokens % row == 0 and 0 < batch.micro_tokens <= rows * row
    assert batch.tokens % (batch.micro_tokens * batch.processes) == 0
    assert least <= batch.processes <= least + more and batch.processes % least == 0
    assert batch.accumulation >= 1
    unit = batch.micro_tokens * batch.processes
    assert batch.tokens == unit or abs(batch.tokens - target) <= unit, "no further off than what one more forward adds"
    assert batch.off == abs(batch.tokens - target) / target


@given(target=st.integers(1, 10**7), least=st.integers(1, 16), more=st.integers(0, 64))
def test_more_processes_never_go_without_work(target: int, least: int, more: int) -> None:
    batch = solve(target, 4096, 1024, least, least + more)
    assert batch.processes == least or batch.micro_tokens * (batch.processes - least) < target


def test_what_cannot_divide_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(RecipeError, match="not whole rows of 8,192") as found:
        solve(500_000, 20_000, ROW, 1, 8)
    assert found.value.hint == "write ladder.micro_batch_tokens: 16384"
    with pytest.raises(RecipeError, match="at most 8 processes, and at least 32"):
        solve(500_000, ROW, ROW, 32, 8)


def test_forwards_are_whole_rows_on_any_row() -> None:
    assert micro_tokens_of(60_000_000, 3000) == 15000
    assert micro_tokens_of(13_000_000_000, 32768) == 32768, "a row is never cut"
