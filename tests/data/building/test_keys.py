"""The names of directories: every field of the recipe is classified, and behaves as it is classified.

And what may change between hashing and reading.
"""

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.data import tiny
from tuner.config import methods, recipe
from tuner.config.recipe import DataSource
from tuner.data.building import documents
from tuner.data.building.prepare import find_prepared, prepare
from tuner.data.building.spec import PrepareSpec, keys_of
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.reading import json_blocks
from tuner.data.reading.blocks import blocks
from tuner.data.sources import expand
from tuner.errors import DataError

FIELDS: dict[str, dict[str, tuple[str, Any]]] = json.loads(
    Path(__file__).with_name("keys.json").read_text(encoding="utf-8")
)
"""What each field of the recipe decides, and a value that differs from the base request's.

`documents`: the encoded documents and with them everything; `rows`: the packed rows alone; `content`: the bytes that it
leads to decide, not its own text; or `nothing`. Null where a test below changes what it leads to.
"""
ROWS = tiny.rows(30)


def write(directory: Path) -> Path:
    return tiny.write_rows(directory / "rows.jsonl", ROWS)


def request(tmp_path: Path, section: str = "", **change: Any) -> PrepareSpec:
    source = {"path": str(write(tmp_path)), **(change if section == "DataSource" else {})}
    data = {k: v for k, v in change.items() if section == "DataSection" and k != "max_length"}
    examples = {"kind": "sft", "train_on": "assistant", **(change if section == "Examples" else {})}
    built = tiny.request(tmp_path / "cache", [source], max_length=change.get("max_length", 64), **data)
    special = change.get("special_tokens_in_text", "refuse") if section == "TokenizerSection" else "refuse"
    return replace(built, examples=methods.Examples(**examples), special_tokens_in_text=special)


def test_every_field_is_classified_and_has_a_change() -> None:
    for section, parts in FIELDS.items():
        kind = getattr(methods if section == "Examples" else recipe, section)
        known = [item.name for item in fields(kind)] if is_dataclass(kind) else kind.model_fields
        assert set(parts) == set(known), section


TRIED = [(s, f) for s, parts in FIELDS.items() for f, (_, value) in parts.items() if value is not None]


@pytest.mark.parametrize(("section", "field"), TRIED)
def test_a_field_decides_what_it_is_said_to(tmp_path: Path, section: str, field: str) -> None:
    part, value = FIELDS[section][field]
    base, changed = keys_of(request(tmp_path)), keys_of(request(tmp_path, section, **{field: value}))
    assert (base.encoded != changed.encoded) == (part == "documents"), part
    assert (base.prepared != changed.prepared) == (part in {"documents", "rows"}), part


def swapped_merges() -> bytes:
    """The tokenizer with two of its merges in the other order: the same vocabulary, other ids for some text."""
    tokenizer = json.loads(tiny.tokenizer_json())
    merges = tokenizer["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]
    return json.dumps(tokenizer).encode()


def test_one_byte_of_source_template_or_tokenizer_builds_anew(tmp_path: Path) -> None:
    first = prepare(request(tmp_path))
    template = tiny.CHATML.replace("You are helpful", "You are helpfux")
    base = request(tmp_path)
    for tokenizer in (tiny.tokenizer(template), TextTokenizer({**tiny.files(), "tokenizer.json": swapped_merges()})):
        info = prepare(PrepareSpec(base.data, base.examples, tokenizer, 64, 1, base.cache_dir))
        assert not info.cached
        assert info.key != first.key
    text = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "changed.jsonl").write_text(text.replace("question 7", "question 8", 1))
    changed = prepare(tiny.request(tmp_path / "cache", tmp_path / "changed.jsonl"))
    assert not changed.cached
    assert changed.key != first.key


def test_what_decides_nothing_is_a_hit(tmp_path: Path) -> None:
    first = prepare(request(tmp_path))
    assert not first.cached
    (tmp_path / "moved").mkdir()
    moved = tiny.write_rows(tmp_path / "moved" / "other.jsonl", ROWS)
    for again in (
        tiny.request(tmp_path / "cache", moved),
        tiny.request(tmp_path / "cache", moved.parent),
        tiny.request(tmp_path / "cache", str(moved.parent / "*.jsonl")),
        tiny.request(tmp_path / "cache", moved, workers=2, shuffle=False),
        tiny.request(tmp_path / "cache", moved, seed=2),
        tiny.request(tmp_path / "cache", moved, cache_dir=str(tmp_path / "unused")),
    ):
        info = prepare(again)
        assert info.cached
        assert info.path == first.path
    elsewhere = prepare(tiny.request(tmp_path / "elsewhere", moved))
    assert elsewhere.key == first.key


def test_the_seed_counts_where_it_is_used(tmp_path: Path) -> None:
    path = str(write(tmp_path))

    def key(seed: int, **data: Any) -> str:
        source = {"path": path, **{name: data.pop(name) for name in ("weight", "count") if name in data}}
        source |= {"seed": data.pop("seed_of_source")} if "seed_of_source" in data else {}
        return keys_of(tiny.request(tmp_path / "cache", [source], seed=seed, **data)).encoded

    assert key(1) == key(2)
    assert key(1, weight=2.0) == key(2, weight=2.0)
    for data in ({"weight": 0.5}, {"weight": 2.5}, {"count": 7}, {"eval": "10%"}):
        assert key(1, **data) != key(2, **data), data
    own = {"weight": 0.5, "seed_of_source": 7}
    assert key(1, **own) == key(2, **own) != key(1, **{**own, "seed_of_source": 8})
    assert key(1, **own, eval="10%") != key(2, **own, eval="10%")


def test_a_source_that_changes_while_it_is_read_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", [tiny.chat("a", "b")])
    request = tiny.request(tmp_path / "cache", path)
    read = documents._read

    def edited(*arguments: object) -> None:
        tiny.write_rows(path, [tiny.chat("a", "other")])
        read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(documents, "_read", edited)
    with pytest.raises(DataError, match=r"r\.jsonl: changed while it was read"):
        prepare(request)
    monkeypatch.undo()
    assert find_prepared(request) is None
    assert not list((tmp_path / "cache" / "encoded").glob("[!.]*"))
    prepare(request)


def test_end_tokens_of_the_model_decide_the_documents(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", [tiny.chat("a", "b")])
    tokenizers = [TextTokenizer(tiny.files(), None, ends) for ends in ((), (0,))]
    keys = [keys_of(tiny.request(tmp_path, path, tokenizer=tokenizer)).encoded for tokenizer in tokenizers]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_lines_are_counted_over_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setattr(json_blocks, "BLOCK_BYTES", 200)
    path = tiny.write_rows(tmp_path / "r.jsonl", [tiny.chat("a", f"b {i}") for i in range(40)])
    path.write_text(path.read_text() + "\n{}\n" + path.read_text())
    assert sum(1 for file in expand([DataSource(path=str(path))]) for _ in blocks(file)) > 5
    request = tiny.request(tmp_path / "cache", path, on_bad_row=policy)
    if policy == "error":
        with pytest.raises(DataError, match=r"r\.jsonl:42:1: "):
            prepare(request)
        return
    rejected = [json.loads(line) for line in (prepare(request).path / "rejects.jsonl").read_text().splitlines()]
    assert [line["line"] for line in rejected] == [42]
