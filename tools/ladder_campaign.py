"""A real ladder on this machine: five sizes of a byte model on the standard library's documentation, killed at will.

    python -m tools.ladder_campaign [--kills 5] [--threads 2] [--seed 0] [--keep DIR]

Documents are the docstrings of each module of the standard library, and the topics of `help()`. `tuner ladder run`
trains the rungs; its process is killed with SIGKILL at random steps of the whole ladder, and the same command is given
again. At the end every rung has every step once, every mark is measured, held-out losses fall with size, and nothing is
trained again. Then `tuner ladder fit` predicts the largest rung from the others: within 2 %, and inside its interval.
Prints one JSON line for each kill, the rungs' marks as CSV and the prediction; exits with 1 where something is missing.
"""

import ast
import json
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.commands import Start, asked, environment, run, write_lines
from tools.tables import beside
from tuner.config.load import load_recipe
from tuner.config.paths import recipes_dir
from tuner.ladder.record import LadderRecord, Mark, marks_csv, read_ladder, read_marks
from tuner.ladder.rungs import rungs_of

POLL_S = 0.05
LIMIT_S = 20 * 60
"""What the whole campaign may take, its kills included."""
ERROR = 0.02
"""How far the prediction of the largest rung may be off."""
NO_TESTS = {"test", "tests", "site-packages", "idle_test", "lib2to3", "__pycache__"}
RECIPE: dict[str, Any] = beside(__file__)


def main() -> int:
    """Run the campaign."""
    options = asked(__doc__, kills=5, threads=2, seed=0, keep=(Path, "train here, in a new directory, and leave it"))
    directory = options.keep or Path(tempfile.mkdtemp(prefix="tuner-ladder-"))
    directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    write_files(directory, RECIPE, stdlib_documents())
    try:
        problems = campaign(directory, options.kills, options.seed, threads=options.threads)
        seconds = time.monotonic() - began
        if seconds > LIMIT_S:
            problems.append(f"took {seconds / 60:.1f} minutes")
        ladder = read_ladder(directory / "runs" / "ladder")
        marks = read_marks(ladder)
        problems += fell_with_size(ladder, marks)
        print(marks_csv(marks), end="")
        problems += misjudged(directory, ladder.rungs[-1].name)
    finally:
        if options.keep is None:
            shutil.rmtree(directory)
    print(json.dumps({"kills": options.kills, "minutes": round(seconds / 60, 1), "problems": problems}))
    return 1 if problems else 0


def stdlib_documents() -> Iterator[str]:
    """The topics of `help()`, and the docstrings of the standard library."""
    from pydoc_data.topics import topics

    yield from (text for _, text in sorted(topics.items()))
    yield from documents_of(Path(sysconfig.get_path("stdlib")))


