"""Measures `tuner prepare-data` against TRL's SFT preparation of the same rows, alternating in one run.

    python -m tools.bench_prepare [--vocabulary smollm2,qwen3] [--slice 48] [--size 1000] [--rounds 3] [--workers 1,2]

Ours is the real command with one worker, from the start of its process to its end, and a cache that holds nothing but
what transformers makes of the tokenizer, which is asked once; the CPU time is that of its whole process tree. TRL's is
what SFTTrainer does between raw messages and packed rows (bench_trl.py), with an empty Hugging Face cache. Its imports
are left out, in its favour; the ratio `with_start` counts them. Both get the same rows and template (for TRL with the
marks that it needs), and before a ratio is printed the ids and masks of every document must be equal: else exit 1. MB/s
are bytes of JSONL by second of CPU: per core. Both get a slice of rows in which no text comes twice; ours also gets a
large file, whose rows are distinct too but draw on the same text over and over. A table goes to stderr, one JSON object
to stdout. Needs `trl`, apt-get (once, for the rows), and `make assets`.

With --no-fast the command runs where the fast encoder's package cannot be imported. With --workers 1,2 the clock of
each number of workers on the large file is compared, alternating too.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import bench_rows
from tools.bench_digests import prepared_digests
from tools.commands import ROOT, asked, done, environment, say, workplace
from tools.measures import machine

MARKED = ROOT / "tests" / "reference" / "marked"
MAX_LENGTH = 8192
"""Above the longest document: TRL would cut it, and ours keeps documents whole until they are packed."""
QUIET: dict[str, Any] = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
GOALS = {"fast": 8.0, "slow": 2.0, "workers": 1.7}
BLOCK = '''"""Stands for an environment without the fast encoder's package."""
import sys

