"""Kill the preparation of data with SIGKILL, and let builders race; compare what they leave with an unbroken build.

    python -m tools.prepare_campaign --kills 200 --races 50 --workers 1 2 --seed 0
    python -m tools.prepare_campaign --workers 2 --replay kill 17        (one trial again, with what it found)

A builder dies before or after one of its system calls (mkdir, fsync, rename, link, unlink, creating a file), each of
them in turn, and at random moments for the rest of the kills. While it runs and after its death everything that is
visible under a final name must verify by SHA-256. Then a second builder must finish, and leave the bytes of the
unbroken build, no leftovers, a free lock, and no worker process. In a race two builders start together, in every other
one the first is killed; one of them builds, and both see the same bytes. Prints the figures as JSON; exits with 1 when
a trial failed.
"""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.fixtures.processes import of_variable, processes_where
from tools.commands import asked, one_of, workplace

CALLS = ("mkdir", "fsync", "rename", "link", "unlink", "open")
MARK = "TUNER_CAMPAIGN"
PATIENCE_S = 60.0
PRELOADED = ("tuner.data.building.prepare", "tuner.data.building.documents", "tuner.data.encoding.tokenizer")
"""What builders import, once for all of them."""
context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Trial:
    """Where the data is, how it is built, and how many calls an unbroken build makes and how long it takes."""

    directory: Path
    workers: int
    mutant: str
    calls: tuple[str, ...] = ()
    seconds: float = 0.0


def build(trial: Trial, cache: str, fatal: tuple[int, str] | None, answers: Any) -> None:
    """Be a builder: prepare the data into `cache`, dying at call number `fatal[0]`, `before` or `after` it."""
    from tuner.config.methods import SftMethod
    from tuner.config.recipe import DataSection
    from tuner.data.building import documents, spec
    from tuner.data.building.prepare import prepare
    from tuner.data.building.spec import PrepareSpec
    from tuner.data.encoding.tokenizer import TextTokenizer, byte_files

    os.environ[MARK] = trial.directory.name
    # Every file is work of its own, so that small ones keep several workers busy.
    documents.BUNDLE_BYTES = spec.MANY_BYTES = 1
    MUTANTS[trial.mutant]()
    seen = count_calls(fatal)
    files = sorted(str(path) for path in trial.directory.glob("rows*.jsonl"))
    data = DataSection.model_validate({"train": files, "eval": "10%", "workers": trial.workers, "on_bad_row": "skip"})
    tokenizer = TextTokenizer(byte_files())
    info = prepare(PrepareSpec(data, SftMethod().examples, tokenizer, 64, 1, trial.directory / cache))
    answers.put({"pid": os.getpid(), "calls": seen, "cached": info.cached, "path": str(info.path)})


