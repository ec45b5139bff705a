"""Plant known faults in `tuner/`, one at a time in a copy of the tree, and count those that the tests catch.

    python -m tools.mutants [--only NAME ...] [--workers N] [--fast] [--list]

Each fault of `tools/mutants.yaml` changes a pattern in a place that is found by its name (`tools/mutations.py`).
The tests named beside it must pass without the fault and fail with it; ``--fast`` asks those of `make test` alone, and
not the slow ones. Prints one JSON object: caught, planted, and the names of the survivors; exits with 1 when more than
one in ten survives.
"""

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.commands import ROOT, asked
from tools.mutations import Mutant, read_mutants

MUTANTS = read_mutants(ROOT / "tools" / "mutants.yaml")

TIMEOUT_S = 400
SLOW = "TUNER_TEST_SLOW"
"""The variable that asks for tests marked slow, too."""
TESTS_FAILED, COLLECTION_FAILED = 1, 2


@dataclass(frozen=True)
class Verdict:
    """What the tests said about one fault: caught, survived, or broken (the fault or its tests do not apply)."""

    name: str
    outcome: str
    seconds: float
    detail: str = ""


def main() -> int:
    """Run the chosen faults, print the report."""
    options = asked(
        __doc__, only=([], "names of faults, or beginnings of them"), workers=os.cpu_count() or 1,
        fast=(False, "leave out tests marked slow, as make test does"),
        list=(False, "check that every fault applies; run nothing"),
    )
    chosen = [mutant for mutant in MUTANTS if not options.only or mutant.name.startswith(tuple(options.only))]
    if options.list:
        return list_mutants(chosen)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        clean = copy_tree(Path(scratch) / "clean")
        os.environ.pop(SLOW, None) if options.fast else os.environ.setdefault(SLOW, "1")
        failing = baseline(clean, chosen, options.workers)
        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            jobs = [pool.submit(judge, mutant, clean, failing) for mutant in chosen]
            verdicts = []
            for job in concurrent.futures.as_completed(jobs):
                verdict = job.result()
                verdicts.append(verdict)
                print(f"{verdict.outcome:9} {verdict.name} ({verdict.seconds:.0f} s) {verdict.detail}", file=sys.stderr)
    return report(verdicts, time.monotonic() - started)


def report(verdicts: Sequence[Verdict], seconds: float) -> int:
    """Print the figures as JSON; 0 when at least nine in ten faults were caught."""
    names = {outcome: sorted(v.name for v in verdicts if v.outcome == outcome) for outcome in ("survived", "broken")}
    caught = sum(verdict.outcome == "caught" for verdict in verdicts)
    figures = {"caught": caught, "planted": len(verdicts), **names, "seconds": round(seconds)}
    print(json.dumps(figures, indent=2))
    return 0 if caught * 10 >= len(verdicts) * 9 else 1


def list_mutants(chosen: Sequence[Mutant]) -> int:
    """Name every fault, and whether its pattern is found exactly once; 1 if one does not apply."""
    good = True
    for mutant in chosen:
        problem = mutant.problem(ROOT)
        good = good and not problem
        print(f"{mutant.name:44} {mutant.place:48} {problem or 'applies'}")
    return 0 if good else 1


def copy_tree(target: Path) -> Path:
    """A copy of the tracked and the new files of the repository."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    return target


def baseline(clean: Path, chosen: Sequence[Mutant], workers: int) -> set[str]:
    """The test files among those named that fail without any fault: what they say about a fault means nothing."""
    files = sorted({test for mutant in chosen for test in mutant.tests})
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        codes = dict(zip(files, pool.map(lambda file: run_tests(clean, [file])[0], files), strict=True))
    return {file for file, code in codes.items() if code}


def judge(mutant: Mutant, clean: Path, failing: set[str]) -> Verdict:
    """Apply one fault to its own copy of the clean tree and run its tests."""
    started = time.monotonic()
    problem = mutant.problem(clean)
    tests = [test for test in mutant.tests if test not in failing]
    if not problem and not tests:
        problem = "its tests fail without the fault"
    if problem:
        return Verdict(mutant.name, "broken", 0.0, problem)
    tree = clean.with_name(mutant.name)
    shutil.copytree(clean, tree)
    mutant.apply(tree)
    code, output = run_tests(tree, tests)
    shutil.rmtree(tree, ignore_errors=True)
    outcome = "caught" if code in (TESTS_FAILED, COLLECTION_FAILED, None) else "survived"
    last = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    return Verdict(mutant.name, outcome, time.monotonic() - started, last[:110])


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """pytest's exit code (None for a hang, a failure too) and output, with the copy's `tuner` first in line."""
    own = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**os.environ, **own}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
