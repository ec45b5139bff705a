"""Real `tuner train`, `resume` and `export-hf`: results, exit codes, signals and pipelines."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fixtures import commands, forked, trainings
from tests.fixtures.tables import cases
from tuner.checkpoint.open import newest
from tuner.cli.work.train import outcome_of
from tuner.config.load import load_recipe
from tuner.run.changes import Changes, changes
from tuner.run.options import RunResult
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.lock import FileLock
from tuner.setup.resolve import resolve


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A directory with a tiny model, rows and the recipe r.yaml (LoRA, 18 steps)."""
    trainings.prepare(tmp_path, 1)
    return tmp_path


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a directory with a run that was stopped at step 5 of 8, and what may change of it once more in `kept`."""
    directory = tmp_path_factory.mktemp("stopped")
    trainings.prepare(directory, 1)
    shorten(directory)
    tuner(directory, "train", "r.yaml", "--train.stop_after", "5 steps", code=75)
    shutil.copytree(directory / "runs", directory / "kept" / "runs")
    shutil.copy(directory / "rows.jsonl", directory / "kept")
    return directory


@pytest.fixture
def stopped(stopped_once: Path) -> Path:
    """That directory as it was, in its place: a run knows where its data is."""
    shutil.rmtree(stopped_once / "runs")
    shutil.copytree(stopped_once / "kept", stopped_once, dirs_exist_ok=True)
    return stopped_once


def environment(directory: Path) -> dict[str, str]:
    return commands.environment(directory, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def tuner(directory: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return commands.tuner(*words, cwd=directory, code=code, **environment(directory))


def start_shell(directory: Path, script: str) -> subprocess.Popen[str]:
    """Start a shell script in which `tuner` is the command."""
    with forked.as_words() as (words, handle):
        return subprocess.Popen(
            ["bash", "-c", f'set -o pipefail; tuner() {{ {shlex.join(words)} -m tuner "$@"; }}; {script}'],
            cwd=directory,
            env=environment(directory),
            pass_fds=[handle],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def shell(directory: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in which `tuner` is the command."""
    process = start_shell(directory, script)
    out, err = process.communicate()
    return subprocess.CompletedProcess(script, process.returncode, out, err)


def files_of(directory: Path) -> list[str]:
    """All files but the lock, which is never removed."""
    return sorted(str(p) for p in directory.rglob("*") if p.is_file() and p.name != "lock")


def shorten(workplace: Path) -> None:
    """Have the recipe end after eight steps."""
    recipe = workplace / "r.yaml"
    recipe.write_text(recipe.read_text().replace("3 epochs", "8 steps"))


def test_a_run_from_start_to_end_and_again(workplace: Path) -> None:
    first = tuner(workplace, "train", "r.yaml", "--logging.level", "info")
    run = workplace / "runs" / "r"
    assert first.stdout == f"{run}\n"
    assert re.search(r"plan +45 rows / 8 = 6 steps an epoch, 3 epochs = 18 steps", first.stderr), first.stderr
    assert re.search(r"warning +the whole run is 18 steps, which teach a model little; write train\.gl", first.stderr)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 19))
    assert {"recipe.yaml", "recipe.resolved.yaml", "run.json", "tokenizer", "model_config"} <= set(os.listdir(run))
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], len(record["launches"])) == ("finished", 1)
    last = newest(run / "checkpoints")
    assert last is not None
    names = {kind: {key.split("/", 1 + (kind == "optimizer"))[-1] for key in last.index() if key.startswith(kind)}
             for kind in ("model", "optimizer")}  # fmt: skip
    assert names["model"] == names["optimizer"] and all(".lora_" in name for name in names["model"]), "nothing frozen"
    before = sorted((str(p), p.stat().st_mtime_ns) for p in run.rglob("*"))
    assert tuner(workplace, "train", "r.yaml").stdout == f"{run}\n"
    assert tuner(workplace, "resume", "runs/r").stdout == f"{run}\n"
    assert sorted((str(p), p.stat().st_mtime_ns) for p in run.rglob("*")) == before, "a finished run was touched"
    other = tuner(workplace, "train", "r.yaml", "--optimizer.lr", "2e-3", code=2)
    assert "optimizer.lr 0.001 -> 0.002" in other.stderr
    assert "--name" in other.stderr


def test_the_resolved_recipe_is_the_recipe_without_auto(workplace: Path) -> None:
    loaded = load_recipe(workplace / "r.yaml")
    resolved = resolve(loaded.recipe, 64, RankInfo())
    dumped = resolved.recipe.model_dump(mode="json")
    dumped_here = {k: v for k, v in dumped.items() if k not in ("data", "export", "ladder")}  # not of this run
    assert "auto" not in json.dumps(dumped_here)
    assert changes(dumped, loaded.recipe.model_dump(mode="json")) == Changes()
    changed = loaded.recipe.model_copy(update={"seed": 1}).model_dump(mode="json")
    assert changes(dumped, changed).refuse == ("seed 42 -> 1",)


