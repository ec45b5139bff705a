"""A day on one GPU: correctness, a first run, truth of the predictions, the cost of choices, TRL; one table at the end.

    python -m tools.gpu_day pack WHEELS [--there FILE]            here, with a network
    python -m tools.gpu_day run OUT [--wheels WHEELS] [--only PART ...] [--seconds N] [--device cpu] [--small]
    python -m tools.gpu_day table OUT [OUT ...]
    python -m tools.gpu_day record OUT [OUT ...]

`run` takes the parts one by one, the most valuable first, each in a process of its own that is ended at its limit, and
writes OUT/lines.jsonl (a check or a figure in each line), OUT/log.txt, and at the end OUT/table.md; `--seconds` bounds
all of them together. Several calls may share the day: `table` takes all their directories, and so does `record`, which
puts rates and steps into `tuner/profile/measured.json`. Nothing is fetched: models
have random weights, and libraries that the machine lacks come as WHEELS that `pack` downloaded. `--small` runs
everything in tiny shapes, on a CPU too: what a test does, so that no part fails on its first day by a slip.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tools.commands import ROOT
from tools.gpu_day.parts import PARTS, Part
from tools.gpu_day.report import read, table

WORK = ROOT / ".demo" / "gpu_day"
LOG_TAIL = 600
SHORTEST_S = 30
"""A part is not begun where less than this is left."""


def main(words: list[str] | None = None) -> int:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_day", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack", help="download the wheels that the machine lacks")
    pack.add_argument("wheels", type=Path)
    pack.add_argument("--there", type=Path, help="what is installed there, as `pip freeze` or a name a line says it")
    pack.add_argument("--python", default="3.12", help="its version there")
    run = commands.add_parser("run", help="run parts of the day")
    part = commands.add_parser("part", help="run one part in this process")
    part.add_argument("name", choices=[part.name for part in PARTS])
    for command in (run, part):
        command.add_argument("out", type=Path)
        command.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
        command.add_argument("--small", action="store_true")
        command.add_argument("--work", type=Path, default=WORK)
    run.add_argument("--wheels", type=Path)
    run.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART")
    run.add_argument("--seconds", type=float, default=float("inf"))
    shown = commands.add_parser("table", help="print the table")
    shown.add_argument("outs", type=Path, nargs="+")
    noted = commands.add_parser("record", help="put measured rates and steps into the table of predictions")
    noted.add_argument("outs", type=Path, nargs="+")
    noted.add_argument("--table", type=Path, default=ROOT / "tuner" / "profile" / "measured.json")
    commands.add_parser("list", help="name the parts")
    options = parser.parse_args(words)
    if options.command == "pack":
        from tools.gpu_day.pack import pack as download

        return download(options.wheels, options.there, options.python)
    if options.command == "table":
        print(table(read(options.outs)), end="")
        return 0
    if options.command == "record":
        from tools.gpu_day.rates import record

        print(record(read(options.outs), options.table))
        return 0
    if options.command == "list":
        for one in PARTS:
            print(f"{one.name:15} {one.limit_s:4} s  {one.covers}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    return run_part(options) if options.command == "part" else run_parts(options)


def run_part(options: argparse.Namespace) -> int:
    """Run one part here."""
    from tools.gpu_day.record import Day

    day = Day(options.name, options.device, options.small, options.work.resolve(), options.out.resolve())
    next(part for part in PARTS if part.name == options.name).load()(day)
    return 0


def run_parts(options: argparse.Namespace) -> int:
    """Run the chosen parts, print the table; 1 where a check failed."""
    chosen = [part for part in PARTS if options.only is None or part.name in options.only]
    environment = surroundings(options.work.resolve(), options.wheels)
    lines, began = options.out / "lines.jsonl", time.monotonic()
    with (options.out / "log.txt").open("a", encoding="utf-8") as log:
        for part in chosen:
            left = options.seconds - (time.monotonic() - began)
            if left < SHORTEST_S:
                say(lines, part, {"skipped": "no time is left"}, None)
                continue
            ended = take(part, options, environment, min(part.limit_s, left), log.fileno())
            print(f"{part.name:15} {ended or 'done'}", file=sys.stderr, flush=True)
            if ended:
                tail = (options.out / "log.txt").read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
                say(lines, part, {"ended": ended, "log": tail}, False)
    found = read([lines])
    (options.out / "table.md").write_text(table(found), encoding="utf-8")
    print(table(found), end="")
    return 1 if any(line["ok"] is False for line in found) else 0


def say(lines: Path, part: Part, figures: dict[str, str], ok: bool | None) -> None:
    """A line about a part as a whole."""
    with lines.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"part": part.name, "what": "the whole part", "ok": ok, **figures}) + "\n")


def take(part: Part, options: argparse.Namespace, environment: dict[str, str], limit_s: float, log: int) -> str:
    """Run a part in a process, which is ended at its limit with all that it started; how it failed, if it did."""
    words = ["-W", "ignore", "-m", "tools.gpu_day", "part", part.name, str(options.out.resolve())]
    words += ["--device", options.device, "--work", str(options.work.resolve()), *["--small"] * options.small]
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"at its limit of {limit_s:.0f} s"
    return f"exit code {code}" if code else ""


def surroundings(work: Path, wheels: Path | None) -> dict[str, str]:
    """The environment of every part: no network, caches beside the work, and the wheels' packages first."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if wheels is not None:
        site = work / "site"
        if not (site / ".complete").exists():
            install = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
            files = sorted(map(str, wheels.glob("*.whl")))
            subprocess.run([sys.executable, *install, "--target", str(site), *files], check=True)
            (site / ".complete").touch()
        paths.insert(0, str(site))
    own = {
        "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "TUNER_CACHE": str(work / "cache"),
        "TRITON_CACHE_DIR": str(work / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
    }  # fmt: skip
    return {**os.environ, **own}


if __name__ == "__main__":
    sys.exit(main())
