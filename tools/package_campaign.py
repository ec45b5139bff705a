"""Build wheel and sdist, install each into a fresh environment, and use the installed command outside the source tree.

    python -m tools.package_campaign [--pythons python3.11 /usr/bin/python3.12] [--kinds wheel] [--work DIR]

For each interpreter that is here and each of the two files: torch as constraints.txt pins it, then the file with its
dependencies. In an empty directory, with nothing of the tree on the path: `tuner --version`, the shipped recipes
listed, copied and checked, a tiny model pre-trained for two steps, exported and asked, the marker of the package's
types, and what the metadata says. Interpreters that are not here are named. Exits with 1 where something fails.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tools.commands import ROOT, asked, some, workplace

PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
PINS = ROOT / "constraints.txt"
FACTS = """
import importlib.metadata as metadata, json, pathlib, tuner
dist = next(one for one in metadata.distributions() if any(e.value == "tuner.cli.main:main" for e in one.entry_points))
package = pathlib.Path(tuner.__file__).parent
print(json.dumps({
    "name": dist.metadata["Name"], "version": dist.version, "own": tuner.__version__, "place": str(package),
    "typed": (package / "py.typed").is_file(), "extras": dist.metadata.get_all("Provides-Extra"),
    "top": sorted({str(f).split("/")[0] for f in dist.files if not str(f).startswith("..")}),
}))
"""


class FailedError(Exception):
    """A command failed, or printed something else than it should."""


def run(words: list[str], cwd: Path, env: dict[str, str] | None = None) -> str:
    """Standard output of a command. Raises FailedError with the end of what it said."""
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise FailedError(f"{' '.join(words)}: exit code {done.returncode}\n{said}")
    return done.stdout


def runs(interpreter: str) -> bool:
    """Whether an interpreter is here: a name on the path may be one that a version manager has not installed."""
    found = shutil.which(interpreter)
    return found is not None and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0


def build(work: Path) -> list[Path]:
    """The wheel and the sdist, built by the backend of pyproject.toml in an environment of its own."""
    run([sys.executable, "-m", "venv", str(work / "build")], work)
    python = str(work / "build" / "bin" / "python")
    run([python, "-m", "pip", "install", "--quiet", "hatchling>=1.27"], work)
    run([python, "-m", "hatchling", "build", "-d", str(work / "dist"), "-t", "sdist", "-t", "wheel"], ROOT)
    return sorted((work / "dist").iterdir())


def install(interpreter: str, file: Path, place: Path) -> Path:
    """A fresh environment that holds the file; its directory of programs."""
    run([interpreter, "-m", "venv", str(place / "venv")], place)
    programs = place / "venv" / "bin"
    pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(PINS)]
    run([*pip, "torch==2.13.0"], place)
    run([*pip, str(file)], place)
    return programs


def use(programs: Path, empty: Path) -> dict[str, object]:
    """Use the installed command as somebody who has no source tree; facts of the installation."""
    kept = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {key: value for key, value in os.environ.items() if key not in kept}
    env |= {"PATH": f"{programs}:{env['PATH']}", "TUNER_CACHE": str(empty / "cache"), "HF_HUB_OFFLINE": "1"}
    tuner, python = str(programs / "tuner"), str(programs / "python")
    facts: dict[str, object] = json.loads(run([python, "-P", "-c", FACTS], empty, env))
    said = run([tuner, "--version"], empty, env).strip()
    wanted = {"typed": True, "version": facts["own"], "top": ["tuner", f"{facts['name']}-{facts['own']}.dist-info"]}
    found = {**facts, "top": sorted(str(name).replace("_", "-") for name in facts["top"])}  # type: ignore[attr-defined]
    for key, value in wanted.items():
        if found[key] != (sorted(value) if isinstance(value, list) else value):
            raise FailedError(f"{key} is {found[key]}, not {value}")
    if said != f"tuner {facts['own']}" or str(ROOT) in str(facts["place"]):
        raise FailedError(f"{tuner} --version said {said!r}, of {facts['place']}")
    shipped = json.loads(run([tuner, "recipes", "list", "--json"], empty, env))
    recipe = "tiny_pretrain_cpu"
    if recipe not in json.dumps(shipped):
        raise FailedError(f"recipes list --json: no {recipe}")
    run([tuner, "recipes", "copy", recipe, "mine.yaml"], empty, env)
    run([tuner, "config", "check", recipe], empty, env)
    words = ["--train.duration", "2 steps", "--train.device", "cpu", "--output_dir", "run"]
    run([tuner, "train", recipe, *words], empty, env)
    run([tuner, "export-hf", "run", "--output", "model"], empty, env)
    run([tuner, "generate", "model", "--raw", "--prompt", "A", "--max-new-tokens", "4"], empty, env)
    return facts


def main() -> int:
    """Build, install, use; exit code 1 where one of them fails."""
    options = asked(
        __doc__, pythons=(list(PYTHONS), "interpreters to install under"), kinds=some(("wheel", "sdist")),
        work=(Path, "an empty directory that is kept; default: one that goes"),
    )
    failed = 0
    with workplace(options.work) as work:
        work.mkdir(parents=True, exist_ok=True)
        files = build(work)
        print(json.dumps({"built": {file.name: file.stat().st_size for file in files}}), flush=True)
        for interpreter in options.pythons:
            if not runs(interpreter):
                print(json.dumps({"python": interpreter, "skipped": "not on this machine"}), flush=True)
                continue
            for file in files:
                kind = "wheel" if file.suffix == ".whl" else "sdist"
                if kind not in options.kinds:
                    continue
                place = work / f"{Path(interpreter).name}-{kind}"
                (place / "empty").mkdir(parents=True)
                started = time.monotonic()
                result: dict[str, object] = {"python": interpreter, "file": file.name}
                try:
                    result |= {"facts": use(install(interpreter, file, place), place / "empty")}
                except FailedError as error:
                    failed += 1
                    result |= {"failed": str(error)}
                print(json.dumps({**result, "seconds": round(time.monotonic() - started)}), flush=True)
                shutil.rmtree(place, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
