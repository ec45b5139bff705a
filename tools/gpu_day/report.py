"""The lines of a day, or of several calls of one, as one table in Markdown."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OURS = ("part", "what", "ok", "seconds", "at")
"""Keys of a line that are no figures."""


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All lines in order; a path may be the directory of a day."""
    files = [path / "lines.jsonl" if path.is_dir() else path for path in paths]
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def table(lines: list[dict[str, Any]]) -> str:
    """Machine and versions, then a row for each check or figure; what failed is counted at the end."""
    machines = [line for line in lines if line["what"] == "machine"]
    rows = [line for line in lines if line["what"] != "machine"]
    said = dict.fromkeys(_figures(line) for line in machines)  # several calls of one day say the same
    failed = sum(line["ok"] is False for line in rows)
    checks = sum(line["ok"] is not None for line in rows)
    head = [*said, "", "| part | what | found | |", "|---|---|---|---|"]
    body = [f"| {line['part']} | {_cell(line['what'])} | {_cell(_figures(line))} | {_judged(line)} |" for line in rows]
    return "\n".join([*head, *body, "", f"{checks - failed} of {checks} checks passed.", ""])


def _figures(line: dict[str, Any]) -> str:
    figures = {name: value for name, value in line.items() if name not in OURS and value not in ([], {})}
    return " · ".join(f"{name} {_value(value)}" for name, value in figures.items())


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:400]


def _judged(line: dict[str, Any]) -> str:
    return {True: "ok", False: "**failed**", None: ""}[line["ok"]]
