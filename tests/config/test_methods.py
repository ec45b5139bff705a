"""The sections of methods over answers: what may be written, what is refused, and that it is written back the same."""

from typing import Any

import pytest
import yaml

from tests.fixtures.tables import cases
from tuner.config.load import Override, load_recipe, recipe_yaml
from tuner.config.methods import DpoMethod, Method
from tuner.errors import RecipeError

BASE: dict[str, Any] = {"model": {"name_or_path": "owner/name"}, "data": {"train": "rows.jsonl"}}


def section(**values: Any) -> Method:
    return load_recipe({**BASE, "method": {"kind": "dpo", **values}}).recipe.method


@pytest.mark.parametrize(("written", "weights"), cases(__file__, "a_loss_is_a_name_or_several"))
def test_a_loss_is_a_name_or_several_with_weights_in_files_and_on_the_command_line(written: Any, weights: Any) -> None:
    found = section(loss=written)
    assert isinstance(found, DpoMethod) and found.loss == weights
    loaded = load_recipe({**BASE, "method": {"kind": "dpo", "loss": written}})
    back = yaml.safe_load(recipe_yaml(loaded.recipe))
    assert load_recipe(back).recipe == loaded.recipe
    text = written if isinstance(written, str) else yaml.safe_dump(written, default_flow_style=True).strip()
    flags = [Override("method.kind", "dpo"), Override("method.loss", text)]
    assert load_recipe(BASE, flags).recipe.method == found


@pytest.mark.parametrize(("values", "said"), cases(__file__, "what_a_loss_cannot_take_is_a_problem_of_the_recipe"))
def test_what_a_loss_cannot_take_is_a_problem_of_the_recipe(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        section(**values)


def test_terms_of_the_loss_are_figures_where_there_are_several() -> None:
    several = section(loss={"sigmoid": 1, "bco": 1}, sft_weight=0.1)
    assert [name for name in several.figures if name in ("sigmoid", "bco", "sft")] == ["sigmoid", "bco", "sft"]
    assert "sft" not in section().figures
