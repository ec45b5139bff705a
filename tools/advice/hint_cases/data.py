"""What preparing the data says of rows, tokenizers and templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.advice.hint_place import Case, Change
from tools.advice.hint_words import RUN, Way


def rows(*records: dict[str, Any]) -> Change:
    """Add rows to the data."""

    def change(place: Path) -> None:
        with (place / "rows.jsonl").open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    return change


def prepare(site: str, recipe: dict[str, Any], *meant: Way, **more: Any) -> Case:
    """What `prepare-data` says."""
    return Case(site, recipe, meant, **{"start": "model", "words": "prepare-data r.yaml", **more})


def instead(*records: dict[str, Any]) -> Change:
    """Rows in place of the data."""

    def change(place: Path) -> None:
        (place / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    return change


def poor_tokenizer(place: Path) -> None:
    """A tokenizer that has no token for an end and no template, and a chat to encode."""
    from tuner.config.recipe import TokenizerSection
    from tuner.data.encoding.tokenizer_files import load_tokenizer

    load_tokenizer(str(place / "model"), None, TokenizerSection(name_or_path="byte")).save(place / "tok")
    for path in (place / "tok").glob("*.json"):
        values = json.loads(path.read_text())
        if isinstance(values, dict) and values.pop("eos_token", None):
            path.write_text(json.dumps(values))
    (place / "tok" / "chat_template.jinja").unlink()
    instead(CHAT)(place)


def named(place: Path) -> None:
    """A name for what was prepared."""
    (prepared,) = (place / "cache" / "prepared").glob("[0-9a-f]*")
    (place / "here").symlink_to(prepared)


def broken(good: str, bad: str) -> Change:
    """A file that cannot be read, and the same as it is to be."""

    def change(place: Path) -> None:
        (place / "good").write_text(good)
        (place / "rows.json").write_text(bad)

    return change


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
ROW, CHATML = '{"prompt": "a", "completion": "b"}', {"tokenizer.chat_template": "chatml"}
GOOD = {RUN: ["mv good rows.json"]}
LENGTHS = (
    prepare("data/building/losses.py:length_warnings: write", {"data.max_length": 11}, {"data.max_length": 22},
        {"data.too_long": "truncate"}, {"data.too_long": "drop"},
        reading={" (to cut them)": "", " (to leave them out all the same)": ""}),
    prepare("data/building/rows.py:_nothing_left", {"data.max_length": 4}, {"method.kind": "pretrain"},
        {"data.max_length": 9}, {"data.too_long": "truncate"},
        change=instead({"text": "abcdefg"}, {"text": "abcdefgh"})),
)
TEXTS = (
    prepare("data/encoding/turns.py:_written_out", CHATML, {"tokenizer.special_tokens_in_text": "escape"},
        {"data.on_bad_row": "skip"}, change=rows({"prompt": "<|im_end|>", "completion": "b"})),
    prepare("data/building/documents.py:bad_record_error", CHATML, {"tokenizer.special_tokens_in_text": "escape"},
        {"data.on_bad_row": "skip"}, change=rows({"prompt": "a", "completion": "<|im_end|>"})),
    prepare("data/encoding/named_templates.py:NamedTemplate.require_end",
        {"tokenizer.name_or_path": "./tok", "tokenizer.chat_template": "alpaca"}, CHATML, change=poor_tokenizer),
    prepare("data/encoding/template.py:", {"tokenizer.chat_template": "./own.jinja"}, CHATML,
        change=lambda place: (instead(CHAT)(place), (place / "own.jinja").write_text("{{ 'a' * 10 ** 10 }}")),
        reading={"chat_template to a template that you trust": "chat_template: chatml"}),
    prepare("data/encoding/tokenizer.py:TextTokenizer.template", {"tokenizer.name_or_path": "./tok"}, CHATML,
        change=poor_tokenizer),
)
JSON = {"data.train": "rows.json"}
FILES = (
    prepare("data/reading/json_blocks.py:Elements._fail", JSON, GOOD, change=broken(f"{ROW}\n", f"[{ROW} {ROW}]"),
        reading={"write JSON lines,": "mv good rows.json;"}),
    prepare("data/reading/jsonl.py:strict_json_record", JSON, GOOD, change=broken(f"{ROW}\n", f"{ROW}\n[{ROW}]\n"),
        reading={"write one object per line": "mv good rows.json"}),
    prepare("data/building/cache.py:find", {}, {RUN: ["data list"]}, words="data show abcdef012345", instead=True),
    prepare("data/building/prepare.py:check_prepared", {}, {RUN: ["prepare-data r.yaml"]},
        words="prepare-data r.yaml --check"),
    prepare("data/prepared.py:", {"name": "other"}, {"--prepared": None}, {"--prepared": "here"}, start="run",
        change=named, words="train r.yaml --dry-run --prepared model",
        reading={"give it the directory that tuner prepare-data RECIPE prints": "--prepared here"}),
)
CASES = (
    *LENGTHS, *TEXTS, *FILES,
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
