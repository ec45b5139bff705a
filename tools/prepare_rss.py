"""Measures the peak memory of `tuner prepare-data` on a large JSONL file, process by process.

    python -m tools.prepare_rss [--size 2000] [--workers 1,2] [--model .demo/smollm2]

Writes a file of `--size` MB of distinct conversations under $TMPDIR, prepares it by the real command with an empty
cache once for each number of workers, reads VmHWM (the kernel's own peak of resident memory, shared pages included) of
every process of the command's tree until it ends, and deletes everything. Prints one JSON object; exits 1 where a
process had more than 400 MB. The disk needs about twice the file's size.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools import bench_rows
from tools.commands import ROOT, asked, environment, say, workplace

LIMIT_MB = 400.0
INTERVAL_S = 0.02


def main() -> int:
    """Parse the command line, write the file, measure, print; 1 where the limit is broken."""
    options = asked(
        __doc__, size=(2000.0, "MB of the file"), workers="1,2",
        model=(ROOT / ".demo" / "smollm2", "directory of the tokenizer"),
    )
    with workplace() as work:
        rows, written = bench_rows.write(bench_rows.endless(), work / "rows.jsonl", int(options.size * 1e6))
        say(f"{rows:,} rows, {written / 1e6:,.0f} MB")
        report: dict[str, Any] = {"rows": rows, "mb": round(written / 1e6, 1), "limit_mb": LIMIT_MB}
        for count in options.workers.split(","):
            report[f"workers_{count}"] = measure(work, options.model.resolve(), int(count))
    peaks = [peak for key, value in report.items() if key.startswith("workers") for peak in value["peak_mb"]]
    print(json.dumps({**report, "worst_mb": max(peaks)}, indent=2))
    return int(max(peaks) > LIMIT_MB)


def measure(work: Path, model: Path, workers: int) -> dict[str, Any]:
    """Prepare `rows.jsonl` of the work directory; return the peaks of all processes, the largest first."""
    data = {"train": str(work / "rows.jsonl"), "workers": workers, "max_length": 2048}
    (work / "recipe.yaml").write_text(json.dumps({"model": {"name_or_path": str(model)}, "data": data}))
    env = environment(work / "cache", TMPDIR=str(work))
    command = [sys.executable, "-m", "tuner", "prepare-data", str(work / "recipe.yaml"), "--json"]
    # What transformers makes of the tokenizer is asked once for each version of it, not with every data set.
    subprocess.run([*command, "--explain", "1"], env=env, check=True, capture_output=True)
    started = time.perf_counter()
    peaks: dict[int, float] = {}
    with (work / "stderr").open("w") as errors:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        while process.poll() is None:
            for pid in tree(process.pid):
                peaks[pid] = max(peaks.get(pid, 0.0), peak_mb(pid))
            time.sleep(INTERVAL_S)
    seconds = time.perf_counter() - started
    if process.returncode != 0:
        raise SystemExit((work / "stderr").read_text())
    said = json.loads(process.stdout.read()) if process.stdout else {}
    shutil.rmtree(work / "cache")
    return {
        "peak_mb": sorted((round(peak, 1) for peak in peaks.values()), reverse=True),
        "main_mb": round(peaks[process.pid], 1), "seconds": round(seconds, 1),
        "mb_per_s": round((work / "rows.jsonl").stat().st_size / 1e6 / seconds, 2),
        "documents": said["metrics"]["train"]["documents"],
    }


def tree(pid: int) -> list[int]:
    """The process and all below it that live."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue  # it ended meanwhile
    return found


def peak_mb(pid: int) -> float:
    """VmHWM of a process in MB; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:")), 0.0)


if __name__ == "__main__":
    raise SystemExit(main())
