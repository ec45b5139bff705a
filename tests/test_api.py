"""The Python API: the commands' own functions, from a mapping to a verified export."""

import copy
import inspect
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tuner
from tests.ladder.made import ladder_tree, write_ladder_files
from tuner.config.paths import recipes_dir
from tuner.config.yaml import flow
from tuner.errors import MemoryLimitError, RecipeError
from tuner.profile.devices import find_device

PAGE = Path(__file__).parents[1] / "docs" / "python.md"


def recipe(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "run"),
        "model": {"name_or_path": str(recipes_dir() / "models" / "tiny-llama"), "init": "random"},
        "tokenizer": {"name_or_path": "byte"},
        "method": {"kind": "pretrain"},
        "data": {"train": str(recipes_dir() / "data" / "notes.jsonl"), "max_length": 128},
        "train": {"duration": "2 steps", "global_batch_size": 2, "device": "cpu"},
    }


def test_a_mapping_is_prepared_trained_and_found_trained(tmp_path: Path) -> None:
    wish = recipe(tmp_path)
    prepared = tuner.prepare_data(wish)
    assert not prepared.cached
    assert tuner.prepare_data(wish).cached
    result = tuner.train(wish, prepared=prepared.path)
    assert (result.status, result.step, result.run_dir) == ("finished", 2, tmp_path / "run")
    again = tuner.train(tuner.load_recipe(wish))
    assert (again.status, again.step) == ("finished", 2)


def test_the_walk_through_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given = recipe(tmp_path)
    given |= {"output_dir": "runs/recipe", "data": given["data"] | {"eval": "25%"}, "eval": {"samples": 0}}
    text = yaml_of(given)
    (tmp_path / "recipe.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    write_ladder_files(tmp_path)
    (tmp_path / "walk.py").write_text("\n".join(blocks))
    names = runpy.run_path(str(tmp_path / "walk.py"))
    shown = capfd.readouterr()
    assert "2 runs/" not in shown.out and "another recipe (train.duration 2 steps -> 3 steps)" in shown.out
    assert names["result"].status == "finished"
    assert (names["report"].path / "model.safetensors").is_file()
    assert names["score"].evaluation.tokens > 0
    assert [answer.tokens > 0 for answer in names["generate"](names["generator"], "Hi")] == [True]
    assert "step   loss" not in shown.err, "quiet"
    assert len(names["rows"]) == 8 and all(done.was_done for done in names["ladder"].run(quiet=True))


def yaml_of(tree: dict[str, Any]) -> str:
    return "".join(f"{key}: {flow(value)}\n" for key, value in tree.items())


def test_every_function_is_listed_typed_and_documented() -> None:
    assert set(tuner.__all__) <= set(dir(tuner))
    assert set(tuner.__all__) == {name for names in tuner._PLACES.values() for name in names}
    page = PAGE.read_text()
    for name in tuner.__all__:
        function = tuner.__getattr__(name)
        assert f"`{name}(" in page or f"{name}(" in page, name
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(each.annotation is not inspect.Parameter.empty for each in signature.parameters.values())


def test_a_loaded_recipe_gives_its_sections(tmp_path: Path) -> None:
    loaded: Any = tuner.load_recipe(recipe(tmp_path))
    assert loaded.train.duration == loaded.recipe.train.duration
    assert copy.deepcopy(loaded) == loaded
    with pytest.raises(AttributeError, match="a loaded recipe has no 'optimiser'; its .recipe has version, name"):
        _ = loaded.optimiser


def test_problems_are_given_all_at_once(tmp_path: Path) -> None:
    assert tuner.check_recipe(recipe(tmp_path)) == ()
    assert len(tuner.check_recipe(recipe(tmp_path) | {"optimizer": {"lr": -1}, "surprise": 1})) == 2


@pytest.mark.slow
def test_a_ladder_is_planned_measured_trained_and_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ladder_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    layers = {"num_hidden_layers": 1}
    sizes = [{"name": f"h{width}", "config": {**layers, "hidden_size": width}} for width in (16, 32, 48, 64)]
    ladder = tuner.Ladder(ladder_tree(sizes=sizes, tokens="0.2 * N") | {"name": "four", "output_dir": "runs/four"})
    planned = ladder.plan(quick=True, output="plan.html")
    assert [one.rung.name for one in planned] == ["h16", "h32", "h48", "h64"] and (tmp_path / "plan.html").is_file()
    assert ladder.benchmark("2", steps=2, quiet=True).plain()["tok_per_s"] > 0
    with pytest.raises(RecipeError, match="holds no ladder"):
        ladder.status()
    (done,) = ladder.run("h16", quiet=True)
    assert (done.result.status, done.was_done) == ("finished", False)
    assert [one.was_done for one in ladder.run(quiet=True)] == [True, False, False, False]
    assert [one["marks_reached"] for one in ladder.status()] == [4] * 4
    marks = ladder.checkpoints()
    assert [one["exists"] for one in marks] == [True] * 16 and all(Path(one["metrics_path"]).is_file() for one in marks)
    rows = ladder.metrics(prefix="none")
    assert [row["step"] for row in rows] == [one["step"] for one in marks]
    assert json.loads(Path(marks[0]["metrics_path"]).read_text())["eval/loss"] == rows[0]["loss"]
    law = ladder.fit((1e6, 2e6), samples=100)
    assert law.target is not None and law.target.parameters == 1e6 and law.loss is not None
    with pytest.raises(RecipeError, match="middle: no such rung"):
        ladder.fit("middle")


@pytest.mark.slow
def test_what_fits_is_found_for_the_device(tmp_path: Path) -> None:
    on_device = tuner.fit(recipe(tmp_path), device="h100-80g", quiet=True)
    assert on_device[0].fits and on_device[0].prediction.limit_bytes == find_device("h100-80g").memory_bytes


@pytest.mark.slow
def test_what_fits_is_found_for_a_size(tmp_path: Path) -> None:
    with pytest.raises(MemoryLimitError, match="nothing fits in 204.8 MiB"):
        tuner.fit(recipe(tmp_path), "0.2GiB", quiet=True)


@pytest.mark.multi
def test_a_layout_is_proven_and_one_that_is_not_possible_refused(tmp_path: Path) -> None:
    found = tuner.prove(recipe(tmp_path), steps=2, layouts=["none2", "ep2"], quiet=True)
    assert [(proof.layout, proof.verdict) for proof in found.proofs] == [("none2", "equal"), ("ep2", "refused")]
    assert not found.wrong


def test_importing_the_package_is_cheap_and_train_is_a_function_and_a_package() -> None:
    code = (
        "import sys, tuner\n"
        "assert not {'pydantic', 'torch', 'typer'} & set(sys.modules)\n"
        "import tuner.train.plan\n"
        "assert callable(tuner.train) and tuner.train.plan.__name__ == 'tuner.train.plan'\n"
        "from tuner import check_recipe, doctor, load_recipe, prepare_data, resume, runs, show_run, train\n"
        "assert callable(train) and 'torch' not in sys.modules\n"
        "import types\n"
        "tuner.generate = types.ModuleType('tuner.generate')  # as importing it binds it\n"
        "assert callable(tuner.generate)\n"
        "try:\n    train({})\nexcept tuner.errors.RecipeError:\n    pass\n"
        "try:\n    tuner.nothing\nexcept AttributeError:\n    pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
