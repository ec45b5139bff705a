"""Exports beside a run: made from its checkpoints, kept, cut short, made up for, and never the run's loss; in real runs
they are the bytes of `tuner export-hf`.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.caches import new_cache
from tests.fixtures import forked, trainings
from tuner.api.exports import export_hf
from tuner.config.load import load_recipe
from tuner.errors import DataError, ExitCode, MachineError, RecipeError, VerificationError
from tuner.run.launch import launch as launch_run
from tuner.run.options import LaunchOptions, RunResult
from tuner.run.tasks.export import NICENESS, Exporter, ExportProcess
from tuner.rundir.checkpoints import CheckpointHold, is_export, link_latest, newest_export, prune, prune_exports
from tuner.runtime.console import Console
from tuner.runtime.files import json_bytes
from tuner.runtime.warned import Warned, collected
from tuner.train.plan import Cadence

OPTIONS = {"dtype": "bf16", "adapter": "none", "shard_size": 5 * 10**9}
# Stands for the command: writes what it is told to the target and reports it, fails, or takes its time.
CHILD = """
import json, pathlib, sys, time
what, output, checkpoint = sys.argv[1:]
if what == "slow":
    print("here", file=sys.stderr, flush=True)
    time.sleep(60)
if what == "dies":
    raise SystemExit("no document")
if what == "wrong":
    error = {"type": "VerificationError", "message": "not the trained model", "hint": "look"}
    print(json.dumps({"status": "failed", "exit_code": 6, "warnings": ["a probe is odd"], "error": error}))
    raise SystemExit(6)
target = pathlib.Path(output)
target.mkdir(parents=True)
source = {"step": int(target.name.removeprefix("step-")), "checkpoint": checkpoint}
facts = {"source": source, "export": {"dtype": "bf16", "adapter": "none", "shard_size": 5 * 10**9}}
(target / "tuner.json").write_text(json.dumps(facts))
print(json.dumps({"status": "ok", "metrics": {"bytes": 7, "seconds": 0.1}}))
"""


@pytest.fixture
def behaviour(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the next exports do; the last word counts for all that follow."""
    words: list[str] = []

    def command(self: ExportProcess) -> list[str]:
        what = words.pop(0) if len(words) > 1 else words[0]
        return [sys.executable, "-S", "-c", CHILD, what, str(self.output), str(self.held.path)]

    monkeypatch.setattr(ExportProcess, "_command", command)
    return words


class Run:
    """A run directory as an exporter sees it."""

    def __init__(self, directory: Path, **section: object) -> None:
        self.path = directory / "run"
        text = f"model: {{name_or_path: a/b}}\ndata: {{train: x}}\noutput_dir: {self.path}\nexport: {section}\n"
        (directory / "r.yaml").write_text(text.replace("'", ""))
        self.recipe = load_recipe(directory / "r.yaml", cwd=directory).recipe
        self.warnings: list[str] = []

    def exporter(self, every: int = 2) -> Exporter:
        console = Console(main=False)
        console.warn = self.warnings.append  # type: ignore[method-assign]
        exporter = Exporter(self.recipe, console)
        exporter.start(Cadence((every,)), console, self.path / "none")
        return exporter

    def saved(self, exporter: Exporter, step: int) -> None:
        checkpoint = self.path / "checkpoints" / f"step-{step}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        exporter.saved(checkpoint, step)

    def started(self, exporter: Exporter, step: int) -> None:
        """A launch begins with a checkpoint of `step` there."""
        (self.path / "checkpoints" / f"step-{step}").mkdir(parents=True, exist_ok=True)
        exporter.start(exporter._every, exporter.console, self.path / "checkpoints")

    def result(self, step: int, status: str = "finished") -> RunResult:
        return RunResult(self.path, status, step, 9, self.path / "checkpoints" / f"step-{step}", {})  # type: ignore[arg-type]

    def exports(self) -> list[str]:
        return sorted(path.name for path in (self.path / "exports").iterdir())


