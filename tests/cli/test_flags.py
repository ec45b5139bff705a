"""Flags are split off before Typer reads the line, whatever their order, and are named and explained."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.fixtures.tables import cases
from tuner.cli.app import split
from tuner.cli.flags import flags_app, print_flags
from tuner.config.fields import fields


@pytest.mark.parametrize(("words", "rest", "flags"), cases(__file__, "splitting"))
def test_splitting(words: list[str], rest: list[str], flags: list[list[str | None]]) -> None:
    assert split(words, takes_recipe=True) == (rest, [(key, value) for key, value in flags])


def test_only_commands_with_a_recipe_take_its_top_keys() -> None:
    assert split(["generate", "--seed", "3"], takes_recipe=False) == (["generate", "--seed", "3"], [])


@given(st.lists(st.sampled_from(["train", "r.yaml", "-v", "--json", "--debug"]), max_size=6), st.data())
def test_flags_may_stand_anywhere(words: list[str], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(words)))
    line = [*words[:place], "--optimizer.lr", "1e-5", *words[place:]]
    assert split(line, takes_recipe=True) == (words, [("optimizer.lr", "1e-5")])


def test_every_key_has_a_flag_with_its_sentence_and_default() -> None:
    stream = io.StringIO()
    print_flags(Console(file=stream, width=600, color_system=None))
    text = stream.getvalue()
    for field in fields().values():
        if field.key == "version":
            continue
        line = next(line for line in text.splitlines() if f"--{field.key} " in line)
        assert field.sentence in line, field.key
        assert field.required or f"[default: {field.default_text}]" in line, field.key


def test_every_key_has_a_sentence() -> None:
    for field in fields().values():
        assert field.sentence.endswith("."), field.key
        assert field.allowed, field.key


def test_cyclopts_knows_the_names() -> None:
    names = {name for argument in flags_app().assemble_argument_collection() for name in argument.names}
    assert names == {f"--{key}" for key in fields() if key != "version"}
