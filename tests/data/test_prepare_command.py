from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data import tiny


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tiny.write_directory(tmp_path / "model")
    tiny.write_rows(tmp_path / "rows.jsonl", [tiny.chat(f"question {i}", f"answer {i}") for i in range(20)])
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {name_or_path: ./model}\ndata: {train: rows.jsonl, eval: 2 documents}\n")
    return path


def run(recipe: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tuner.cli.main", "prepare-data", *arguments]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "TUNER_CACHE": str(recipe.parent / "cache")}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=recipe.parent, env=environment)


def test_the_path_goes_to_stdout_and_the_table_to_stderr(recipe: Path) -> None:
    first = run(recipe)
    assert first.returncode == 0, first.stderr
    (path,) = first.stdout.splitlines()
    assert (Path(path) / "manifest.json").is_file()
    assert "18 documents" in first.stderr
    assert "masks     proven on 20 of 20 rows" in first.stderr
    again = run(recipe, "recipe.yaml", "--json")
    document = json.loads(again.stdout)
    assert (document["status"], document["artifacts"]["path"], document["artifacts"]["cached"]) == ("ok", path, True)
    assert "already prepared" in again.stderr
    assert document["metrics"]["train"]["documents"] == 18


def test_explain_marks_what_is_trained_and_builds_nothing(recipe: Path) -> None:
    shown = run(recipe, "--explain", "1")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.endswith("<|im_start|>assistant\n[answer 0<|im_end|>]\n")
    rows = json.loads(run(recipe, "--explain", "2", "--json").stdout)["artifacts"]["rows"]
    assert len(rows) == 2
    assert set(rows[0][0]) == {"text", "id", "trained", "rule"}
    planned = run(recipe, "--dry-run", "--data.max_length", "128")
    assert planned.returncode == 0
    assert "not yet prepared" in planned.stderr
    assert not (recipe.parent / "cache").exists()


def test_bad_input_is_one_line_and_its_code(recipe: Path) -> None:
    with (recipe.parent / "rows.jsonl").open("a") as file:
        file.write('{"text": "a", "text": "b"}\n')
    failed = run(recipe, "--json")
    assert failed.returncode == 3
    assert "rows.jsonl:21:15: duplicate key 'text'" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert json.loads(failed.stdout)["exit_code"] == 3
    skipped = run(recipe, "--data.on_bad_row", "skip")
    assert skipped.returncode == 0
    assert "1 bad rows skipped" in skipped.stderr
    missing = run(recipe, "--data.train", "none.jsonl")
    assert missing.returncode == 3
    assert "no such file" in missing.stderr
