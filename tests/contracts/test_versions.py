"""The table of versions is what `pyproject.toml` accepts and `constraints.txt` pins."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BOUNDED = {"torch", "transformers", "peft", "liger-kernel"}


def documented() -> dict[str, tuple[str, str]]:
    """Range and tested version of each library in the table."""
    rows = re.findall(r"^\| ([\w-]+) \| ([>=<.,\d]+) \| ([.\d]+) \|", (ROOT / "docs/versions.md").read_text(), re.M)
    return {name: (accepted, tested) for name, accepted, tested in rows}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_table_is_what_is_accepted_and_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    accepted = dict(re.fullmatch(r"([\w-]+)(.*?)(?:;.*)?", line).groups() for line in project["dependencies"])  # type: ignore[union-attr]
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text().replace("_", "-"), re.M))
    table = documented()
    assert set(table) == BOUNDED
    assert table == {name: (accepted[name], pins[name]) for name in BOUNDED}


def test_the_first_release_that_is_not_tested_is_kept_out() -> None:
    for accepted, tested in documented().values():
        low, high = re.fullmatch(r">=([.\d]+),<([.\d]+)", accepted).groups()  # type: ignore[union-attr]
        whole, minor = numbers(tested)[:2]
        assert numbers(low) <= numbers(tested) < numbers(high) == (whole, minor + 1)
