"""What a changed key means for a run that goes on."""

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tables import cases
from tests.fixtures.trainings import launch
from tuner.checkpoint.open import CheckpointInfo
from tuner.config.fields import fields
from tuner.config.load import load_recipe, recipe_dict
from tuner.errors import RecipeError
from tuner.run.changes import (
    ON_RESUME,
    UNREPORTED,
    Changes,
    allowed_changes,
    changes,
    effect,
    optimizer_kind,
    parse_reset,
)
from tuner.run.options import LaunchOptions
from tuner.run.status import require_recipe_of
from tuner.runtime.console import Console


def test_every_key_is_classified_and_nothing_else() -> None:
    assert {key: effect(key) for key in fields()}.keys() == fields().keys()
    stale = [key for key in ON_RESUME if not any(name == key or name.startswith(key) for name in fields())]
    assert not stale
    train = {key for key in fields() if key.startswith("train.")}
    assert train <= ON_RESUME.keys(), "each key of train needs a decision of its own"
    assert {effect(key) for key in UNREPORTED} == {"safe"}
    with pytest.raises(KeyError):
        effect("surprise.key")


def test_differences_are_sorted_by_what_they_mean() -> None:
    old = {"seed": 1, "name": "a", "train": {"compile": False}, "eval": {"every": ["10%"], "max_rows": None}}
    new = {"seed": 2, "name": "b", "train": {"compile": "auto"}, "eval": {"every": ["5%"], "max_rows": 7}}
    assert changes(old, old) == Changes()
    found = changes(old | {"data": {"train": "x"}}, new | {"model": {"config": {"a": {"b": 1}}}})
    assert found.safe == ("eval.every ['10%'] -> ['5%']",)
    assert found.warn == ("eval.max_rows None -> 7",)
    assert found.refuse == ("data.train x -> None", "model.config.a.b None -> 1", "seed 1 -> 2")
    assert Changes(refuse=("a", "b", "c", "d", "e")).shown() == "a; b; c and 2 more"


def test_a_run_that_goes_on_tells_what_changed(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []

    def say(self: Console, label: str, text: str, level: str = "info") -> None:
        told.append((label, text))

    def news() -> list[tuple[str, str]]:
        return [(label, text) for label, text in told if label in ("changed", "warning")]

    launch(workplace, train__stop_after="1 step")
    monkeypatch.setattr(Console, "say", say)
    again = LaunchOptions(resume="auto")
    launch(workplace, again, train__stop_after="1 steps")
    assert news() == []
    launch(workplace, again, train__stop_after="1 steps", checkpoint__keep="7", train__micro_batch_size="1")
    changed, warned = news()
    assert changed == ("changed", "checkpoint.keep 3 -> 7")
    assert warned[1].startswith("train.micro_batch_size 4 -> 1: ")
    told.clear()
    with pytest.raises(RecipeError, match=r"another recipe \(train.nonfinite"):
        launch(workplace, again, train__nonfinite="{skip: 1}")
    assert news() == []


def test_a_machine_without_the_compiled_kernels_goes_on_and_says_so(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    launch(workplace, train__stop_after="1 step")
    monkeypatch.setattr(Console, "warn", lambda _, text: warned.append(text))
    monkeypatch.setattr("tuner.setup.resolve.native_problem", lambda: "there is no C compiler (cc, gcc, clang)")
    assert launch(workplace, "auto", train__stop_after="1 steps").step == 2
    assert [text.split(":")[0] for text in warned] == ["model.kernels native -> torch"]


def test_moments_of_another_type_are_not_kept() -> None:
    def moments(**optimizer: Any) -> str:
        tree = {"model": {"name_or_path": "/m"}, "data": {"train": "/d.jsonl"}, "optimizer": optimizer}
        return optimizer_kind(load_recipe(tree).recipe.optimizer)

    assert moments(kind="muon") == "muon"
    with pytest.raises(RecipeError, match="the state of adamw is none of adamw with"):
        allowed_changes(parse_reset("optimizer.arguments"), moments(), moments(state="8bit"))
    by_rows = moments(rows=["embed"])
    with pytest.raises(RecipeError, match="the state of adamw is none of adamw with rows of embed"):
        allowed_changes(parse_reset("optimizer.arguments"), moments(), by_rows)
    assert by_rows == moments(rows=[{"match": "embed", "lr": 0.1}]), "another rate is no other state"
    assert allowed_changes(parse_reset("optimizer.arguments"), moments(), moments(lr="2e-5")) == ("optimizer.",)


def test_a_checkpoint_from_before_a_key_was_there_goes_on(tmp_path: Path) -> None:
    recipe = recipe_dict(load_recipe({"model": {"name_or_path": "/m"}, "data": {"train": "/d.jsonl"}}).recipe)
    older = {**recipe, "method": {key: value for key, value in recipe["method"].items() if key != "reduction"}}
    found = CheckpointInfo(tmp_path, 1, {"meta": {"recipe": older}}, {})
    assert require_recipe_of(found, recipe, ()) == Changes()
    other = {**recipe, "method": {**recipe["method"], "reduction": "document"}}
    with pytest.raises(RecipeError, match="method.reduction token -> document"):
        require_recipe_of(found, other, ())


@pytest.mark.parametrize(("changed", "resets"), cases(__file__, "a_reset_is_proposed_where_one_allows_the_change"))
def test_a_reset_is_proposed_where_one_allows_the_change(changed: list[str], resets: str | None) -> None:
    assert Changes(refuse=tuple(changed)).resets() == resets
    if resets is not None:
        keys = [line.split()[0] for line in changed]
        freed = allowed_changes(parse_reset(resets), "adamw", "sgd" if "optimizer.kind" in keys else "adamw")
        assert all(any(key == name or (name[-1] == "." and key.startswith(name)) for name in freed) for key in keys)
