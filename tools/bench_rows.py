"""Rows for the benchmarks: distinct conversations of several turns about real prose, code and questions.

The text is Python's documentation as Debian packages it (prose in reStructuredText), the standard library's own source
(code), and LLaMA-Factory's small files (questions and answers in English and Chinese, tool calls as text). No piece of
text is used twice until all are used; `conversations` ends there, `endless` goes on with another order.
"""

import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGE = "python3.11-doc"
QUESTIONS = (
    "What does the documentation say about {}?",
    "Explain {} to me, please.",
    "I am stuck with {}. Can you help?",
    "Show me {}.",
    "And how is it with {}?",
    "Could you write out the part on {} in full?",
    "{}?",
)
SYSTEMS = (
    "You are a patient programming tutor. Answer from the documentation.",
    "Be brief and exact. Quote code where it helps.",
    "You help the developers of a large Python code base.",
)
PIECE_CHARS = (120, 2600)
"""Shortest and longest piece of text in one answer."""
_CONTROL = re.compile(r"<\|?[a-z_]{3,}\|?>")
"""What may be a control token of some tokenizer, such as <filename>: the command refuses it in text."""
_GAP = re.compile(r"\n\s*\n")
Row = dict[str, Any]


MAX_BYTES = 8000
"""A row has at most so many tokens: peers truncate a longer one where we drop it, and nothing could be compared."""


def documentation(directory: Path) -> Path:
    """Return the folder of Python's documentation sources, fetched once into `directory` with apt-get."""
    target = directory / PACKAGE
    if target.is_dir():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as scratch:
        for command in (["apt-get", "download", PACKAGE], ["bash", "-c", "dpkg-deb -x *.deb out"]):
            result = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                raise SystemExit(f"{PACKAGE} cannot be fetched with apt-get: {result.stderr.strip()}")
        (sources,) = {path.resolve() for path in Path(scratch).glob("out/usr/share/doc/*/html/_sources")}
        shutil.copytree(sources, target)
    return target


def pieces(docs: Path | None) -> list[tuple[str, str]]:
    """(what it is about, text) of every piece of the documentation, where it is given, and of the standard library."""
    found: list[tuple[str, str]] = []
    for path in sorted(docs.rglob("*.txt")) if docs else []:
        found += _cut(path.name.split(".")[0], path.read_text(encoding="utf-8"), fence="")
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if "site-packages" not in path.parts and path.stat().st_size < 1 << 20:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            found += _cut(path.relative_to(library).as_posix(), text, fence="```")
    return list({text: (about, text) for about, text in found}.values())


def _cut(name: str, text: str, fence: str) -> Iterator[tuple[str, str]]:
    """Cut a file at its blank lines into pieces of differing length."""
    lengths = random.Random(name)
    gathered: list[str] = []
    goal = _length(lengths)
    for block in _GAP.split(text):
        if not block.strip() or len(block) > PIECE_CHARS[1]:
            continue
        gathered.append(block.rstrip())
        if sum(map(len, gathered)) >= goal:
            body = "\n\n".join(gathered).strip()
            about = f"{gathered[0].strip().splitlines()[0][:60]} ({name})"
            if len(body) <= PIECE_CHARS[1] and not _CONTROL.search(body):
                yield about, f"{fence}\n{body}\n{fence}" if fence else body
            gathered, goal = [], _length(lengths)


def _length(lengths: random.Random) -> int:
    return min(max(int(lengths.lognormvariate(6.2, 0.7)), PIECE_CHARS[0]), PIECE_CHARS[1] // 2)


def small_rows(folder: Path) -> list[Row]:
    """The conversations of LLaMA-Factory's files, as messages."""
    rows = []
    for name in ("alpaca_en_demo.json", "alpaca_zh_demo.json"):
        for row in json.loads((folder / name).read_text(encoding="utf-8")):
            rows.append(_row([f"{row['instruction']}\n{row['input']}".strip(), row["output"]]))
    for name in ("glaive_toolcall_en_demo.json", "glaive_toolcall_zh_demo.json"):
        for row in json.loads((folder / name).read_text(encoding="utf-8")):
            turns = [turn["value"] for turn in row["conversations"]]
            rows.append(_row(turns[: len(turns) // 2 * 2]))
    distinct = {json.dumps(row): row for row in rows}
    return [row for row in distinct.values() if all(message["content"].strip() for message in row["messages"])]


def _row(turns: Sequence[str], system: str | None = None) -> Row:
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return {"messages": [{"role": "system", "content": system}] * (system is not None) + messages}


def conversations(docs: Path, folder: Path, seed: int = 0) -> Iterator[Row]:
    """Every piece once, in conversations of one to six questions, with the small rows among them."""
    chance = random.Random(seed)
    pool, small = pieces(docs), small_rows(folder)
    chance.shuffle(pool)
    chance.shuffle(small)
    spread = max(len(pool) // (3 * max(len(small), 1)), 1)
    yield from _told(pool, chance, small, spread)


def endless(seed: int = 0) -> Iterator[Row]:
    """Conversations without end about the standard library, each distinct by its pieces and by a number."""
    chance = random.Random(seed)
    pool = pieces(None)
    for turn in itertools.count():
        chance.shuffle(pool)
        for i, row in enumerate(_told(pool, chance, [], 1)):
            row["messages"][-2]["content"] += f" (question {turn}.{i})"
            yield row


def _told(pool: list[tuple[str, str]], chance: random.Random, small: list[Row], spread: int) -> Iterator[Row]:
    remaining = iter(pool)
    for number in itertools.count():
        if small and number % spread == 0:
            yield small.pop()
        count = min(1 + int(chance.expovariate(0.6)), 6)
        turns: list[str] = []
        for about, text in itertools.islice(remaining, count):
            turns += [chance.choice(QUESTIONS).format(about), text]
        if not turns:
            return
        yield _row(turns, chance.choice(SYSTEMS) if chance.random() < 0.3 else None)


def write(rows: Iterator[Row], path: Path, size: int) -> tuple[int, int]:
    """Write rows as JSONL up to `size` bytes, without those that may not fit a row; return (rows, bytes)."""
    count = written = 0
    with path.open("wb") as stream:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
            if len(line) > MAX_BYTES:
                continue
            if written + len(line) > size:
                break
            stream.write(line)
            count, written = count + 1, written + len(line)
    return count, written


if __name__ == "__main__":
    raise SystemExit(f"{Path(sys.argv[0]).name} is a part of bench_prepare.py and prepare_rss.py")