def test_due_checkpoints_are_exported_linked_and_pruned(tmp_path: Path, behaviour: list[str]) -> None:
    behaviour.append("right")
    run = Run(tmp_path, every="2 steps", keep=2)
    with run.exporter() as exporter:
        for step in (2, 3, 4, 6):
            run.saved(exporter, step)
            exporter.finish(run.result(step), at_end=False)
            if step % 2 == 0:
                assert os.readlink(run.path / "exports" / "latest") == f"step-{step}"
    assert run.exports() == ["latest", "step-4", "step-6"]
    assert run.warnings == []


def test_the_base_of_a_quantised_run_is_handed_on(tmp_path: Path) -> None:
    run = Run(tmp_path, every="2 steps")
    recipe = {
        "model": {"name_or_path": "a/b", "quantize": "nf4"}, "adapter": {"kind": "lora"}, "data": {"train": "x"},
        "output_dir": str(run.path),
    }  # fmt: skip
    exact = {"keep_fp32": ["lm_head", "norm"]}
    for section, words in (({"base": "original"}, ["--base", "original"]), (exact, ["--base", "auto"])):
        run.recipe = load_recipe({**recipe, "export": {"every": "2 steps", **section}}).recipe
        with run.exporter() as exporter:
            assert exporter.options["base"] == words[1]
            run.saved(exporter, 2)
            ((process, _),) = exporter._jobs
            assert process._command()[-5:-3] == words
            assert exporter.options.get("keep_fp32") == section.get("keep_fp32")
    assert process._command()[-7:-5] == ["--keep-fp32", "lm_head,norm"]
    run.recipe = load_recipe({**recipe, "export": {"adapter": "keep"}}).recipe
    assert "base" not in run.exporter().options


def test_the_last_checkpoint_is_exported_once(tmp_path: Path, behaviour: list[str]) -> None:
    behaviour.append("right")
    run = Run(tmp_path, at_end="true")
    with run.exporter(2) as exporter:
        run.saved(exporter, 2)
        run.saved(exporter, 9)
        exporter.finish(run.result(9, "stopped"))
        exporter.finish(run.result(9))
        exporter.finish(run.result(9))
    assert run.exports() == ["latest", "step-2", "step-9"]
    with run.exporter() as exporter:
        behaviour[0] = "wrong"
        exporter.finish(run.result(9))


@pytest.mark.parametrize(("at_end", "above"), [(True, 0), (False, NICENESS)])
def test_what_the_run_waits_for_is_in_its_own_priority_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_end: bool, above: int
) -> None:
    code = CHILD.replace("target = ", "import os; time.sleep(0.5); nice = os.nice(0); target = ", 1)
    code = code.replace(": 7,", ": nice,")
    words = [sys.executable, "-S", "-c", code, "right"]
    monkeypatch.setattr(ExportProcess, "_command", lambda self: [*words, str(self.output), str(self.held.path)])
    run, said, found = Run(tmp_path, at_end="true"), list[str](), list[int]()
    (run.path / "checkpoints" / "step-9").mkdir(parents=True)
    monkeypatch.setattr("tuner.run.tasks.export.gib", lambda nice: found.append(nice) or "")
    with run.exporter() as exporter:
        exporter.console.say = lambda label, text: said.append(f"{label} {text}")  # type: ignore[method-assign]
        if not at_end:
            exporter._add(run.path / "checkpoints" / "step-9")
            exporter._jobs[0][1].result()
        exporter.finish(run.result(9))
    assert found == [min(os.getpriority(os.PRIO_PROCESS, 0) + above, 19)]
    waits = [line for line in said if line.startswith("export training is over, step-9 is being exported: ")]
    assert len(waits) == at_end


def test_checkpoints_that_were_being_exported_when_their_turn_came_go_at_the_end(
    tmp_path: Path, behaviour: list[str]
) -> None:
    behaviour.append("right")
    run = Run(tmp_path, every="2 steps")
    checkpoints = run.path / "checkpoints"
    with run.exporter() as exporter:
        exporter.start(Cadence((2,)), exporter.console, run.path / "none", lambda: len(prune_all_but(checkpoints)))
        for step in (2, 3, 4):
            run.saved(exporter, step)
        exporter.finish(run.result(4))
    assert [path.name for path in checkpoints.iterdir()] == ["step-4"]


