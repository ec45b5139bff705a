"""The solver of batches: OLMo-core's own figures, and that whatever it gives divides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.tables import cases
from tuner.config.ladder import LadderSection
from tuner.errors import RecipeError
from tuner.ladder.rules import target_batch_tokens
from tuner.ladder.rungs import micro_tokens_of, solve

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
