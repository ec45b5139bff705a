"""What preparing the data says of rows, tokenizers and templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.advice.hint_place import Case, Change
from tools.advice.hint_words import Way


def rows(*records: dict[str, Any]) -> Change:
    """Add rows to the data."""

    def change(place: Path) -> None:
        with (place / "rows.jsonl").open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    return change


def prepare(site: str, recipe: dict[str, Any], *meant: Way, **more: Any) -> Case:
    """What `prepare-data` says."""
    return Case(site, recipe, meant, **{"start": "model", "words": "prepare-data r.yaml", **more})


CASES = (
    prepare("data/building/documents.py:: fix the row", {}, {"data.on_bad_row": "skip"}, change=rows({"prompt": 5,
        "completion": "b"})),
    prepare("data/building/spec.py:resolve_max_length", {"data.max_length": 128}, {"data.max_length": 64}),
    prepare("data/encoding/tokenizer_files.py:without_files: set", {"tokenizer.name_or_path": None},
        {"tokenizer.name_or_path": "byte"},
            reading={"name_or_path (`byte` needs no files)": "name_or_path: byte"}),
    prepare("data/encoding/tokenizer_files.py:without_files: name", {"tokenizer.name_or_path": "./empty"},
        {"tokenizer.name_or_path": "byte"},
            change=lambda place: (place / "empty").mkdir()),
)  # fmt: skip
