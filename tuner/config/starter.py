"""A first recipe for somebody's own rows: looks at the first ones, writes YAML with a comment on each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.config.dump import flow
from tuner.errors import DataError, RecipeError

ROWS = 200
FEWEST_TO_SPLIT = 50
"""With fewer rows 2% is less than one of them."""
MAX_LINE = 1 << 24
CHARACTERS_PER_TOKEN = 3
FORMS = {"messages": ("messages",), "prompt_completion": ("prompt", "completion"), "text": ("text",)}
TEXT_SUFFIXES = {".txt", ".text", ".md", ".markdown", ".rst"}
"""Files that are one document as a whole."""
SMALLEST, LARGEST = 512, 2048


@dataclass(frozen=True)
class Look:
    """What the first rows of a file are: their form, how many were read, the longest one's characters."""

    form: str
    rows: int
    longest: int

    @property
    def max_length(self) -> int:
        """A power of two of tokens that the longest row seen fits into, by a cautious estimate; at most 2048."""
        length = SMALLEST
        while length < LARGEST and length * CHARACTERS_PER_TOKEN < self.longest:
            length *= 2
        return length


def look(path: Path) -> Look:
    """Return the form of the first rows (JSON lines, or plain text); DataError names the line that has none."""
    if not path.is_file():
        raise DataError(f"no file {path}", hint="-d takes a file of JSON lines or plain text")
    if path.suffix in TEXT_SUFFIXES:
        with path.open("rb") as file:
            text = file.read(MAX_LINE).decode("utf-8", "replace")
        if not text.strip():
            raise DataError(f"{path} is empty")
        return Look("text", 1, len(text))
    form, rows, longest = "", 0, 0
    for number, row in _rows(path):
        found = next((name for name, keys in FORMS.items() if all(key in row for key in keys)), None)
        if found is None:
            keys = ", ".join(sorted(row)) or "none"
            raise DataError(f"{path}:{number}:1  keys {keys}; allowed: messages, prompt and completion, or text")
        if form and found != form:
            raise DataError(f"{path}:{number}:1  a {found} row; the rows before are {form}")
        form, rows = found, rows + 1
        longest = max(longest, sum(len(part) for part in _texts([row[key] for key in FORMS[found]])))
    if not rows:
        raise DataError(f"{path} is empty")
    return Look(form, rows, longest)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number in range(1, ROWS + 1):
            line = file.readline(MAX_LINE)
            if not line:
                return
            if len(line) >= MAX_LINE:
                raise DataError(f"{path}:{number}:1  a line of more than {MAX_LINE:,} bytes")
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise DataError(f"{path}:{number}:{error.start + 1}  not UTF-8") from None
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{number}:{error.colno}  not JSON: {error.msg}") from None
            except RecursionError:
                raise DataError(f"{path}:{number}:1  nested too deeply") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}:1  a row is a JSON object")
            yield number, row


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def starter(model: str, data: str, seen: Look) -> str:
    """Return the commented recipe; `data` is written as it is given, so it should suit where the file will lie."""
    if not model.strip() or not model.isprintable():
        raise RecipeError(f"got {model!r}; -m takes a hub name or a local directory")
    method = "pretrain" if seen.form == "text" else "sft"
    every = "every token is learned" if method == "pretrain" else "the answers are learned"
    held_out = ("  eval: 2%", "held out, never trained on; or a file")
    if seen.rows < FEWEST_TO_SPLIT:
        held_out = ("  # eval: held_out.jsonl", "rows never trained on; there are too few here to split some off")
    lines = [
        ("model:", ""),
        (f"  name_or_path: {flow(model)}", "hub name or local directory"),
        ("method:", ""),
        (f"  kind: {method}", f"{seen.form} rows: {every}"),
        ("data:", ""),
        (f"  train: {flow(data)}", f"looked at {seen.rows:,} rows: {seen.form}"),
        held_out,
        (f"  max_length: {seen.max_length}", f"tokens of a packed row; longest seen: {seen.longest:,} characters"),
        ("train:", ""),
        ("  duration: 1 epoch", "or 500 steps, 2B tokens"),
        ("  global_batch_size: 16", "rows per optimizer step, on any number of processes"),
        ("  micro_batch_size: 1", "rows at once: raise it while memory lasts"),
        ("# adapter: {kind: lora, r: 16}", "a small adapter instead of all weights"),
        ("# optimizer: {lr: 1e-4}", "auto suits the model's size; tuner config show prints the rest"),
    ]
    width = min(max(len(text) for text, _ in lines), 56)
    return "\n".join(f"{text.ljust(width)}  # {note}" if note else text for text, note in lines) + "\n"