def documents_of(library: Path) -> Iterator[str]:
    """The docstrings of each module below a directory, under their names."""
    for path in sorted(library.rglob("*.py")):
        if NO_TESTS & set(path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        name = ".".join(path.relative_to(library).with_suffix("").parts)
        text = "\n\n".join(_docstrings(tree, name))
        if len(text) > len(name) + 80:
            yield text


def _docstrings(node: ast.AST, name: str) -> Iterator[str]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield f"{name}\n{text}"
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _docstrings(child, f"{name}.{child.name}")


def write_files(directory: Path, recipe: dict[str, Any], documents: Iterator[str]) -> None:
    """The recipe `ladder.yaml`, its model's config and its rows."""
    shutil.copytree(recipes_dir() / "models" / "tiny-llama", directory / "model")
    write_lines(directory / "docs.jsonl", ({"text": text} for text in documents))
    (directory / "ladder.yaml").write_text(json.dumps(recipe))


def campaign(directory: Path, kills: int, seed: int, start: Start = subprocess.Popen, threads: int = 1) -> list[str]:
    """Train the ladder of `ladder.yaml`, killed at so many random steps; what is wrong with what it left."""
    words = [sys.executable, "-m", "tuner", "ladder", "run", "ladder.yaml"]
    env = environment(threads=threads)
    log = directory / "run.log"
    runs = directory / "runs" / "ladder"

    def begin() -> subprocess.Popen[Any]:
        with log.open("a") as output:
            return start(words, cwd=directory, env=env, stdout=output, stderr=output)

    problems = []
    for point in kill_points(directory, kills, seed):
        process = begin()
        while steps_taken(runs) < point and process.poll() is None:
            time.sleep(POLL_S)
        alive = process.poll() is None
        process.send_signal(signal.SIGKILL)
        code = process.wait()
        killed = {"planned_after": point, "killed_after": steps_taken(runs), "code": code}
        print(json.dumps(killed), flush=True)
        if not alive or code != -signal.SIGKILL:
            problems.append(f"not killed at step {point}: exit {code}")
    if (code := begin().wait()) != 0:
        return [*problems, f"the last run ended with {code}: {log.read_text()[-2000:]}"]
    ladder = read_ladder(runs)
    problems += [problem for rung in ladder.rungs for problem in missing(ladder, rung.name)]
    before = {rung.name: (ladder.run_dir(rung) / "run.json").read_bytes() for rung in ladder.rungs}
    if (code := begin().wait()) != 0:
        problems.append(f"a ladder that is done ended with {code}")
    problems += [
        f"{rung.name} was touched again"
        for rung in ladder.rungs
        if (ladder.run_dir(rung) / "run.json").read_bytes() != before[rung.name]
    ]
    return problems


def kill_points(directory: Path, kills: int, seed: int) -> list[int]:
    """Numbers of steps of the whole ladder after which it is killed."""
    total = sum(rung.plan.total_steps for rung in rungs_of(load_recipe(directory / "ladder.yaml", cwd=directory)))
    return sorted(random.Random(seed).sample(range(1, total), kills))


def steps_taken(runs: Path) -> int:
    """Steps of all rungs that have a line, whatever is trained again later."""
    return sum(
        max((line["step"] for line in _lines(path) if line.get("kind") == "train"), default=0)
        for path in runs.glob("*/metrics.jsonl")
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # cut short by the kill
            continue


def missing(ladder: LadderRecord, name: str) -> list[str]:
    """What a rung lacks: steps, each once, its marks, or their checkpoints."""
    rung = next(rung for rung in ladder.rungs if rung.name == name)
    path = ladder.run_dir(rung)
    steps = [line["step"] for line in _lines(path / "metrics.jsonl") if line.get("kind") == "train"]
    found = [] if steps == list(range(1, rung.total_steps + 1)) else [f"{name}: steps are not 1 to {rung.total_steps}"]
    reached = {mark.step for mark in read_marks(ladder) if mark.rung == name}
    for mark in rung.marks:
        if mark.step not in reached:
            found.append(f"{name}: no evaluation at step {mark.step}")
        if not (path / "checkpoints" / f"step-{mark.step}").is_dir():
            found.append(f"{name}: no checkpoint of step {mark.step}")
    return found


def misjudged(directory: Path, largest: str) -> list[str]:
    """What is wrong with the prediction of the largest rung from the others."""
    words = ["-m", "tuner", "ladder", "fit", "runs/ladder", "--target", largest, "--json"]
    done = run(words, directory, environment(threads=None))
    if done.returncode != 0:
        return [f"the fit ended with {done.returncode}: {done.stderr[-500:]}"]
    checked = json.loads(done.stdout)["artifacts"]["fit"]["target"]["checked"]
    print(json.dumps(checked), flush=True)
    found = [f"{largest}: predicted {checked['error']:+.2%} off"] if abs(checked["error"]) > ERROR else []
    return found if checked["is_covered"] else [*found, f"{largest}: the interval does not cover what was measured"]


def fell_with_size(ladder: LadderRecord, marks: Sequence[Mark]) -> list[str]:
    """Sizes whose last loss is not below that of the size before."""
    last = {mark.rung: mark.loss for mark in marks if mark.loss is not None}
    names = [rung.name for rung in ladder.rungs]
    pairs = zip(names, names[1:], strict=False)
    return [f"{after} is no better than {before}" for before, after in pairs if last[after] >= last[before]]


if __name__ == "__main__":
    sys.exit(main())
