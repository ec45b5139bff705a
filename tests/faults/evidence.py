"""What a run leaves behind, read for comparison, and the names of the calls that led there."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.calls import Call

DETERMINED = ("kind", "step", "epoch", "tokens", "loss", "lr", "grad_norm")


@dataclass
class Sound:
    """What unbroken work leaves: hashes by step, the log, the rows of each step, files."""

    sha256: dict[int, str] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    order: dict[int, str] = field(default_factory=dict)
    settled: dict[str, str] = field(default_factory=dict)
    """SHA-256 of what a run writes once, when it begins."""
    kept: set[int] = field(default_factory=set)

    def note(self, run: Path, order: Path) -> None:
        """Read all but the hashes of a run that has ended."""
        self.settled = settled_files(run)
        self.log, self.samples = read_log(run)
        self.order = read_order(order)[0]
        self.kept = {int(path.name[5:]) for path in (run / "checkpoints").iterdir()}


def read_order(path: Path) -> tuple[dict[int, str], list[str]]:
    """The rows of each step, by rank and step in one number, and steps that were trained on other rows later."""
    order: dict[int, str] = {}
    wrong = []
    for line in path.read_text().splitlines():
        rank, step, rows = line.split()
        key = int(rank) * 1_000_000 + int(step)
        if order.setdefault(key, rows) != rows:
            wrong.append(f"step {step} was trained on other rows the second time")
    return order, wrong


def read_log(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the recipe determines of metrics.jsonl, and samples.jsonl."""
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = run / "samples.jsonl"
    told = [json.loads(line) for line in samples.read_text().splitlines()] if samples.exists() else []
    return [{key: line[key] for key in DETERMINED if key in line} for line in log], told


def first_difference(got: list[Any], wanted: list[Any]) -> str:
    """Where two logs part."""
    for left, right in zip(got, wanted, strict=False):
        if left != right:
            return f"{left} where {right} was wanted"
    return f"{len(got)} lines, {len(wanted)} were wanted"


def contents(directory: Path) -> dict[str, str]:
    """SHA-256 of every file but locks and what is unfinished."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and "/." not in str(path)]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def settled_files(run: Path) -> dict[str, str]:
    """SHA-256 of what a run writes once, when it begins."""
    names = ("recipe.yaml", "recipe.resolved.yaml", "tokenizer/", "model_config/")
    return {name: digest for name, digest in contents(run).items() if name.startswith(names)}


def left_over(root: Path) -> list[str]:
    """Names of unfinished and unwanted things."""
    return [str(path.relative_to(root)) for path in root.rglob(".t*") if path.name.startswith((".tmp-", ".trash-"))]


def label(call: Call, root: Path) -> str:
    """A call as one of the distinct points: its name and its file, without what is random."""
    names = [path.removeprefix(str(root)).lstrip("/") for path in (call.path, call.other) if path]
    text = " -> ".join(name or "." for name in names)
    text = re.sub(r"\b(?:[0-9a-f]{16}){1,4}\b", "<key>", text)
    text = re.sub(r"-(?:\d+-)?[0-9a-f]{8}\b", "-<random>", text)
    return f"{call.name} {re.sub(r'(<key>-)[0-9]+', r'<key>-<pid>', text)}"


def phase(call: Call) -> str:
    """The part of the work that a call belongs to, by its path."""
    path = f"{call.path} {call.other}"
    if "/exports" in path:
        return "export"
    if "/cache" in path:
        return "prepare"
    if "/checkpoints" in path:
        if "/.trash-" in path:
            return "prune"
        if "/.tmp-" in path:
            return "sweep" if call.kind in ("unlink", "rmdir") else "save"
        return "run" if call.kind == "mkdir" and path.endswith("/checkpoints ") else "save"
    if re.search(r"/(metrics|samples)\.jsonl|/\.tmp-(metrics|samples)", path):
        return "records"
    return "run"
