"""Breaks JSONL lines in every way we know and compares the product's verdicts with an oracle's, line by line.

    python -m tools.mutate_rows [--lines 100000] [--seed 1] [--long 1] [--command]

Writes good rows of every form, most of them mutated, and reads them: by the functions that the product reads rows
with, or with `--command` by `tuner prepare-data` with `on_bad_row: skip` (byte tokenizer, a ChatML template).
`tools/row_oracle.py` says which lines are good. Prints one JSON object; exits 1 on a disagreement, an exception that is
no row's problem, a value other than the one written, or a problem whose place is not inside its line.
"""

import json
import resource
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.commands import asked, environment, read_lines, run, workplace
from tools.row_mutations import lines
from tools.row_oracle import BLANK, GOOD, judge, parse

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

BYTE_IDS = 259
"""The byte tokenizer's: 256 bytes and three control tokens."""


@dataclass
class Verdicts:
    """What the product said of the lines of a file, from 1."""

    good: dict[int, Any] = field(default_factory=dict)
    bad: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Column and reason."""
    exceptions: list[str] = field(default_factory=list)
    seconds: float = 0.0


def by_functions(path: Path) -> Verdicts:
    """Read a file as a worker of the product does, without encoding."""
    from tuner.config.recipe import DataSource
    from tuner.data.reading.blocks import blocks, lines_in, position_of, records_of
    from tuner.data.reading.problems import RecordProblem
    from tuner.data.reading.records import parse_record
    from tuner.data.sources import expand

    verdicts, before, started = Verdicts(), 0, time.process_time()
    for block in blocks(expand([DataSource(path=str(path))])[0]):
        for row in records_of(block):
            problem = row.problem
            try:
                if row.value is not None:
                    parse_record(row.value)
            except RecordProblem as found:
                problem = found
            except Exception as error:  # noqa: BLE001 (any other exception is what this looks for)
                verdicts.exceptions.append(f"line {before + row.line}: {error!r}")
            if problem is None:
                verdicts.good[before + row.line] = row.value
            else:
                line, col = position_of(row, problem)
                verdicts.bad[before + line] = (col, problem.reason)
        before += lines_in(block)
    verdicts.seconds = time.process_time() - started
    return verdicts


def by_command(path: Path, rows: int) -> Verdicts:
    """Prepare a file by the real command; of good rows only their number is known."""
    work = path.parent
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text("{}")
    (work / "chatml.jinja").write_text(CHATML)
    tokenizer = {"name_or_path": "byte", "chat_template": "chatml.jinja"}
    data = {"train": path.name, "on_bad_row": "skip", "max_length": 1 << 16}
    recipe = {"model": {"name_or_path": "./model"}, "tokenizer": tokenizer, "data": data}
    (work / "recipe.yaml").write_text(json.dumps(recipe))
    started = time.monotonic()
    done = run(["-m", "tuner", "prepare-data", "--json"], work, environment(work / "cache", threads=None))
    verdicts = Verdicts(seconds=time.monotonic() - started)
    if done.returncode != 0:
        verdicts.exceptions.append(done.stderr[-2000:])
        return verdicts
    document = json.loads(done.stdout)
    for reject in read_lines(Path(document["artifacts"]["path"]) / "rejects.jsonl"):
        verdicts.bad[reject["line"]] = (reject["col"], reject["reason"])
    counts = document["metrics"]["train"]
    if counts["rows"] != rows or sum(counts["skipped"].values()) != len(verdicts.bad):
        verdicts.exceptions.append(f"counted {counts['rows']} rows and {counts['skipped']}, there are {rows}")
    return verdicts


def compare(path: Path, count: int, command: bool) -> dict[str, Any]:
    """The figures of a file of `count` lines."""
    expected: dict[int, str] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            expected[number] = judge(line.removesuffix(b"\n"), number == 1, BYTE_IDS if command else 2**32)
    rows = {number for number, verdict in expected.items() if verdict != BLANK}
    bad = {number for number in rows if expected[number] != GOOD}
    verdicts = by_command(path, len(rows)) if command else by_functions(path)
    seen = set(verdicts.bad) | (rows - bad - set(verdicts.bad) if command else set(verdicts.good))
    wrong = sorted((set(verdicts.bad) ^ bad) | (seen ^ rows))
    examples, misplaced, differ = [], 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removesuffix(b"\n")
            if number in wrong and len(examples) < 5:
                examples.append([number, expected[number], verdicts.bad.get(number), repr(text[:300])])
            if number in verdicts.bad and not 1 <= verdicts.bad[number][0] <= len(text) + 1:
                misplaced += 1
            if number in verdicts.good and expected[number] == GOOD:
                differ += repr(parse(text, number == 1)) != repr(verdicts.good[number])
    usage = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "lines": len(expected), "blank": len(expected) - len(rows), "bad_by_oracle": len(bad),
        "bad_by_product": len(verdicts.bad), "disagreements": len(wrong), "values_differ": differ,
        "problems_without_a_place": misplaced, "exceptions": len(verdicts.exceptions),
        "kinds_of_bad": dict(sorted(Counter(expected[number] for number in bad).items())),
        "reasons": len({reason for _, reason in verdicts.bad.values()}), "by": "command" if command else "functions",
        "seconds": round(verdicts.seconds, 2), "peak_rss_mb": round(usage[command] / 1024, 1),
        "examples": examples + verdicts.exceptions[:3], "expected_lines": count,
    }


def main() -> int:
    """Write the lines, compare, print; 1 where anything is wrong."""
    options = asked(
        __doc__, lines=100_000, seed=1, long=(1, "lines of more than 64 MiB"),
        command=(False, "by the real command instead of its functions"),
    )
    with workplace() as place:
        path = place / "rows.jsonl"
        with path.open("wb") as file:
            for line in lines(options.lines, options.seed, options.long):
                file.write(line.replace(b"\n", b" ") + b"\n")
        figures = compare(path, options.lines, options.command)
    print(json.dumps(figures, indent=1))
    faults = ("disagreements", "values_differ", "problems_without_a_place", "exceptions")
    return int(any(figures[name] for name in faults) or figures["lines"] != options.lines)


if __name__ == "__main__":
    raise SystemExit(main())
