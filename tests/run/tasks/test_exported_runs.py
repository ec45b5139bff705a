"""Real runs with exports: the bytes of `tuner export-hf`, and a run that is complete although an export failed."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.caches import new_cache
from tests.fixtures import forked, trainings
from tuner.api.exports import export_hf
from tuner.errors import RecipeError
from tuner.run.launch import launch as launch_run
from tuner.run.options import LaunchOptions
from tuner.runtime.warned import Warned, collected

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
