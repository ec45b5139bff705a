"""The demo's task and scorer: what is promised about held-out rows, and what counts as a right answer."""

import json
import re
from pathlib import Path

import pytest

from tools.demo import __main__ as demo
from tools.demo import score, shell, task, training
from tools.tables import beside


def texts(rows: list[task.Row]) -> list[str]:
    return [row["messages"][1]["content"] for row in rows]


def wanted(rows: list[task.Row]) -> list[dict[str, object]]:
    return [json.loads(row["messages"][-1]["content"]) for row in rows]


def test_rows_follow_from_the_seed() -> None:
    assert task.train_rows() == task.train_rows()
    assert len(set(texts(task.train_rows()))) == task.TRAIN_ROWS


def test_held_out_names_and_wordings_never_occur_in_training() -> None:
    train = " ".join(texts(task.train_rows()))
    words = set(train.replace(",", " ").replace(".", " ").replace(":", " ").split())
    for rows in (*task.held_out().values(), task.eval_rows()):
        for values in wanted(rows):
            assert not set(str(values["name"]).split()) & words
    assert not set(task.WORDINGS) & set(task.UNSEEN_WORDINGS)


def test_held_out_sets_have_their_sizes_and_share_no_message() -> None:
    sets = [*map(texts, task.held_out().values()), texts(task.eval_rows())]
    assert [len(part) for part in sets] == [50, 50, 12]
    assert len({text for part in sets for text in part}) == 112


def test_every_value_is_in_its_message() -> None:
    for row in [*task.train_rows(), *task.held_out()["unseen names and wordings"]]:
        values = json.loads(row["messages"][-1]["content"])
        assert tuple(values) == task.FIELDS
        plural = task.ITEMS[values["item"]]
        shown = [values["name"], values["city"], plural, str(values["quantity"]), str(values["total_usd"])]
        assert all(value in row["messages"][1]["content"] for value in shown)


REFERENCE = {"name": "Ana Berg", "quantity": 5}


@pytest.mark.parametrize(("answer", "lenient", "figures"), beside(__file__))
def test_scores(answer: str, lenient: bool, figures: list[float]) -> None:
    scores = score.score([answer], [REFERENCE], lenient)
    assert [scores[name] for name in ("valid", "fields", "exact")] == figures


def test_true_is_not_one() -> None:
    assert not score.same(True, 1)
    assert not score.same(1.0, 1)


def test_lines_are_read_once_and_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = training.Lines(path)
    assert list(lines.new()) == []
    path.write_text('{"step": 1}\n{"st')
    assert list(lines.new()) == [{"step": 1}]
    with path.open("a") as stream:
        stream.write('ep": 2}\n')
    assert list(lines.new()) == [{"step": 2}]
    assert list(lines.new()) == []


def test_the_recipe_of_the_demo_loads(tmp_path: Path) -> None:
    from tuner.config.load import load_recipe

    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).touch()
    path = tmp_path / "extract.yaml"
    path.write_text(demo.RECIPE.format(model=tmp_path), encoding="utf-8")
    assert load_recipe(path).recipe.train.global_batch_size == 2


def test_it_says_how_long_it_takes_and_ends_with_a_model_to_talk_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but its commands, which are what takes the minutes."""
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(shell.Stage, "tuner", lambda stage, *words, **more: None)
    for module, name in [
        (training, "run"), (demo, "break_and_resume"), (demo, "plain_logits"), (demo, "results"), (demo, "as_served"),
    ]:  # fmt: skip
        monkeypatch.setattr(module, name, lambda *given, **more: None)
    perfect = {part: {figure: 1.0} for part, figure in demo.GOALS}
    perfect["unseen names"] = {"valid": 1.0, "exact": 1.0}
    monkeypatch.setattr(demo, "scored", lambda *given: perfect)
    assert demo.main() == 0
    said = capsys.readouterr().out
    assert re.match(r"This takes [1-9]\d* to [1-9]\d* minutes on this machine", said)
    assert ".venv/bin/tuner chat .demo/work/exported --system" in said and task.INSTRUCTION in said


def test_the_results_count_the_orders_that_are_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "eval", "loss": 0.5}\n{"kind": "eval", "loss": 0.1}\n')
    scores = {"valid": 1.0, "fields": 0.9}
    before = {part: scores | {"exact": exact} for part, exact in (("a", 0.1), ("b", 0.0))}
    after = {part: scores | {"exact": exact} for part, exact in (("a", 0.92), ("b", 0.58))}
    demo.results(tmp_path, before, after)
    assert "orders right in every field: base 1 of 20 · trained 75 of 100" in capsys.readouterr().out