def test_a_failed_export_is_told_at_once_and_raised_when_the_run_is_complete(
    tmp_path: Path, behaviour: list[str]
) -> None:
    behaviour += ["wrong", "right"]
    run = Run(tmp_path, every="2 steps", at_end="true")
    with run.exporter() as exporter:
        run.saved(exporter, 2)
        while len(run.warnings) < 2:
            time.sleep(0.01)
        assert run.warnings == [
            "export of step-2: a probe is odd",
            "export of step-2: not the trained model; training continues",
        ]
        run.saved(exporter, 9)
        with pytest.raises(VerificationError, match="export of step-2: not the trained model") as failure:
            exporter.finish(run.result(9))
    assert (failure.value.exit_code, failure.value.hint) == (6, "look")
    assert run.exports() == ["latest", "step-9"]


def test_an_export_that_dies_names_its_log(tmp_path: Path, behaviour: list[str]) -> None:
    behaviour.append("dies")
    run = Run(tmp_path, every="2 steps")
    with run.exporter() as exporter:
        run.saved(exporter, 2)
        with pytest.raises(MachineError, match="ended with code 1") as failure:
            exporter.finish(run.result(2))
    assert (run.path / "logs" / "export.log").read_text() == "no document\n"
    assert str(run.path / "logs" / "export.log") in (failure.value.hint or "")


def test_a_stopped_run_ends_its_export_and_makes_up_for_it(tmp_path: Path, behaviour: list[str]) -> None:
    behaviour.append("slow")
    run = Run(tmp_path, every="2 steps")
    with run.exporter() as exporter:
        for step in (2, 3):
            run.saved(exporter, step)
        log = run.path / "logs" / "export.log"
        while not (log.exists() and log.read_text()):
            time.sleep(0.01)
        exporter.finish(run.result(3, "stopped"))
    assert [warning for warning in run.warnings if "cut short" in warning]
    behaviour[0] = "right"
    with run.exporter() as exporter:
        run.started(exporter, 3)
        exporter.finish(run.result(9), at_end=False)
    assert run.exports() == ["latest", "step-2"]
    behaviour[0] = "wrong"
    with run.exporter() as exporter:
        run.started(exporter, 3)
        exporter.finish(run.result(9), at_end=False)


def test_one_that_waits_gives_way_and_what_is_read_is_not_pruned(tmp_path: Path, behaviour: list[str]) -> None:
    behaviour.append("slow")
    run = Run(tmp_path, every="2 steps")
    checkpoints = run.path / "checkpoints"
    with run.exporter() as exporter:
        for step in (2, 4, 6):
            run.saved(exporter, step)
        while not any(process._process for process, _ in exporter._jobs):
            time.sleep(0.01)
        assert run.warnings == ["the export of step-4 is skipped: the one before it is not done yet"]
        (checkpoints / "step-9").mkdir()
        removed = prune_all_but(checkpoints)
        assert [path.name for path in removed] == ["step-4"]
        end = time.monotonic() + 30
        exporter._jobs[0][0].end()
        while len(prune_all_but(checkpoints)) == 0 and time.monotonic() < end:
            time.sleep(0.01)
    assert sorted(path.name for path in checkpoints.iterdir())[-1] == "step-9"