@pytest.mark.slow
def test_stopping_after_some_steps_and_resuming_gives_the_unbroken_run(workplace: Path) -> None:
    shorten(workplace)
    tuner(workplace, "train", "r.yaml", "--name", "whole")
    stopped = tuner(workplace, "train", "r.yaml", "--train.stop_after", "5 steps", "--json", code=75)
    document = commands.document(stopped, 75)
    assert (document["status"], document["metrics"]["step"]) == ("stopped", 5)
    refused = tuner(workplace, "train", "r.yaml", code=2)
    assert "unfinished run, at step 5" in refused.stderr
    assert "tuner resume" in refused.stderr
    tuner(workplace, "train", "r.yaml", "--resume", "auto")
    runs = workplace / "runs"
    assert trainings.outcome(runs / "r") == trainings.outcome(runs / "whole")


def test_the_pipeline_gives_a_valid_document(workplace: Path) -> None:
    shorten(workplace)
    done = shell(workplace, "tuner train r.yaml --json -v | tuner export-hf - --json -v")
    document = commands.document(done)
    assert document["command"] == "export-hf"
    assert (Path(document["artifacts"]["path"]) / "model.safetensors").is_file()
    by_path = shell(workplace, "tuner resume runs/r | tuner export-hf -")
    assert by_path.stdout.strip() == document["artifacts"]["path"], by_path.stderr


@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_stops_the_pipeline_with_75(workplace: Path, sent: signal.Signals) -> None:
    long = "tuner train r.yaml --json --train.duration '100000 steps' --logging.console_every '1 s'"
    process = start_shell(workplace, f"{long} | tuner export-hf - --json")
    metrics = workplace / "runs" / "r" / "metrics.jsonl"
    for _ in range(1200):
        if metrics.is_file() and metrics.stat().st_size:
            break
        time.sleep(0.05)
    holder = re.search(r"process (\d+)", FileLock(workplace / "runs" / "r" / "lock").holder())
    assert holder is not None
    os.kill(int(holder[1]), sent)
    out, err = process.communicate(timeout=60)
    document = commands.document(subprocess.CompletedProcess("", process.returncode, out, err), 75)
    assert (document["command"], document["status"]) == ("train", "stopped")
    found = newest(workplace / "runs" / "r" / "checkpoints")
    assert found is not None
    assert found.step == document["metrics"]["step"]


SIGNALLED = """
import os, signal, sys
import tuner.run.launch as launching
def launch(*given, **named):
    real(*given, **named) if sys.argv[1] == "after" else None
    os.kill(os.getpid(), signal.SIGTERM)
real, launching.launch = launching.launch, launch
from tuner.cli.main import main
main(sys.argv[2:])
"""


@pytest.mark.slow("before-words0-75-5")
@pytest.mark.parametrize(("when", "words", "code", "step"), cases(__file__, "a_signal_around_the_steps"))
def test_a_signal_around_the_steps_ends_with_75_where_the_command_would_go_on(
    stopped: Path, when: str, words: list[str], code: int, step: int | None
) -> None:
    command = [sys.executable, "-c", SIGNALLED, when, *words, "--json"]
    done = forked.run(command, cwd=stopped, env=environment(stopped), capture_output=True, text=True)
    document = commands.document(done, code)
    assert document["metrics"].get("step") == step, done.stderr
    assert document["next"] == (f"tuner resume runs/{Path(document['artifacts']['path']).name}" if step else None)
    last = "stopped   step" if step else "error: interrupted"
    assert done.stderr.splitlines()[-1].startswith(last) and "Traceback" not in done.stderr


def test_a_failed_training_fails_the_pipeline_with_its_code(workplace: Path) -> None:
    (workplace / "rows.jsonl").write_text("")
    done = shell(workplace, "tuner train r.yaml --json | tuner export-hf - --json")
    assert commands.document(done, 3)["status"] == "failed"


@pytest.mark.slow("rm -r model-3-model")
@pytest.mark.parametrize(("break_it", "code", "says"), cases(__file__, "bad_input_is_one_clear_error"))
def test_bad_input_is_one_clear_error(workplace: Path, break_it: str, code: int, says: str) -> None:
    subprocess.run(["bash", "-c", break_it], cwd=workplace, check=True)
    before = files_of(workplace / "runs")
    done = tuner(workplace, "train", "r.yaml", code=code)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr
    assert says in done.stderr
    assert done.stdout == ""
    assert files_of(workplace / "runs") == before


def test_wrong_places_to_resume(workplace: Path) -> None:
    assert "no such directory" in tuner(workplace, "resume", "runs/none", code=2).stderr
    assert "holds" in tuner(workplace, "resume", "model", code=2).stderr
    assert "holds no run" in tuner(workplace, "train", "r.yaml", "--resume", "must", code=2).stderr
    assert "not prepared" in tuner(workplace, "train", "r.yaml", "--no-prepare", code=3).stderr