def count_calls(fatal: tuple[int, str] | None) -> list[str]:
    """Wrap the system calls by which a directory is published; the fatal one kills this process."""
    seen: list[str] = []

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if name == "open" and not (len(arguments) > 1 and arguments[1] & os.O_CREAT):
                return real(*arguments, **keywords)
            number = len(seen)
            seen.append(f"{name} {Path(os.fsdecode(arguments[0])).name}" if name != "fsync" else name)
            if fatal == (number, "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*arguments, **keywords)
            finally:
                if fatal == (number, "after"):
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in CALLS:
        setattr(os, name, wrapped(name, getattr(os, name)))
    return seen


def replace_in(module: Any, **replacements: Any) -> None:
    """Put others in place of names of a module, for good. AttributeError where it has none of that name."""
    patch.multiple(module, **replacements).start()


def rename_before_manifest() -> None:
    """A mutant: the directory gets its name first, and its manifest then."""
    from tuner.data.building import cache
    from tuner.runtime.files import publish_dir, write_json

    late: list[tuple[Path, Any]] = []

    def publish_first(tmp: Path, final: Path) -> None:
        publish_dir(tmp, final)
        for path, value in late:
            write_json(final / path.name, value)
        late.clear()

    replace_in(cache, write_json=lambda path, value: late.append((path, value)), publish_dir=publish_first)


def keep_leftovers() -> None:
    """A mutant: what a killed builder left is never swept."""
    from tuner.data.building import cache

    replace_in(cache, _leftovers=lambda final: [])


def build_without_lock() -> None:
    """A mutant: builders do not wait for each other."""
    from contextlib import nullcontext

    from tuner.data.building import cache

    replace_in(cache, FileLock=lambda *_, **__: nullcontext())


MUTANTS: dict[str, Callable[[], None]] = {
    "none": lambda: None, "rename-before-manifest": rename_before_manifest, "keep-leftovers": keep_leftovers,
    "no-lock": build_without_lock,
}


def write_rows(directory: Path) -> None:
    """Rows of uneven length in several files, so that several workers have something to do; one row is bad."""
    rng = random.Random(0)
    for number in range(4):
        rows = [{"prompt": f"{number} {i} ", "completion": "ab" * rng.randint(1, 20)} for i in range(40)]
        lines = [json.dumps(row) for row in rows] + (["{"] if number == 2 else [])
        (directory / f"rows{number}.jsonl").write_text("\n".join(lines) + "\n")


def start(trial: Trial, cache: str, fatal: tuple[int, str] | None = None) -> tuple[Any, Any]:
    """Start a builder; returns the process and the queue that its answer comes by."""
    answers = context.SimpleQueue()
    process = context.Process(target=build, args=(trial, cache, fatal, answers))
    process.start()
    return process, answers


def finish(process: Any, answers: Any) -> dict[str, Any] | None:
    """Wait for a builder; returns its answer, None where it has none."""
    process.join(PATIENCE_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return None if answers.empty() else dict(answers.get())


def visible_faults(cache: Path) -> list[str]:
    """What is wrong with the directories that are there under a final name, by SHA-256 of every file."""
    from tuner.data.building.cache import LEVELS, Entry, damages
    from tuner.data.prepared import open_prepared
    from tuner.errors import DataError

    found = []
    for level in LEVELS:
        for path in (cache / level).glob("[0-9a-f]*"):
            found += damages(Entry(level, path, None))
            if level == "prepared" and not found:
                try:
                    open_prepared(path, verify=True)
                except DataError as error:
                    found.append(error.message)
    return found


def contents(cache: Path) -> dict[str, str]:
    """SHA-256 of every file under a final name."""
    files = [path for path in cache.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(cache)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def left_over(cache: Path) -> list[str]:
    """Names of what a builder should have removed, and of locks that are held."""
    from tuner.errors import MachineError
    from tuner.runtime.lock import FileLock

    found = [path.name for path in cache.glob("*/.t*")]
    for path in cache.glob("*/.*.lock"):
        try:
            with FileLock(path, wait=False):
                pass
        except MachineError:
            found.append(f"{path.name} is held")
    return found


def orphans(trial: Trial) -> list[int]:
    """Worker processes of this campaign that are still there after a while."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := processes_where(of_variable(MARK, trial.directory.name))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def unbroken(trial: Trial) -> tuple[Trial, dict[str, str]]:
    """Build twice without a kill: the calls and seconds of one build, and the bytes, which must be the same."""
    results = []
    for cache in ("unbroken", "again"):
        started = time.monotonic()
        answer = finish(*start(trial, cache))
        if answer is None:
            raise RuntimeError("an unbroken build failed")
        seconds = time.monotonic() - started
        results.append((contents(trial.directory / cache), answer["calls"]))
    if results[0][0] != results[1][0]:
        raise RuntimeError("two unbroken builds differ")
    return Trial(trial.directory, trial.workers, trial.mutant, tuple(results[0][1]), seconds), results[0][0]


def kill_trial(trial: Trial, expected: dict[str, str], number: int, rng: random.Random) -> dict[str, Any]:
    """Kill a builder, look at what is there, and let another finish."""
    fatal = (number // 2, ("before", "after")[number % 2]) if number < 2 * len(trial.calls) else None
    name = f"kill-{number}"
    cache = trial.directory / name
    process, answers = start(trial, name, fatal)
    deadline = time.monotonic() + (rng.uniform(0, trial.seconds) if fatal is None else PATIENCE_S)
    seen: list[str] = []
    while process.exitcode is None and time.monotonic() < deadline:
        seen += visible_faults(cache)
        process.join(0.001)
    process.kill()
    process.join()
    killed = process.exitcode == -signal.SIGKILL
    seen += visible_faults(cache)
    is_finished = finish(*start(trial, name)) is not None
    at = f"{fatal[1]} {trial.calls[fatal[0]]}" if fatal else "random"
    found = {"kind": "kill", "trial": number, "at": at, "killed": killed, "finished": is_finished}
    return judged(trial, cache, found, seen, expected, is_finished and (killed or fatal is None))


def judged(
    trial: Trial, cache: Path, found: dict[str, Any], seen: list[str], expected: dict[str, str], is_good: bool
) -> dict[str, Any]:
    """What was found of a trial, with what it has left."""
    left = {"half_made": sorted(set(seen)), "left_over": left_over(cache), "orphans": orphans(trial)}
    is_identical = contents(cache) == expected
    return {**found, "identical": is_identical, **left, "ok": is_good and is_identical and not any(left.values())}


def race_trial(trial: Trial, expected: dict[str, str], number: int, rng: random.Random) -> dict[str, Any]:
    """Start two builders together; in every other race the first is killed."""
    name = f"race-{number}"
    cache = trial.directory / name
    builders = [start(trial, name) for _ in range(2)]
    with_kill = number % 2 == 1
    deadline = time.monotonic() + rng.uniform(0, 1.5 * trial.seconds)
    seen: list[str] = []
    while any(process.exitcode is None for process, _ in builders):
        seen += visible_faults(cache)
        if with_kill and time.monotonic() >= deadline:
            builders[0][0].kill()
        if time.monotonic() > deadline + PATIENCE_S:
            break
        builders[1][0].join(0.001)
    answers = [finish(*builder) for builder in builders]
    built = sum(answer is not None and not answer["cached"] for answer in answers)
    killed = builders[0][0].exitcode == -signal.SIGKILL
    is_finished = answers[1] is not None and (with_kill or answers[0] is not None)
    found = {"kind": "race", "trial": number, "killed": killed, "built_by": built, "finished": is_finished}
    return judged(trial, cache, found, seen, expected, is_finished and (built == 1 or (killed and built <= 1)))


KINDS = {"kill": kill_trial, "race": race_trial}


def campaign(
    directory: Path, workers: int, wanted: list[tuple[str, int]], seed: int, mutant: str = "none"
) -> list[dict[str, Any]]:
    """The wanted trials (kind, number) with one number of workers, in `directory`, which is empty."""
    write_rows(directory)
    plain, expected = unbroken(Trial(directory, workers, "none"))
    trial = replace(plain, mutant=mutant)
    results = []
    for kind, number in wanted:
        rng = random.Random(f"{seed} {workers} {kind} {number}")
        found = KINDS[kind](trial, expected, number, rng)
        results.append({"workers": workers, "calls": len(trial.calls), **found})
        if not found["ok"]:
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    return results


def main() -> int:
    """Run the campaign."""
    options = asked(
        __doc__, kills=200, races=50, workers=[1, 2],
        first=(0, "number of the first kill; two for each call come first"), seed=0,
        mutant=(one_of(list(MUTANTS), "none"), "break the builder: trials must fail"),
        replay=({"nargs": 2, "metavar": ("KIND", "NUMBER")}, "one trial alone, such as: kill 17"),
    )
    context.set_forkserver_preload(list(PRELOADED))
    wanted = [("kill", options.first + i) for i in range(options.kills)] + [("race", i) for i in range(options.races)]
    if options.replay:
        wanted = [(options.replay[0], int(options.replay[1]))]
    results = []
    for workers in options.workers:
        with workplace() as directory:
            results += campaign(directory, workers, wanted, options.seed, options.mutant)
    if options.replay:
        print(json.dumps(results, indent=2))
    kills, races = ([found for found in results if found["kind"] == kind] for kind in KINDS)
    figures = {
        "workers": options.workers, "seed": options.seed, "kills": len(kills), "races": len(races),
        "killed": sum(found["killed"] for found in kills), "races_with_a_kill": sum(found["killed"] for found in races),
        "publish_calls": sorted({found["calls"] for found in results}), "ok": sum(found["ok"] for found in results),
        "not_identical": sum(not found["identical"] for found in results),
        **{what: sum(bool(found[what]) for found in results) for what in ("half_made", "left_over", "orphans")},
    }  # fmt: skip
    print(json.dumps(figures))
    return int(figures["ok"] < len(results))


if __name__ == "__main__":
    raise SystemExit(main())