def prune_all_but(checkpoints: Path) -> list[Path]:
    """Prune as if the newest checkpoint, which is empty here, were valid."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tuner.rundir.checkpoints.problem_of", lambda path: None)
        return prune(checkpoints, 1)


def test_a_hold_ends_once(tmp_path: Path) -> None:
    hold = CheckpointHold(tmp_path)
    hold.close()
    hold.close()
    with pytest.raises(DataError, match="No such file"):
        CheckpointHold(tmp_path / "none")


def test_only_exports_with_the_same_options_are_counted_and_pruned(tmp_path: Path) -> None:
    for step in range(4):
        (tmp_path / f"step-{step}").mkdir()
        options = OPTIONS if step < 3 else OPTIONS | {"dtype": "fp32"}
        (tmp_path / f"step-{step}" / "tuner.json").write_bytes(
            json_bytes({"source": {"step": step}, "export": options})
        )
    (tmp_path / "step-9").mkdir()
    assert newest_export(tmp_path, OPTIONS) == 2
    link_latest(tmp_path, "step-0")
    prune_exports(tmp_path, 1, OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-0", "step-2", "step-3", "step-9"]
    assert is_export(tmp_path / "latest", 0, OPTIONS)


def test_a_link_that_cannot_be_made_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link_latest(tmp_path, "step-1")

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(MachineError, match="No space") as failure:
        link_latest(tmp_path, "step-2")
    assert failure.value.exit_code == ExitCode.ENVIRONMENT
    assert os.listdir(tmp_path) == ["latest"]
    assert os.readlink(tmp_path / "latest") == "step-1"


ROOT = Path(__file__).resolve().parents[3]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def launch(directory: Path, **flags: str) -> Path:
    flags = {"train__duration": "3 steps", "checkpoint__every": "500 steps", "export__dtype": "fp32"} | flags
    return launch_run(trainings.loaded(directory, **flags), LaunchOptions(level="error")).run_dir


@pytest.mark.usefixtures("forked_children")
def test_exports_of_a_run_are_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_CACHE", str(new_cache(tmp_path / "cache")))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    trainings.prepare(tmp_path, 1, layers=1)
    run = launch(tmp_path, export__every="2 steps", export__adapter="keep", export__shard_size="1MB")
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-2", "step-3"]
    assert sorted(path.name for path in (run / "exports").iterdir()) == ["latest", "step-2"]
    offline = export_hf(run / "checkpoints" / "step-2", tmp_path / "offline", "fp32", "keep", 10**6)
    assert contents(run / "exports" / "latest") == contents(offline.path)
    probes = [json.loads(line) for line in (run / "id_probes.jsonl").read_bytes().splitlines()]
    assert offline.id_probes == len(probes) > 50
    assert [probe["text"] for probe in probes[:2]] != ["", " "]  # rows come first
    assert probes[-1]["framed_ids"]
    (run / "exports" / "step-3").mkdir()
    (run / "exports" / "step-3" / "mine.txt").write_text("mine")
    warned = Warned()
    with (
        collected(warned, print),
        pytest.raises(RecipeError, match="export of step-3: .*exists and is not this export") as failed,
    ):
        launch(tmp_path, export__at_end="true")
    assert warned.texts == [f"{failed.value.message}; training continues"]
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert [path.name for path in (run / "exports" / "step-3").iterdir()] == ["mine.txt"]
    assert os.readlink(run / "exports" / "latest") == "step-2"


@pytest.mark.usefixtures("forked_children")
def test_a_hook_asks_for_an_export_and_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_CACHE", str(new_cache(tmp_path / "cache")))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    trainings.prepare(tmp_path, 1, layers=1)
    (tmp_path / "asks.py").write_text(
        "def ask(report, out):\n    if report.stage == 'export':\n        with open(out, 'a') as file:\n"
        "            file.write(f'{report.path}\\n')\n    if (report.stage, report.step) == ('step', 1):\n"
        "        return 'export'\n"
    )
    hook = {"use": f"{tmp_path}/asks.py:ask", "options": {"out": f"{tmp_path}/told"}}
    run = launch(tmp_path, export__at_end="true", export__adapter="keep", hooks=json.dumps([hook]))
    exports = [run / "exports" / f"step-{step}" for step in (1, 3)]
    assert sorted(path for path in (run / "exports").iterdir() if not path.is_symlink()) == exports
    assert (tmp_path / "told").read_text().splitlines() == [str(path) for path in exports]
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-1", "step-3"]


@pytest.mark.multi
@pytest.mark.slow
def test_rank_0_exports_once(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 1, layers=1)
    flags = ["--parallel.processes", "2", "--train.duration", "2 steps", "--checkpoint.every", "500 steps"]
    flags += ["--export.every", "2 steps", "--export.at_end", "true", "--logging.level", "info"]
    cache = str(new_cache(tmp_path / "cache"))
    done = forked.run(
        [sys.executable, "-m", "tuner", "train", "r.yaml", "--json", *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TUNER_CACHE": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    exports = tmp_path / "runs" / "r" / "exports"
    assert json.loads(done.stdout)["artifacts"]["export"] == str(exports / "step-2")
    assert sorted(path.name for path in exports.iterdir()) == ["latest", "step-2"]
    assert [line.split()[1] for line in done.stderr.splitlines() if line.startswith("exported")] == [
        str(exports / "step-2")
    ]
