"""The tutorial in its smallest form: its steps are read as a reader takes them, and its recipe plans a run."""

import ast
import json
import os
from pathlib import Path

import pytest

from tests.fixtures import commands
from tools import tutorial_campaign
from tools.demo import task
from tools.readme_campaign import NOTEBOOK, README, cells, without_install
from tools.tutorial_campaign import FENCE, PAGE, Command, File, hub_cache, problems, steps

MODEL = os.environ.get("TUNER_TEST_SMOLLM2")


def test_steps_are_files_and_commands_in_order() -> None:
    page = Path(__file__).with_suffix(".md").read_text()
    assert steps(page) == [
        Command("tuner init -m M -d F"),
        File("a.yaml", "# a.yaml\nseed: 1\n"),
        Command('tuner train a.yaml --train.stop_after "2 steps"', 75),
    ]


def test_the_page_goes_from_rows_to_a_chat() -> None:
    lines = [step.line for step in steps(PAGE.read_text()) if isinstance(step, Command)]
    words = [line.split()[1] for line in lines if line.startswith("tuner ")]
    order = ("config", "prepare-data", "profile", "train", "resume", "runs", "eval", "export-hf", "generate", "chat")
    assert list(dict.fromkeys(words)) == list(order)
    assert f"python -m tools.demo.task {len(task.train_rows()[:600])} > orders.jsonl" in lines
    assert [step.name for step in steps(PAGE.read_text()) if isinstance(step, File)] == ["orders.yaml"]
    shown = [json.loads(text) for kind, text in FENCE.findall(PAGE.read_text()) if kind == "json"]
    assert shown == task.train_rows()[:1]


@pytest.mark.skipif(MODEL is None, reason="set TUNER_TEST_SMOLLM2 to the model's directory")
def test_its_recipe_plans_a_run(tmp_path: Path) -> None:
    (recipe,) = (step for step in steps(PAGE.read_text()) if isinstance(step, File))
    (tmp_path / recipe.name).write_text(recipe.text)
    task.write_jsonl(tmp_path / "orders.jsonl", task.train_rows()[:60])
    done = commands.tuner("train", recipe.name, "--dry-run", "--model.name_or_path", str(MODEL), cwd=tmp_path, code=0)
    assert "24 steps of 2 rows" in done.stderr


def test_the_model_is_found_by_its_name_without_a_network(tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    hub_cache(tmp_path / "model", tmp_path / "home")
    found = Path(snapshot_download(tutorial_campaign.MODEL, cache_dir=tmp_path / "home" / "hub", local_files_only=True))
    assert (found / "config.json").read_text() == "{}"


def test_claims_that_do_not_hold_are_named(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "orders"
    place.mkdir(parents=True)
    (place / "metrics.jsonl").write_text('{"kind": "eval", "loss": 0.5}\n{"kind": "eval", "loss": 0.3}\n')
    answer = '{"name": "Wanda Zhou", "city": "Oslo", "item": "garden hose", "quantity": 5, "total_usd": 98}'
    assert problems(tmp_path, f"base  {{}}\ntrained  {answer}") == ["the held-out loss went from 0.5 to 0.3"]
    (place / "metrics.jsonl").write_text('{"kind": "eval", "loss": 0.5}\n{"kind": "eval", "loss": 0.01}\n')
    assert problems(tmp_path, answer) == []
    assert problems(tmp_path, answer.replace("98", "99"))[0].startswith("the export answered")


def test_a_command_that_fails_ends_it(tmp_path: Path) -> None:
    page = "```console\n$ exit 3\n```\n"
    with pytest.raises(SystemExit, match="exit code 3, the page says 0: exit 3"):
        tutorial_campaign.follow(page, tmp_path, dict(os.environ))


def test_readme_is_short_and_trains_each_of_its_recipes() -> None:
    page = README.read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 150
    found = steps(without_install(page))
    recipes = [step for step in found if isinstance(step, File)]
    assert len(recipes) >= 5 and all(len(one.text.splitlines()) <= 7 for one in recipes), "six lines and a name"
    lines = " ".join(step.line for step in found if isinstance(step, Command))
    assert [one.name for one in recipes if one.name.removesuffix(".yaml") not in lines] == []


def test_the_notebook_calls_what_there_is() -> None:
    import tuner

    code = ast.parse(cells(NOTEBOOK))
    imported = [node for node in ast.walk(code) if isinstance(node, ast.ImportFrom) and node.module == "tuner"]
    names = {alias.name for node in imported for alias in node.names}
    assert {"load_recipe", "train", "export_hf"} <= names <= set(tuner.__all__)
