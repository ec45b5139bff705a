"""Gradients by rows are those of torch's own embedding to the bit, of the rows that a step touches; what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from tests.model.tiny import family_model
from tuner.errors import RecipeError
from tuner.model.touched_rows import ByRows, TouchedRows, by_rows, row_tables

V, WIDTH, PADDING = 11, 5, 3
MOST = 8
"""Tokens of a step."""
PARTS = st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=4), min_size=1, max_size=2)


class Scaled(nn.Embedding):
    """As Gemma's: a forward of its own around torch's."""

    embed_scale = 0.37

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.embed_scale


def table(kind: type[nn.Embedding] = Scaled) -> nn.Embedding:
    made = kind(V, WIDTH, padding_idx=PADDING)
    made.weight.data.copy_(torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(1)))
    return made


def mask(parts: list[list[int]]) -> torch.Tensor:
    present = torch.zeros(V, dtype=torch.uint8)
    present[[i for part in parts for i in part]] = 1
    present[PADDING] = 0
    return present


@given(PARTS)
@settings(max_examples=40, deadline=None)
def test_the_sum_of_each_row_is_torchs_own_to_the_bit(parts: list[list[int]]) -> None:
    plain, ours = table(), table()
    touched = TouchedRows(ours, MOST)
    vars(ours)["forward"] = ByRows(touched)
    touched.begin(mask(parts))
    for part in parts:
        ids = torch.tensor([part])
        expected, found = plain(ids), ours(ids)
        assert torch.equal(found, expected)
        (expected**3).sum().backward()
        (found**3).sum().backward()
    assert ours.weight.grad is None and plain.weight.grad is not None
    assert touched.rows is not None and touched.gradient is not None
    rows = sorted({i for part in parts for i in part} - {PADDING})
    assert touched.rows.tolist() == rows + [V] * (MOST - len(rows)), "in their order, empty slots last"
    assert touched.gradient.shape == (MOST, WIDTH), "never as large as the table"
    assert torch.equal(touched.gradient[: len(rows)], plain.weight.grad[rows])
    assert not touched.gradient[len(rows) :].any()
    touched.drop()
    assert not touched.indices and touched.gradient is None


@given(PARTS, st.integers(0, V), st.integers(0, V))
@settings(max_examples=40, deadline=None)
def test_a_process_has_the_rows_that_it_holds(parts: list[list[int]], first: int, count: int) -> None:
    count = min(count, V - first)
    touched = TouchedRows(table(), MOST)
    touched.hold(first, count)
    touched.begin(mask(parts))
    ids = torch.tensor([i for part in parts for i in part])
    upstream = torch.randn(len(ids), WIDTH)
    places = torch.where((ids >= first) & (ids < first + count) & (ids != PADDING), ids - first, count)
    touched.add(places, upstream)
    whole = torch.zeros(V, WIDTH).index_add_(0, ids, upstream)
    assert touched.rows is not None and touched.gradient is not None
    own = [row for row in sorted(set(ids.tolist()) - {PADDING}) if first <= row < first + count]
    assert touched.rows.tolist() == [row - first for row in own] + [count] * (touched.room - len(own))
    torch.testing.assert_close(touched.gradient[: len(own)], whole[own].view(len(own), WIDTH))


def test_rows_have_gradients_in_a_step_alone() -> None:
    ours = table()
    vars(ours)["forward"] = ByRows(TouchedRows(ours, MOST))
    with torch.no_grad():
        ours(torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="none has begun"):
        ours(torch.tensor([1, 2])).sum().backward()


def refused(model: PreTrainedModel, *patterns: str) -> str:
    with pytest.raises(RecipeError) as caught:
        row_tables(model, patterns)
    return caught.value.message


class Other(nn.Embedding):
    """Its forward may be anything."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.weight[input]


def test_what_is_no_embedding_of_its_own_is_refused_with_the_reason() -> None:
    model = family_model("llama", tied=False)
    assert list(row_tables(model, ["embed_tokens"])) == ["model.embed_tokens.weight"]
    assert "'embed' matches nothing in this model" in refused(model, "embed")
    assert "lm_head.weight is no embedding of input tokens: every step touches all" in refused(model, "*head*")
    assert "output layer too (tie_word_embeddings)" in refused(family_model("llama", tied=True), "embed_tokens")
    model.get_input_embeddings().weight.requires_grad_(False)
    assert "matches nothing" in refused(model, "embed_tokens")
    model.set_input_embeddings(Other(97, 32))
    assert "is in a Other that does more than look up" in refused(model, "embed_tokens")


def test_evaluation_looks_up_as_before() -> None:
    model, plain = family_model("gemma3", tied=False), family_model("gemma3", tied=False)
    by_rows(model, ["embed_tokens"], 64)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
