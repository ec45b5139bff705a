"""`tuner config`: recipes that differ, and variables of the environment in the place of flags.

`--plot-schedule`: the drawing, its figures, and lengths that are known, prepared or unknown.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.commands import document, tuner
from tests.fixtures.tables import cases
from tuner.api.training import prepare_data
from tuner.cli.work.schedule import drawing, figures, planned_schedule
from tuner.config.load import load_recipe, recipe_dict
from tuner.config.recipe import Recipe
from tuner.errors import RecipeError

RECIPE = "model: {name_or_path: m}\ndata: {train: rows.jsonl}\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "a.yaml").write_text(RECIPE)
    (tmp_path / "b.yaml").write_text(RECIPE + "optimizer: {lr: 3e-4}\ntrain: {duration: 2 epochs}\n")
    return tmp_path


def test_two_recipes_differ_in_these_keys(place: Path) -> None:
    done = tuner("config", "diff", "a.yaml", "b.yaml", cwd=place)
    assert done.returncode == 0 and done.stderr == ""
    assert 'train.duration  "1 epoch" -> "2 epochs"' in done.stdout.splitlines()
    assert 'optimizer.lr  "auto" -> 0.0003' in done.stdout.splitlines()
    assert all(
        line.split()[0] in {"name", "output_dir", "train.duration", "optimizer.lr"} for line in done.stdout.splitlines()
    )
    found = json.loads(tuner("config", "diff", "a.yaml", "b.yaml", "--json", cwd=place).stdout)
    assert found["artifacts"]["differences"]["optimizer.lr"][1] == 0.0003
    assert tuner("config", "diff", "a.yaml", "a.yaml", cwd=place).stdout == "no key differs\n"
    assert tuner("config", "diff", "a.yaml", "c.yaml", cwd=place).returncode == 2


def test_variables_change_a_recipe_and_flags_win(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_OPTIMIZER__LR", "1e-3")
    monkeypatch.setenv("TUNER_TRAIN__GLOBAL_BATCH_SIZE", "8")
    monkeypatch.setenv("TUNER_CACHE", str(place / "cache"))
    shown = tuner("config", "show", "b.yaml", "--origin", "--train.global-batch-size", "4", cwd=place).stdout
    lines = {line.split(":")[0].strip(): line for line in shown.splitlines()}
    assert "0.001" in lines["lr"] and "variable TUNER_OPTIMIZER__LR=1e-3" in lines["lr"]
    assert "4" in lines["global_batch_size"] and "flag --train.global-batch-size 4" in lines["global_batch_size"]


@pytest.mark.parametrize(("name", "text", "said"), cases(__file__, "a_variable_that_is_wrong_is_named"))
def test_a_variable_that_is_wrong_is_named(
    name: str, text: str, said: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    done = tuner("config", "check", "a.yaml", cwd=place)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


PERIODS = {"kind": "wsd_s", "periods": ["1000 steps", "1000 steps", "2000 steps"], "warmup": "100 steps"}


def recipe(directory: Path, **sections: Any) -> Recipe:
    """A recipe of 45 rows of text, with a model that has nothing but its config."""
    (directory / "model").mkdir(exist_ok=True)
    (directory / "model" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    (directory / "rows.jsonl").write_text("".join(json.dumps({"text": "a" * 40}) + "\n" for _ in range(45)))
    tree: dict[str, Any] = {
        "model": {"name_or_path": str(directory / "model"), "init": "random"},
        "tokenizer": {"name_or_path": "byte"},
        "method": {"kind": "pretrain"},
        "data": {"train": str(directory / "rows.jsonl"), "max_length": 64, "packing": False, "workers": 1},
        "train": {"duration": "4000 steps", "global_batch_size": 8},
        "optimizer": {"lr": 4e-4},
    }
    return load_recipe({**tree, **sections}, cwd=directory).recipe


def dots(line: str) -> set[int]:
    """The cells of a line of the plot in which the curve is seen."""
    return {column for column, cell in enumerate(line) if cell > "⠀"}


def test_the_curve_its_axes_and_its_turns(tmp_path: Path) -> None:
    groups = [{"match": ["embed"], "lr": 1e-5}, {"match": ["head"], "weight_decay": 0.5}]
    wanted = recipe(tmp_path, schedule=PERIODS, optimizer={"kind": "muon", "lr": 4e-4, "groups": groups})
    found, warnings = planned_schedule(wanted)
    lines = drawing(wanted, found, 91).splitlines()
    assert warnings == []
    assert lines[0].strip() == "learning rate"
    assert [line.split(" ┤")[0].strip() for line in lines if "┤" in line] == ["4.00e-04", "2.00e-04", "0"]
    axis = next(line for line in lines if "└" in line)
    assert len(axis) == 91
    # Peaks at 100, between 1,001 and 1,900 and between 2,001 and 3,800 of 4,000 steps; zeros at 0, 1,000, 2,000, 4,000.
    plot = lines[1:14]
    top, bottom = (dots(line[11:]) for line in (plot[0], plot[-1]))
    for steps, seen in (((0, 1000, 2000, 4000), bottom), ((500, 1500, 3000), top)):
        for step in steps:
            column = round(step / 4000 * 79)
            assert {column - 1, column, column + 1} & seen, step
    assert not {10, 30, 60} & bottom
    table = [line.split() for line in lines[lines.index("") + 1 :]]
    assert table[0] == ["step", "lr", "adamw_lr", "groups.0.lr"]
    assert table[1:4] == cases(__file__, "first_rows")
    assert ["1,000", "0", "0", "0", "fall", "ends"] in table
    assert table[-1] == ["4,000", "0", "0", "0", "fall", "ends,", "last", "step"]


def test_figures(tmp_path: Path) -> None:
    wanted = recipe(tmp_path, schedule=PERIODS, optimizer={})
    found = figures(wanted, planned_schedule(wanted)[0])
    assert (found["total_steps"], found["peaks"]) == (4000, {"lr": None})
    assert {(point["at"], point["factor"]) for point in found["points"]} >= {(0, 0), (1000, 0), (1001, 1), (4000, 0)}
    assert [point["at"] for point in found["curve"]][:3] == [0, 10, 20]


def test_a_length_that_only_the_data_tell(tmp_path: Path) -> None:
    lengths = {"train": {"duration": "10 epochs", "global_batch_size": 8}}
    section = {"kind": "linear", "warmup": "820 tokens"}
    with pytest.raises(RecipeError, match="820 tokens cannot be drawn .*the data is not prepared"):
        planned_schedule(recipe(tmp_path, schedule=section, **lengths))
    wanted = recipe(tmp_path, **lengths)
    found, warnings = planned_schedule(wanted)
    assert (found.known, found.label(30)) == (False, "3%")
    assert "the data is not prepared" in warnings[0]
    text = drawing(wanted, found, 80)
    assert "100%" in text
    assert "step" not in text
    prepare_data(recipe_dict(wanted))
    found, warnings = planned_schedule(recipe(tmp_path, schedule=section, **lengths))
    assert (found.known, found.total_steps, warnings) == (True, 60, [])
    assert [index for index, what in found.points() if "warm-up ends" in what] == [3]  # at 307.5 tokens a step


def test_short_runs_can_be_drawn(tmp_path: Path) -> None:
    for steps in (1, 2, 7):
        wanted = recipe(
            tmp_path, train={"duration": f"{steps} steps"}, schedule={"kind": "constant", "warmup": "never"}
        )
        lines = drawing(wanted, planned_schedule(wanted)[0], 20).splitlines()
        assert len(lines[14]) == 20
        assert lines[-1].endswith("last step")


def test_the_command(tmp_path: Path) -> None:
    def show(*words: str) -> subprocess.CompletedProcess[str]:
        return tuner("config", "show", "--plot-schedule", *words, cwd=tmp_path, COLUMNS="70")

    flags = ["tiny_pretrain_cpu", "--train.duration", "500 steps", "--schedule.kind", "wsd", "--optimizer.lr", "1e-3"]
    done = show(*flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert "┤" in done.stdout
    assert max(map(len, done.stdout.splitlines())) == 70
    assert document(show(*flags, "--json"))["artifacts"]["schedule"]["total_steps"] == 500
    both = show(*flags, "--origin")
    assert (both.returncode, both.stdout) == (2, "")
    assert "exclude each other" in both.stderr