def test_a_dry_run_prints_the_plan_and_trains_nothing(workplace: Path) -> None:
    done = tuner(workplace, "train", "r.yaml", "--dry-run", "--json")
    assert commands.document(done)["metrics"]["total_steps"] == 18
    assert not (workplace / "runs").exists()


def test_another_data_set_is_refused_on_resume(stopped: Path) -> None:
    rows = (stopped / "rows.jsonl").read_text()
    (stopped / "rows.jsonl").write_text(rows.replace("ab", "ba"))
    done = tuner(stopped, "resume", "runs/r", code=3)
    assert re.search(r"the data of \S*rows\.jsonl changed since .*--reset data", done.stderr, re.DOTALL)
    (stopped / "rows.jsonl").write_text(rows)
    tuner(stopped, "resume", "runs/r")


def test_two_launches_on_one_run_have_one_winner(stopped: Path) -> None:
    held = forked.Popen(
        [sys.executable, "-c", "import sys, time; from tuner.runtime.lock import FileLock; from pathlib import Path\n"
         "with FileLock(Path('runs/r/lock')): print('held', flush=True); time.sleep(60)"],
        cwd=stopped, env=environment(stopped), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert held.stdout is not None
        assert held.stdout.readline() == "held\n"
        assert str(held.pid) in tuner(stopped, "resume", "runs/r", code=4).stderr
    finally:
        held.kill()
        held.communicate()
    tuner(stopped, "resume", "runs/r")


@pytest.mark.parametrize(
    ("best", "facts", "said", "export"), cases(__file__, "the_end_of_a_run_proposes_an_export_that_it_can_have")
)
def test_the_end_of_a_run_proposes_an_export_that_it_can_have(
    best: int | None,
    facts: dict[str, bool] | None,
    said: str,
    export: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    noted = None if best is None else {"metric": "eval/loss", "step": best, "value": 1.453}
    checkpoint = None if facts is None else tmp_path
    (tmp_path / "manifest.json").write_text(json.dumps({"meta": facts}))
    ended = RunResult(Path("r"), "finished", 6, 9, checkpoint, {"eval_loss": 1.6, "eval_step": 6, "best": noted})
    assert outcome_of(ended, Console()).next == export
    assert capsys.readouterr().err.rstrip().endswith(said)


@pytest.mark.slow
def test_a_run_without_a_final_checkpoint_is_finished_too(workplace: Path) -> None:
    shorten(workplace)
    flags = ("--checkpoint.at_end", "false", "--checkpoint.every", "never", "--eval.at_end", "false")
    tuner(workplace, "train", "r.yaml", *flags)
    assert newest(workplace / "runs" / "r" / "checkpoints") is None
    again = tuner(workplace, "train", "r.yaml", *flags, "--logging.level", "info")
    assert "already trained: 8 steps" in again.stderr
    refused = tuner(workplace, "export-hf", "runs/r", code=3).stderr
    assert "the run has no checkpoint" in refused
    assert "tuner resume" in refused and "--checkpoint.at_end true" in refused
    tuner(workplace, "resume", "runs/r", "--checkpoint.at_end", "true")
    assert newest(workplace / "runs" / "r" / "checkpoints") is not None


def test_a_run_is_never_started_over_silently(stopped: Path) -> None:
    run = stopped / "runs" / "r"
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{}")
    metrics = (run / "metrics.jsonl").read_text()
    for words in (["resume", "runs/r"], ["train", "r.yaml", "--resume", "auto"]):
        assert "none of its checkpoints is valid" in tuner(stopped, *words, code=3).stderr
    assert (run / "metrics.jsonl").read_text() == metrics


@pytest.mark.slow
def test_a_smaller_micro_batch_goes_on_with_the_same_batches(workplace: Path) -> None:
    shorten(workplace)
    tuner(workplace, "train", "r.yaml", "--train.stop_after", "5 steps", code=75)
    tuner(workplace, "train", "r.yaml", "--resume", "auto", "--train.micro_batch_size", "1")
    lines = [json.loads(line) for line in (workplace / "runs" / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))


def test_prepared_data_of_another_recipe_are_refused(workplace: Path) -> None:
    other = tuner(workplace, "prepare-data", "r.yaml", "--data.max_length", "32").stdout.strip()
    assert "not prepared by this recipe" in tuner(workplace, "train", "r.yaml", "--prepared", other, code=3).stderr
    own = shell(workplace, "tuner prepare-data r.yaml | tuner train r.yaml --prepared - --dry-run")
    assert own.returncode == 0, own.stderr


@pytest.mark.slow
def test_a_run_is_proven_to_go_on_exactly_in_processes_of_its_own(stopped: Path) -> None:
    run = stopped / "runs" / "r"
    document = json.loads(tuner(stopped, "verify-resume", str(run), "--steps", "1", "--json").stdout)
    assert document["artifacts"] == {"path": str(run)}
    assert (document["metrics"]["from_step"], document["metrics"]["steps"]) == (5, 2)
