"""What each test costs in seconds of processor time, its own and that of the commands it waited for.

    TUNER_TEST_COSTS=costs.jsonl python -m pytest -p tools.test_costs tests
    python -m tools.test_costs costs.jsonl [--by file|directory|test] [--top N]

As a plugin of pytest it adds one line to the file for each test: the test, and the processor seconds and seconds that
passed, of its fixtures too. Processor time says the same on a machine that is busy with other things. Run as a command
it sums such a file, largest first.
"""

import contextlib
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.commands import asked, one_of, read_lines

VARIABLE = "TUNER_TEST_COSTS"
LEVELS = ("test", "file", "directory")


def processor_seconds() -> float:
    """What this process, its children, and the processes that those have waited for have used so far."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = Path(f"/proc/self/task/{os.getpid()}/children")
    running = [Path(f"/proc/{pid}/stat") for pid in own.read_text().split()]
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_used_s, running))


def _used_s(stat: Path) -> float:
    """User and system time of a process and of those it has waited for."""
    with contextlib.suppress(OSError):  # it has ended
        ticks = stat.read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write one line for each test."""
    passed, used = time.monotonic(), processor_seconds()
    result = yield
    line = {"test": item.nodeid, "cpu_s": processor_seconds() - used, "wall_s": time.monotonic() - passed}
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")
    return result


def group(test: str, level: str) -> str:
    """The name under which a test is summed: itself, its file, or the directory below `tests/` that it is in."""
    file = test.partition("::")[0]
    if level == "directory":
        parts = Path(file).parts
        return "/".join(parts[:2]) if len(parts) > 2 else parts[0]
    return file if level == "file" else test


def main() -> int:
    """Sum a file of lines."""
    options = asked(__doc__, {"lines": Path}, by=one_of(LEVELS, "file"), top=40)
    processor: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for cost in read_lines(options.lines):
        name = group(cost["test"], options.by)
        processor[name] += cost["cpu_s"]
        passed[name] += cost["wall_s"]
        tests[name] += 1
    print(f"{'cpu s':>8} {'passed s':>8} {'tests':>6}")
    for name, seconds in processor.most_common(options.top):
        print(f"{seconds:8.1f} {passed[name]:8.1f} {tests[name]:6} {name}")
    print(f"{processor.total():8.1f} {passed.total():8.1f} {tests.total():6} all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
