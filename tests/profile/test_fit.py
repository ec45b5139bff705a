"""The choice is the fastest of what fits, at the same tokens a step; a pipe carries it into training."""

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import forked
from tests.fixtures.commands import tuner
from tests.profile.test_measure import recipe  # noqa: F401 - a fixture
from tests.profile.test_predict import foreseen, predicted, wish
from tuner.errors import MemoryLimitError
from tuner.profile import fit as fitting
from tuner.profile.devices import find_device
from tuner.profile.fit import fit
from tuner.profile.predict import Target
from tuner.profile.report import sentence, table
from tuner.profile.search import Choice
from tuner.runtime.dist import RankInfo
from tuner.setup.settled import MICRO, changed

ROOMY = 16 << 30


def fitted(
    directory: Path, limit: int, processes: int = 1, device: str = "cpu", **sections: dict[str, Any]
) -> list[Choice]:
    sections["train"] = {"micro_batch_size": 1, "gradient_checkpointing": "none", **sections.get("train", {})}
    target = Target(find_device(device), RankInfo(0, processes, 0, processes), limit)
    return fit(wish(directory, **sections), target).choices


@pytest.mark.slow
def test_where_nothing_fits_the_closest_is_named(tmp_path: Path) -> None:
    with pytest.raises(MemoryLimitError, match="nothing fits in 1.0 MiB") as caught:
        fitted(tmp_path, 1 << 20)
    assert caught.value.exit_code == 5


@pytest.mark.slow
def test_where_predictions_are_unverified_the_closest_is_found(tmp_path: Path) -> None:
    target = Target(find_device("rtx4090-24g"), RankInfo(), 1 << 20)
    found = fit(wish(tmp_path), target).choices
    assert len(found) == 1 and not found[0].fits and found[0].prediction.warnings


@pytest.mark.slow
def test_shorter_rows_keep_the_tokens_of_a_step(tmp_path: Path) -> None:
    model = {"config": {"max_position_embeddings": 1024}}
    again = {"gradient_checkpointing": "full"}
    short = {"data": {"max_length": 512}, "train": {**again, "global_batch_size": 16}, "model": model}
    limit = round(predicted(wish(tmp_path, **short)).peak_bytes * 1.02) + 1000
    found = fitted(tmp_path, limit, data={"max_length": 1024}, train=again, model=model)
    best = found[0].overrides
    assert best["data.max_length"] < 1024
    assert best["data.max_length"] * best["train.global_batch_size"] == 1024 * 8


@pytest.mark.slow
def test_ways_of_sharding_are_tried_with_several_processes(tmp_path: Path) -> None:
    found = fitted(tmp_path, ROOMY, processes=4, device="h100-80g")  # where copies are faster than shards
    assert {choice.overrides.get("parallel.shard") for choice in found} == {"full", "none"}
    assert all(8 % (4 * choice.overrides.get("train.micro_batch_size", 1)) == 0 for choice in found)


def test_words() -> None:
    said = foreseen(processes="2x2")
    assert sentence(said).startswith("peak ") and "in each of 4 processes" in sentence(said)
    assert "fits in 16.00 GiB" in sentence(said) and "roughly" in sentence(said)
    lines = table(said)
    assert lines[0][:2] == ["MiB", "peak"] and lines[-1][0] == "total"
    assert {"weights", "gathered weights", "process"} <= {line[0] for line in lines}


def piped(where: Path, limit: str, *flags: str) -> subprocess.CompletedProcess[str]:
    with forked.as_words() as (words, handle):
        python = f"{shlex.join(words)} -m tuner"
        line = f"set -o pipefail; {python} profile r.yaml --fit {limit} --json | {python} train r.yaml --overrides - "
        command = ["bash", "-c", line + " ".join(flags)]
        return subprocess.run(command, cwd=where, capture_output=True, text=True, check=False, pass_fds=[handle])


def test_the_choice_is_piped_into_training(recipe: Path) -> None:  # noqa: F811
    where = recipe.parent
    done = piped(where, "16GiB", "--train.duration", "'1 steps'", "--train.gradient_checkpointing", "full")
    assert done.returncode == 0, done.stderr
    resolved = (where / "runs/r/recipe.resolved.yaml").read_text()
    assert "micro_batch_size: 4" in resolved and "gradient_checkpointing: full" in resolved
    first = tuner("profile", "r.yaml", "--fit", "much", "--json", cwd=where)
    assert first.returncode == 2  # what a shell with pipefail says
    failed = tuner("train", "r.yaml", "--overrides", "-", "--json", "--name", "other", cwd=where, stdin=first.stdout)
    document = json.loads(failed.stdout)
    assert failed.returncode == document["exit_code"] == 2 and document["command"] == "profile"
    assert not (where / "runs/other").exists()


def test_an_answer_is_kept_for_the_same_question_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wished, target = wish(tmp_path), Target(find_device("h100-80g"), RankInfo(), 1 << 34)
    key = fitting.key_of(wished, target)
    flags = "--train.micro_batch_size 2"
    answer = fitting.KeptAnswer([["", "peak"]], flags, {"verdict": "fits"}, [], {MICRO: 2}, 3, 1.5)
    assert fitting.known(key, wished) is None
    fitting.keep(key, wished, answer)
    assert fitting.known(key, wished) == answer
    assert fitting.key_of(wished.model_copy(update={"name": "other"}), target) == key
    monkeypatch.setattr(fitting, "source_hash", lambda parts: "other")
    others = [fitting.key_of(wished, target)]
    monkeypatch.undo()
    others += [fitting.key_of(changed(wished, {"data.max_length": 128}), target)]
    others += [fitting.key_of(wished, replace(target, limit_bytes=1 << 33))]
    assert key not in others and len(set(others)) == 3


@pytest.mark.slow
def test_prediction_and_choice_as_documents(recipe: Path) -> None:  # noqa: F811
    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        done = tuner("profile", str(recipe), "--json", *arguments, cwd=recipe.parent)
        return done.returncode, json.loads(done.stdout)

    code, document = run("--device", "h100-80g", "--processes", "2", "--train.precision", "bf16")
    assert code == 0 and document["metrics"]["verdict"] == "fits" and document["metrics"]["processes"] == 2
    assert document["metrics"]["memory"]["peak"]["parts"]["parameters"] > 0
    code, document = run("--device", "h100-80g", "--memory", "600MiB", "--output", "page")
    assert code == 0 and document["metrics"]["verdict"] == "does not fit" and not document["metrics"]["verified"]
    assert any("unverified" in warning for warning in document["warnings"])
    assert json.loads((recipe.parent / "page" / "report.json").read_text())["predicted"]["verified"] is False
    assert run("--measure", "1", "--processes", "2")[0] == 2
    first, again = run("--fit", "16GiB"), run("--fit", "16GiB")
    assert again[1]["metrics"].pop("searched_s") == 0 < first[1]["metrics"].pop("searched_s")
    assert first == again
