"""What ships, and what tools hold it to: orders and pairs of their generators, recipes with their data, and tasks."""

import json
import re
from pathlib import Path

import pytest

from tools import eval_tasks, order_rows, preference_rows, preference_task, readme_campaign
from tools.bench_dpo import verdict
from tools.preference_trl import labelled, rotated
from tools.recipes_campaign import SHAPES, target
from tuner.config.load import load_recipe
from tuner.config.paths import recipes_dir
from tuner.config.shipped import shipped_recipes, summary
from tuner.evals.task import read_items

ROWS = order_rows.rows()
ORDERS = [row["messages"][0]["content"] for row in ROWS]


def test_the_shipped_orders_are_those_of_the_generator() -> None:
    lines = (recipes_dir() / "data" / "orders.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == ROWS
    assert len(set(ORDERS)) == order_rows.ROWS
    assert order_rows.ROWS % len(order_rows.WORDINGS) == 0, "each wording as often as the others"


@pytest.mark.parametrize("row", ROWS)
def test_the_answer_is_what_the_order_says(row: order_rows.Row) -> None:
    order, answer = (message["content"] for message in row["messages"])
    facts = json.loads(answer)
    assert tuple(facts) == tuple(readme_campaign.LEARNED)
    assert all(str(facts[key]) in order for key in ("name", "city", "quantity", "total_usd"))


def test_a_person_stands_before_the_city_about_as_often_as_after_it() -> None:
    first = [wording.index("{name}") < wording.index("{city}") for wording in order_rows.WORDINGS]
    assert 1 / 3 < sum(first) / len(first) < 2 / 3


def test_the_pages_ask_for_orders_that_are_not_trained_on() -> None:
    readme = readme_campaign.typed_in(readme_campaign.README.read_text(encoding="utf-8"))
    (notebook,) = re.findall(r'prompt = "(.+)"', readme_campaign.cells(readme_campaign.NOTEBOOK))
    for asked in (readme, notebook):
        assert asked.startswith(order_rows.ASKED) and asked not in ORDERS
        assert all(str(value) in asked for value in readme_campaign.LEARNED.values())
    assert readme_campaign.answer(readme_campaign.README.read_text(encoding="utf-8")) == readme_campaign.LEARNED


def test_the_shipped_pairs_are_those_of_the_generator() -> None:
    lines = (recipes_dir() / "data" / "preferences.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == preference_rows.rows("train", preference_rows.TRAIN_ROWS)
    assert len({line for line in lines}) == preference_rows.TRAIN_ROWS


def test_of_each_pair_the_chosen_answer_is_valid_and_the_rejected_one_is_not() -> None:
    for part in ("train", "held-out"):
        for row in preference_rows.rows(part, 40):
            wanted = json.loads(row["chosen"][0]["content"])
            assert preference_task.is_valid(row["chosen"][0]["content"], wanted)
            assert not preference_task.is_valid(row["rejected"][0]["content"], wanted)
            note = row["prompt"][-1]["content"]
            assert all(str(value) in note for value in wanted.values())


def test_names_and_wordings_of_held_out_notes_never_occur_in_training() -> None:
    train = " ".join(row["prompt"][-1]["content"] for row in preference_rows.rows("train", 240))
    for row in preference_rows.rows("held-out", 80):
        values = json.loads(row["chosen"][0]["content"])
        assert not set(str(values.get("name", "")).split()) & set(train.split())
    for kind in preference_rows.KINDS.values():
        assert not set(kind["wordings"]) & set(kind["held_out"])


@pytest.mark.parametrize(
    ("text", "valid"),
    [('{"a": 1}', True), (' {"a": 2}\n', True), ('{"a": 1} done', False), ('{"b": 1}', False), ("[1]", False)],
)
def test_a_valid_answer_is_the_object_with_its_keys_and_nothing_else(text: str, valid: bool) -> None:
    assert preference_task.is_valid(text, {"a": 1}) is valid


def test_rows_for_the_other_side_have_its_labels_and_its_mismatched_answers() -> None:
    feature = {"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [5]}
    found = labelled(feature, answers_only=False)
    assert (found["chosen_input_ids"], found["chosen_labels"]) == ([1, 2, 3, 4], [-100, -100, 3, 4])
    assert (found["rejected_labels"], found["rejected_attention_mask"]) == ([-100, -100, 5], [1, 1, 1])
    assert labelled(feature, answers_only=True)["chosen_attention_mask"] == [2, 2, 1, 1]
    answers = [[i] for i in range(4)]
    assert rotated({"completion_ids": answers})["KL_completion_ids"] == [[3], [0], [1], [2]]


def test_the_benchmark_fails_where_a_goal_is_missed() -> None:
    side = {"step_s": 1.0, "whole_s": 1.0, "peak_gib": 1.0}
    others = {
        "trl, defaults": side | {"step_s": 4.5, "peak_gib": 2.0},
        "trl, best": side | {"step_s": 2.4, "peak_gib": 1.2},
    }
    found = verdict({"tuner": side, **others})
    assert found["missed"] == ["trl, best: 2.4 < 2.5", "trl, best: peak 0.83 > 0.6"]


RECIPES = shipped_recipes()


@pytest.mark.parametrize("name", RECIPES)
def test_its_name_says_where_it_trains_and_its_data_is_there(name: str) -> None:
    recipe = load_recipe(RECIPES[name]).recipe
    device, processes = target(name)
    assert (device == "cpu") == (recipe.train.device != "cuda")
    assert recipe.parallel.processes == (processes if processes > 1 else "auto")
    assert recipe.model.name_or_path in SHAPES or Path(recipe.model.name_or_path).is_dir()
    assert all(Path(source.path).is_relative_to(recipes_dir() / "data") for source in recipe.data.train)
    assert all(Path(source.path).is_file() for source in recipe.data.train)
    assert summary(RECIPES[name])
    assert name in RECIPES[name].read_text(encoding="utf-8").splitlines()[1] or name == "tiny_pretrain_cpu"


def test_there_are_recipes_for_what_people_ask_for() -> None:
    assert len(RECIPES) >= 15
    assert {target(name) for name in RECIPES} == {("cpu", 1), ("a10-24g", 1), ("h100-80g", 1), ("h100-80g", 8)}


def test_two_of_the_tasks_are_made_without_the_network(tmp_path: Path) -> None:
    eval_tasks.make(tmp_path / "a", 320, sums=False)
    eval_tasks.make(tmp_path / "b", 320, sums=False)
    for name, kind in (("functions", "choice"), ("documentation", "text")):
        items = read_items(tmp_path / "a" / f"{name}.jsonl")
        assert (items.kind, len(items.items)) == (kind, 320) and len(set(items.ids)) == 320
        assert (tmp_path / "a" / f"{name}.jsonl").read_bytes() == (tmp_path / "b" / f"{name}.jsonl").read_bytes()
    assert json.loads((tmp_path / "a" / "made.json").read_text())["files"].keys() == {
        "functions.jsonl", "documentation.jsonl",
    }  # fmt: skip
