"""Loading a recipe, asking for help and making a mistake touch nothing: no file, no socket, no torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tables import cases
from tuner.config.shipped import shipped_recipes

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
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)


def test_loading_creates_no_file_opens_no_socket_and_imports_nothing_heavy(tmp_path: Path) -> None:
    done = python(["-c", PROBE, *sorted(shipped_recipes())], tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["opened"] == []
    assert report["events"] == []
    assert not [module for module in report["modules"] if module.split(".")[0] in HEAVY]
    assert list(tmp_path.iterdir()) == []


COMMANDS: Any = cases(__file__, "commands")
"""The first is run in a process that has loaded nothing yet; each other adds what those before did not load."""

WATCH = """
import json, os, sys, traceback
sys.dont_write_bytecode = True
from tuner.cli.main import main
seen, top = [], os.getcwd()
for number, words in enumerate(json.loads(sys.argv[1])):
    os.mkdir(f"{top}/{number}")
    os.chdir(f"{top}/{number}")
    code = None
    try:
        main(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    seen.append({"code": code, "modules": sorted(sys.modules), "files": os.listdir()})
with open(f"{top}/seen.json", "w") as file:
    json.dump(seen, file)
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each command ended with, all modules that were loaded then, and the files that it left."""
    place = tmp_path_factory.mktemp("light")
    done = python(["-c", WATCH, json.dumps(COMMANDS)], place)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    found: list[dict[str, Any]] = json.loads((place / "seen.json").read_text())
    return found


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=[" ".join(words) for words in COMMANDS])
def test_light_commands_import_no_torch(number: int, seen: list[dict[str, Any]]) -> None:
    before = set(seen[number - 1]["modules"]) if number else set()
    added = {module.split(".")[0] for module in set(seen[number]["modules"]) - before}
    assert not added & {"torch", "transformers", "peft", "datasets"}
    assert seen[number]["code"] in {0, 2}
    assert seen[number]["files"] == []


def test_the_help_of_the_whole_program_loads_none_of_the_recipe(seen: list[dict[str, Any]]) -> None:
    modules = {module.split(".")[0] for module in seen[0]["modules"]}
    assert "tuner" in modules
    assert not modules & {"pydantic", "cyclopts", "ruamel", "jsonschema"}
