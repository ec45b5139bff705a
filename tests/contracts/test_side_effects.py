"""Loading a recipe, asking for help and making a mistake touch nothing: no file, no socket, no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.config.shipped import shipped_recipes

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "peft", "datasets", "numpy", "pyarrow", "tokenizers", "huggingface_hub")

PROBE = """
import json, sys
opened, events = [], []
def audit(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        opened.append(str(arguments[0]))
    if event.split(".")[0] in {"socket", "subprocess"} or event in {"os.mkdir", "os.rename", "os.remove", "os.fork"}:
        events.append(event)
sys.dont_write_bytecode = True
sys.addaudithook(audit)
import os
before = dict(os.environ)
from tuner.config.load import load_recipe
for name in sys.argv[1:]:
    loaded = load_recipe(name)
    again = load_recipe(name)
    assert loaded == again, name
    assert dict(os.environ) == before, name
print(json.dumps({"opened": opened, "events": events, "modules": sorted(sys.modules)}))
"""


def python(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_loading_creates_no_file_opens_no_socket_and_imports_nothing_heavy(tmp_path: Path) -> None:
    done = python(["-c", PROBE, *sorted(shipped_recipes())], tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["opened"] == []
    assert report["events"] == []
    assert not [module for module in report["modules"] if module.split(".")[0] in HEAVY]
    assert list(tmp_path.iterdir()) == []


COMMANDS = [
    ["--help"],
    ["config", "check", "smollm2_sft_cpu", "--model.name_or_path", "nobody/nothing"],
    ["config", "check", "tiny_pretrain_cpu", "--model.name_or_path", "./nothing"],
    ["config", "show", "--origin", "tiny_pretrain_cpu"],
    ["config", "show", "--plot-schedule", "tiny_pretrain_cpu"],
    ["config", "schema"],
    ["config", "show", "tiny_pretrain_cpu", "--optimizer.lrr", "1"],
    ["recipes", "list"],
    ["train", "--help"],
    ["profile", "--help"],
    ["train", "nowhere.yaml"],
    ["runs", "list", "."],
    ["runs", "show", "."],
]
MORE = [
    *([command, "--help"] for command in ("config", "init", "prepare-data", "resume", "export-hf", "generate", "runs")),
    ["config", "show", "--plot-schedule", "tiny_pretrain_cpu", "--train.duration", "50 steps"],
]
"""Like others of those."""

WATCH = """
import atexit, json, os, sys
sys.dont_write_bytecode = True
path = os.environ["SEEN"]
atexit.register(lambda: open(path, "w").write(json.dumps(sorted(sys.modules))))
sys.argv = ["tuner", *sys.argv[1:]]
from tuner.cli.main import main
main()
"""


@pytest.mark.parametrize(
    "words", [*COMMANDS, *(pytest.param(words, marks=pytest.mark.slow) for words in MORE)], ids=" ".join
)
def test_light_commands_import_no_torch(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen.json"
    monkeypatch.setenv("SEEN", str(seen))
    work = tmp_path / "work"
    work.mkdir()
    done = python(["-c", WATCH, *words], work)
    assert done.returncode in {0, 2}, done.stderr
    assert "Traceback" not in done.stderr
    modules = {module.split(".")[0] for module in json.loads(seen.read_text())}
    assert not modules & {"torch", "transformers", "peft", "datasets"}
    assert list(work.iterdir()) == []


def test_the_help_of_the_whole_program_loads_none_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen.json"
    monkeypatch.setenv("SEEN", str(seen))
    python(["-c", WATCH, "--help"], tmp_path)
    modules = {module.split(".")[0] for module in json.loads(seen.read_text())}
    assert not modules & {"pydantic", "cyclopts", "ruamel", "jsonschema"}
