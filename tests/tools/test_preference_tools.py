"""The shipped pairs and the tools that compare and measure preferences: what they promise without training anything."""

import json

import pytest

from tools import preference_rows, preference_task
from tools.bench_dpo import verdict
from tools.preference_trl import labelled, rotated
from tuner.config.paths import recipes_dir


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