sys.modules["gigatoken"] = None
'''


@dataclass(frozen=True)
class Took:
    """Seconds of one run and what it said."""

    cpu_s: float
    wall_s: float
    said: dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """Where everything is."""

    work: Path
    fast: bool

    def ours(self, rows: Path, model: Path, workers: int = 1) -> Took:
        """Run the command on a cache without prepared data; the prepared directory is left until the next run."""
        cache = self.work / "cache"
        for level in ("encoded", "prepared"):
            shutil.rmtree(cache / level, ignore_errors=True)
        data = {"train": str(rows), "max_length": MAX_LENGTH, "workers": workers}
        recipe = self.work / "recipe.yaml"
        recipe.write_text(json.dumps({"model": {"name_or_path": str(model)}, "data": data}), encoding="utf-8")
        path = [str(ROOT)] if self.fast else [str(self.work / "without"), str(ROOT)]
        env = environment(cache, PYTHONPATH=os.pathsep.join(path), **QUIET)
        words = ["-m", "tuner", "prepare-data", str(recipe)]
        # What transformers makes of the tokenizer is asked once for each version of it, not with every data set.
        done([*words, "--explain", "1"], ROOT, env)
        return _timed([*words, "--json"], env)

    def trl(self, rows: Path, model: Path, name: str) -> Took:
        """Run TRL on an empty Hugging Face cache; the documents' digests are left in the work directory."""
        home = self.work / "hf"
        shutil.rmtree(home, ignore_errors=True)
        words = [str(ROOT / "tools" / "bench_trl.py"), str(rows), str(model)]
        words += [str(MARKED / f"{name}.jinja"), str(MAX_LENGTH), str(self.work / "digests")]
        said = _timed(words, environment(HF_HOME=str(home), HF_HUB_OFFLINE="1", **QUIET)).said
        return Took(said["cpu_s"], said["wall_s"], said)

    def require_equal(self, ours: Took) -> int:
        """Return the number of documents; SystemExit where one differs from TRL's."""
        mine = sorted(prepared_digests(Path(ours.said["artifacts"]["path"])))
        raw = (self.work / "digests").read_bytes()
        theirs = [raw[i : i + 16] for i in range(0, len(raw), 16)]
        if mine != theirs:
            shared = len(set(mine) & set(theirs))
            raise SystemExit(f"ids or masks differ: {len(mine)} documents, TRL's {len(theirs)}, equal {shared}")
        return len(mine)


def main() -> int:
    """Parse the command line, measure, print; 1 where a goal is missed."""
    options = asked(
        __doc__, vocabulary=("smollm2,qwen3", "smollm2, qwen3 or both"),
        slice=(48.0, "MB of distinct text, for both; at most 48"),
        size=(1000.0, "MB of the large file, for ours alone"), rounds=3,
        workers=("1", "1, or 1,2 to compare the clock of both"), no_fast=(False, "without the fast encoder's package"),
        assets=ROOT / ".demo" / "assets", smollm2=ROOT / ".demo" / "smollm2",
    )
    with workplace() as place:
        bench = Bench(place, not options.no_fast)
        (bench.work / "without").mkdir()
        (bench.work / "without" / "sitecustomize.py").write_text(BLOCK, encoding="utf-8")
        report = {"data": write_rows(bench.work, options), "fast": bench.fast, "machine": machine("cpu")}
        for name in options.vocabulary.split(","):
            model = options.smollm2 if name == "smollm2" else options.assets / name
            report[name] = measure(bench, name, model.resolve(), options)
    print(json.dumps(report, indent=2))
    return int(any(report[name]["missed"] for name in options.vocabulary.split(",")))


def write_rows(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write the slice and the large file; return what they are."""
    docs = bench_rows.documentation(options.assets.resolve())
    distinct = bench_rows.conversations(docs, options.assets.resolve() / "llamafactory")
    facts: dict[str, Any] = {}
    for name, source, size in (("slice", distinct, options.slice), ("large", bench_rows.endless(), options.size)):
        path = work / f"{name}.jsonl"
        rows, written = bench_rows.write(source, path, int(size * 1e6))
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()[:12]
        facts[name] = {"rows": rows, "mb": round(written / 1e6, 2), "mean_bytes": written // rows, "sha256": digest}
        say(f"{name:8} {rows:,} rows, {written / 1e6:.1f} MB, mean {written / rows:,.0f} bytes, sha256 {digest}")
    return facts


def measure(bench: Bench, name: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate the runs of one vocabulary; return medians, spreads and ratios."""
    large, part = bench.work / "large.jsonl", bench.work / "slice.jsonl"
    workers = [int(count) for count in options.workers.split(",")]
    runs: dict[str, Callable[[], Took]] = {
        "trl, slice": lambda: bench.trl(part, model, name),
        "tuner, slice": lambda: bench.ours(part, model),
        "tuner, large": lambda: bench.ours(large, model),
    }
    for count in workers[1:]:
        runs[f"tuner, large, {count} workers"] = lambda count=count: bench.ours(large, model, count)
    bench.trl(part, model, name)  # also the warm-up of both sides
    documents = bench.require_equal(first := bench.ours(part, model))
    share = fast_share(first.said)
    if (share > 0) != bench.fast:
        raise SystemExit(f"the fast path has a share of {share}: this is not the comparison that was asked for")
    took: dict[str, list[Took]] = {run: [] for run in runs}
    for _ in range(options.rounds):
        for run, go in runs.items():
            took[run].append(go())
            if run == "tuner, slice":
                bench.require_equal(took[run][-1])
    mb = {run: (part if "slice" in run else large).stat().st_size / 1e6 for run in runs}
    rates = {run: sorted(mb[run] / one.cpu_s for one in times) for run, times in took.items()}
    report: dict[str, Any] = {"documents": documents, "equal": True, "fast_path": share}
    report["runs"] = {run: _figures(rates[run], times) for run, times in took.items()}
    median = {run: statistics.median(rate) for run, rate in rates.items()}
    report["ratio_same_slice"] = round(median["tuner, slice"] / median["trl, slice"], 2)
    report["ratio_large"] = round(median["tuner, large"] / median["trl, slice"], 2)
    from_start = sorted(mb["trl, slice"] / one.said["process_cpu_s"] for one in took["trl, slice"])
    report["ratio_same_slice_with_start"] = round(median["tuner, slice"] / statistics.median(from_start), 2)
    goal = GOALS["fast" if bench.fast else "slow"]
    missed = [f"ratio {report['ratio_same_slice']} < {goal}"] * (report["ratio_same_slice"] < goal)
    for count in workers[1:]:
        one, more = (
            statistics.median(t.wall_s for t in took[run]) for run in ("tuner, large", f"tuner, large, {count} workers")
        )
        report[f"speedup_{count}_workers"] = round(one / more, 2)
        missed += [f"{count} workers {one / more:.2f} < {GOALS['workers']}"] * (one / more < GOALS["workers"])
    report["missed"] = missed
    _table(name, bench.fast, report)
    return report


def fast_share(said: dict[str, Any]) -> float:
    """The share of documents that the command says the fast encoder encoded."""
    return float(said["metrics"]["fast_path"]["share"])


def _figures(rates: list[float], times: list[Took]) -> dict[str, Any]:
    return {
        "mb_per_s_core": round(statistics.median(rates), 2), "spread": [round(rates[0], 2), round(rates[-1], 2)],
        "cpu_s": [round(one.cpu_s, 2) for one in times], "wall_s": [round(one.wall_s, 2) for one in times],
    }


def _timed(words: list[str], env: dict[str, str]) -> Took:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    said = done(words, ROOT, env)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Took(cpu, wall, json.loads(said))


def _table(name: str, fast: bool, report: dict[str, Any]) -> None:
    say(f"\n{name}: {report['documents']:,} documents with equal ids and masks; fast path {report['fast_path']}")
    say(f"{'run':24} {'MB/s per core':>14} {'spread':>16} {'CPU s':>8} {'clock s':>8}")
    for run, one in report["runs"].items():
        cpu, wall = statistics.median(one["cpu_s"]), statistics.median(one["wall_s"])
        low, high = one["spread"]
        say(f"{run:24} {one['mb_per_s_core']:14.2f} {f'{low:.2f} - {high:.2f}':>16} {cpu:8.2f} {wall:8.2f}")
    for key, value in report.items():
        if key.startswith(("ratio", "speedup")):
            say(f"{key:28} {value:10.2f}")
    say("; ".join(report["missed"]) or f"every goal reached ({'with' if fast else 'without'} the fast encoder)")


if __name__ == "__main__":
    raise SystemExit(main())
