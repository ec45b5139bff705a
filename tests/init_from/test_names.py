"""Globs of names, what they capture, and names in few lines."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures import tables
from tuner.init_from.match import brief, fits, nearest, renamed

PARTS = st.lists(st.text("abc_", min_size=1, max_size=4), min_size=1, max_size=4).map(".".join)


@pytest.mark.parametrize(("pattern", "name", "is_meant"), tables.cases(__file__, "a_glob_means_names"))
def test_a_glob_means_names(pattern: str, name: str, is_meant: bool) -> None:
    assert fits(pattern, name) is is_meant


@pytest.mark.parametrize(("name", "wanted"), tables.cases(__file__, "a_name_becomes_another"))
def test_a_name_becomes_another(name: str, wanted: str) -> None:
    table = {"transformer.h.*.attn.**": "model.layers.{1}.self_attn.{2}", "transformer.h.*.*.*": "norms/{1}/{3}"}
    assert renamed(name, table) == wanted


@given(PARTS, PARTS)
@settings(max_examples=30)
def test_two_wildcards_take_a_name_apart_and_put_it_together(front: str, back: str) -> None:
    assert renamed(f"{front}.mid.{back}", {"**.mid.**": "{2}.mid.{1}"}) == f"{back}.mid.{front}"


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["a.weight", "b.weight"])), min_size=1, unique=True))
@settings(max_examples=30)
def test_few_lines_hold_every_number(names: list[tuple[int, str]]) -> None:
    lines = brief([f"layers.{number}.{end}" for number, end in names])
    assert len(lines) == len({end for _, end in names})
    for line, end in zip(lines, dict.fromkeys(end for _, end in names), strict=True):
        numbers = sorted({number for number, other in names if other == end})
        shown = re.fullmatch(rf"layers\.(\{{(.*)\}}|\d+)\.{re.escape(end)}", line)
        assert shown is not None
        assert str(numbers[0]) in shown[1]


def test_few_lines_say_what_is_not_all_there() -> None:
    assert brief(["l.0.e.0.w", "l.0.e.1.w", "l.1.e.0.w"]) == ["l.*.e.*.w (3 of them)"]
    assert brief(["l.0.e.0.w", "l.0.e.1.w"]) == ["l.0.e.{0-1}.w"]
    assert brief(["norm.weight"]) == ["norm.weight"]


def test_the_nearest_come_first() -> None:
    known = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
    assert nearest("model.layers.1.mlp.upproj.weight", known)[0] == known[1]
    assert nearest("qqqqqqq", known) == []


def test_those_that_are_as_near_as_the_third_are_named_too() -> None:
    layers = [f"model.layers.1.self_attn.{one}_proj.weight" for one in ("q", "k", "v", "o")]
    known = [*layers, "model.layers.1.mlp.up_proj.weight"]
    assert set(nearest("model.layers.1.self_attn._proj.weight", known)) == {*layers}
    assert len(nearest("proj.weight", [f"{letter}_proj.weight" for letter in "abcdefgh"])) == 6
