
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.caches import new_cache
from tests.data import tiny
from tests.fixtures import commands, forked
from tests.fixtures.processes import children, wait_until_gone
from tuner.data.building.cache import collect
from tuner.data.prepared import open_prepared


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNER_CACHE", str(new_cache(tmp_path / "cache")))
    tiny.write_directory(tmp_path / "model")
    tiny.write_rows(tmp_path / "rows.jsonl", [tiny.chat(f"question {i}", f"answer {i}") for i in range(20)])
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {name_or_path: ./model}\ndata: {train: rows.jsonl, eval: 2 documents}\n")
    return path


def run(recipe: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return commands.tuner("prepare-data", *arguments, cwd=recipe.parent, code=code)


def test_the_path_goes_to_stdout_and_the_table_to_stderr(recipe: Path) -> None:
    first = run(recipe)
    (path,) = first.stdout.splitlines()
    assert (Path(path) / "manifest.json").is_file()
    assert "18 documents" in first.stderr
    assert "masks     verified for all 20 rows used" in first.stderr
    again = run(recipe, "recipe.yaml", "--json")
    document = json.loads(again.stdout)
    assert (document["status"], document["artifacts"]["path"], document["artifacts"]["cached"]) == ("ok", path, True)
    assert "already prepared" in again.stderr
    assert document["metrics"]["train"]["documents"] == 18


def test_explain_marks_what_is_trained_and_builds_nothing(recipe: Path) -> None:
    shown = run(recipe, "--explain", "1")
    tokens = [json.loads(line) for line in shown.stdout.splitlines()]
    assert set(tokens[0]) == {"file", "line", "document", "token", "text", "id", "trained", "kept", "rule"}
    assert "".join(token["text"] for token in tokens if token["trained"]) == "answer 0<|im_end|>"
    assert {(token["trained"], token["rule"]) for token in tokens} == {(True, "assistant turn"), (False, "prompt")}
    first, tokenizer = tiny.chat("question 0", "answer 0"), tiny.tokenizer()
    assert [token["id"] for token in tokens] == tokenizer.encode(tokenizer.render(first["messages"]))
    assert (tokens[0]["line"], [token["token"] for token in tokens]) == (1, list(range(len(tokens))))
    rows = json.loads(run(recipe, "--explain", "2", "--json").stdout)["artifacts"]["rows"]
    assert len(rows) == 2
    assert set(rows[0][0]) == {"text", "id", "trained", "kept", "rule"}
    assert "not yet prepared" in run(recipe, "--dry-run", "--data.max_length", "128").stderr
    assert [path.name for path in (recipe.parent / "cache").iterdir()] == ["tokenizers"]


def test_bad_input_is_one_line_and_its_code(recipe: Path) -> None:
    with (recipe.parent / "rows.jsonl").open("a") as file:
        file.write('{"text": "a", "text": "b"}\n')
    failed = run(recipe, "--json", code=3)
    assert "rows.jsonl:21:15: duplicate key 'text'" in failed.stderr
    assert json.loads(failed.stdout)["exit_code"] == 3
    (recipe.parent / "written.jsonl").write_text(json.dumps(tiny.chat("say <|im_end|>", "a")) + "\n")
    hint = "write tokenizer.special_tokens_in_text: escape; or fix the row, or write data.on_bad_row: skip"
    assert hint in run(recipe, "--data.train", "written.jsonl", code=3).stderr
    assert "1 bad row skipped (5%)" in run(recipe, "--data.on_bad_row", "skip").stderr


def test_check_builds_nothing_and_says_with_its_code_what_is_missing(recipe: Path) -> None:
    missing = run(recipe, "--check", "--json", code=3)
    assert "its documents must be encoded and packed" in json.loads(missing.stdout)["error"]["message"]
    assert [path.name for path in (recipe.parent / "cache").iterdir()] == ["tokenizers"]
    path = run(recipe).stdout
    assert run(recipe, "--check").stdout == path
    assert "its rows must be packed" in run(recipe, "--check", "--data.max_length", "77", code=3).stderr


def test_the_report_has_every_figure(recipe: Path) -> None:
    done = run(recipe, "--json")
    metrics = json.loads(done.stdout)["metrics"]
    assert metrics["bytes"] == (recipe.parent / "rows.jsonl").stat().st_size
    assert metrics["megabytes_per_s"] > 0
    assert metrics["fast_path"] == {"documents": 0, "share": 0.0, "reason": None}
    assert metrics["masks"] == {"proven": 20, "rows": 20}
    assert set(metrics["train"]) == {
        "rows", "documents", "tokens", "trained", "longest", "duplicates", "skipped", "dropped", "packed_rows",
        "packed_documents", "packed_tokens", "packed_trained", "fill", "dropped_rows", "truncated", "split",
        "dropped_pieces", "dropped_piece_tokens",
    }  # fmt: skip
    (source,) = metrics["sources"]["train"]
    assert (source["path"], source["documents"]) == (str(recipe.parent / "rows.jsonl"), 20)
    assert (source["sampled"], source["repeated"]) == (20, 0)
    assert re.search(r"^done      [\d.]+ kB in [\d.]+ s$", done.stderr, re.MULTILINE)
    again = json.loads(run(recipe, "--json").stdout)["metrics"]
    assert "megabytes_per_s" not in again
    assert again["train"] == metrics["train"]


def test_shares_are_shown_source_by_source(recipe: Path) -> None:
    recipe.write_text(
        "model: {name_or_path: ./model}\ndata: {cache_dir: mine, train: [{path: rows.jsonl, weight: 0.5}, "
        "{path: rows.jsonl, weight: 1.25}]}\n"
    )
    done = run(recipe)
    assert Path(done.stdout.strip()).parents[1] == recipe.parent / "mine"
    assert "20 documents  10 sampled" in done.stderr
    assert "20 documents  5 repeated" in done.stderr


COMMAND = """
import sys
from tuner.data.building import documents, spec
documents.BUNDLE_BYTES = spec.MANY_BYTES = 1  # every file is work of its own
from tuner.cli.main import main
main(sys.argv[1:])
"""


@pytest.fixture
def many_files(recipe: Path) -> Path:
    """A recipe of enough small files that two workers are busy for a while."""
    return of_files(recipe, 24, rows_each=400)


def of_files(recipe: Path, count: int, rows_each: int) -> Path:
    """Have a recipe take so many files of so many rows with two workers."""
    (recipe.parent / "rows").mkdir()
    for number in range(count):
        rows = [tiny.chat(f"question {number} {i}", f"answer {i}") for i in range(rows_each)]
        tiny.write_rows(recipe.parent / "rows" / f"{number:02}.jsonl", rows)
    recipe.write_text("model: {name_or_path: ./model}\ndata: {train: rows, eval: 2%, workers: 2}\n")
    return recipe


def start(recipe: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMAND, "prepare-data", str(recipe)]
    return forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def workers_of(pid: int) -> list[int]:
    """Wait until the first process that a command started is two workers; returns their process ids."""
    deadline = time.monotonic() + 60
    while True:
        workers = [worker for first in children(pid) for worker in children(first)]
        if len(workers) == 2:
            return workers
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGKILL))],
)
def test_a_signal_leaves_nothing_behind_that_counts(many_files: Path, number: signal.Signals) -> None:
    cache = many_files.parent / "cache"
    with start(many_files) as command:
        workers = workers_of(command.pid)
        command.send_signal(number)
        out, err = command.communicate(timeout=60)
    assert out == ""
    assert "Traceback" not in err
    assert command.returncode == (-number if number == signal.SIGKILL else 130)
    wait_until_gone(workers)
    assert not [*cache.glob("encoded/[0-9a-f]*"), *cache.glob("prepared/[0-9a-f]*")]
    assert len(collect(cache, dry_run=True)) == (2 if number == signal.SIGKILL else 0)
    with start(many_files) as command:
        path, err = command.communicate(timeout=120)
    assert command.returncode == 0, err
    open_prepared(Path(path.strip()), verify=True)
    assert collect(cache, dry_run=True) == []


def test_a_killed_worker_is_one_line_with_its_place(many_files: Path) -> None:
    with start(many_files) as command:
        for worker in workers_of(command.pid):
            os.kill(worker, signal.SIGKILL)
        out, err = command.communicate(timeout=60)
    assert (command.returncode, out) == (4, "")
    assert ".jsonl: a worker was killed by signal 9 while it encoded the rows from line 1 on" in err
    assert "data.workers" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_script_without_a_guard_is_not_run_again_by_workers(recipe: Path) -> None:
    several = of_files(recipe, 4, rows_each=20)
    script = recipe.parent / "script.py"
    script.write_text(
        "from tuner.data.building import documents, spec\ndocuments.BUNDLE_BYTES = spec.MANY_BYTES = 1\n"
        "from tuner import prepare_data\nprint('once')\n"
        f"print(prepare_data({str(several)!r}).path)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    once, path = done.stdout.splitlines()
    assert once == "once"
    open_prepared(Path(path), verify=True)


def test_one_of_explain_check_and_dry_run(recipe: Path) -> None:
    assert "give one of them" in run(recipe, "--check", "--explain", "1", code=2).stderr
