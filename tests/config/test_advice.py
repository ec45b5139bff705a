"""What errors say about keys and values that are not ours."""

import re
from typing import Any

import pytest

from tests.fixtures.tables import cases
from tuner.config.advice import of_unknown
from tuner.config.fields import Field, fields, find
from tuner.config.load import load_recipe
from tuner.config.numbers import Span
from tuner.config.other_configs import dialects
from tuner.config.other_keys import convert, known_names, rules
from tuner.config.other_tools import Absent, absent_features, other_values, theirs
from tuner.errors import RecipeError

MINIMAL: dict[str, Any] = {"model": {"name_or_path": "owner/name"}, "data": {"train": "rows.jsonl"}}
EXPECTED = {"eval.patience"}
"""Keys that an answer may name before they are there."""


def problem(more: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(MINIMAL | more)
    (found,) = caught.value.problems
    return found.message


@pytest.mark.parametrize("feature", absent_features(), ids=lambda feature: feature.names.split()[0])
def test_what_is_not_supported_is_called_that(feature: Absent) -> None:
    for name in feature.names.split():
        assert of_unknown(name, True) == feature.sentence
    name = feature.names.split()[0]
    assert problem({name: True}) == feature.sentence
    keys = [key for key in re.findall(r"\b([a-z]+\.[a-z_]+)\b", feature.instead) if key.split(".")[0] in SECTIONS]
    assert all(find(key) is not None for key in keys), keys


SECTIONS = {key.split(".")[0] for key in fields() if "." in key}


def test_no_key_is_in_two_tables() -> None:
    names = [name for feature in absent_features() for name in feature.names.split()]
    assert len(names) == len(set(names))
    assert not set(names) & (set(theirs()) | set(rules()))
    assert not set(names) & {key for key in fields() if "." not in key}


def test_every_value_of_another_tool_is_of_a_key_that_is_there() -> None:
    for key, values in other_values().items():
        assert find(key.replace("data.train.", "data.train.0.")) is not None, key
        for value, text in values.items():
            assert text.startswith(("write ", "not supported: ")), (key, value)


@pytest.mark.parametrize(("more", "expected"), cases(__file__, "the_answer_is_what_to_write"))
def test_the_answer_is_what_to_write(more: dict[str, Any], expected: str) -> None:
    assert expected in problem(more)


ODD: tuple[Any, ...] = cases(__file__, "odd")


def test_no_value_of_any_type_is_too_odd_for_a_key_of_another_tool() -> None:
    for number, name in enumerate(sorted(known_names())):
        for value in ODD[number % 3 :: 3]:
            found = convert(name, value, {name: value})
            assert found is None or isinstance(found, (dict, str)), (name, value)
        for value in ODD[-3:]:
            assert of_unknown(name, value, {name: value}), (name, value)
    for dialect in dialects().values():
        for name, rule in dialect.rules.items():
            for value in ODD[1:]:  # an import has no rule for null
                found = rule(value, {name: value, "finetuning_type": "lora"})
                assert found is None or isinstance(found, (dict, str)), (dialect.title, name, value)


SHARES = [field for field in fields().values() if isinstance(field.value_type, Span) and "%" in field.value_type.units]


@pytest.mark.parametrize("field", SHARES, ids=lambda field: field.key)
def test_a_share_without_its_sign_is_asked_for_as_percent(field: Field) -> None:
    assert field.value_type is not None
    for value in (0.03, "0.03"):
        with pytest.raises(ValueError, match=r"^0\.03 what\? did you mean 3%\?$"):
            field.value_type.check(value)


def test_one_may_stand_for_a_list_of_one() -> None:
    recipe = load_recipe(MINIMAL | cases(__file__, "lists_of_one")).recipe
    assert (recipe.logging.trackers, recipe.logging.tags) == (("wandb",), ("first",))
    assert recipe.adapter.model_dump()["target_modules"] == ["q_proj"]
    assert (str(recipe.checkpoint.marks[0]), recipe.profile.steps) == ("5 steps", (3,))


def test_problems_say_where_they_are(tmp_path: Any) -> None:
    (tmp_path / "r.yaml").write_text("model: {name_or_path: a/b}\ndata: {train: x}\ntrain: {duration: 3}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml", cwd=tmp_path)
    (found,) = caught.value.problems
    assert (found.file, found.line, found.column, found.key) == ("r.yaml", 3, 19, "train.duration")
    assert str(found) == f"r.yaml:3:19  train.duration  {found.message}"
