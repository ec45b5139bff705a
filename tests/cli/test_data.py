"""`tuner data` by its real command lines: list, show, verify and clean up; what is printed, and with which code.

And explained rows as people see them.
"""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data import pairs, tiny
from tests.fixtures import commands, forked
from tests.fixtures.bits import flip_bit
from tests.fixtures.commands import document
from tests.fixtures.tables import cases
from tuner.cli.work.prepare_data import row_texts, token_lines
from tuner.data.building.documents import explain
from tuner.data.building.prepare import PreparedInfo, prepare
from tuner.errors import DataError


@pytest.fixture
def info(tmp_path: Path) -> PreparedInfo:
    rows = [tiny.chat(f"question {i}", f"answer {i}") for i in range(20)]
    return prepare(tiny.request(tmp_path / "cache", tiny.write_rows(tmp_path / "r.jsonl", rows), eval="2 documents"))


def data(info: PreparedInfo, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return commands.tuner("data", *words, stdin=stdin, TUNER_CACHE=str(info.path.parents[1]))


def test_ls(info: PreparedInfo, tmp_path: Path) -> None:
    lines = data(info, "list").stdout.splitlines()
    assert lines[0].split() == ["level", "key", "bytes", "documents", "tokens", "rows", "sources"]
    prepared, encoded = (line.split() for line in lines[1:])
    tokens = f"{sum(info.report[split]['tokens'] for split in ('train', 'eval')):,}"
    rows = str(sum(info.report[split]["packed_rows"] for split in ("train", "eval")))
    assert prepared[:2] == ["prepared", info.key]
    assert prepared[3:] == ["20", tokens, rows, "x", "64", str(tmp_path / "r.jsonl")]
    assert encoded[0] == "encoded"
    assert encoded[3:] == ["20", tokens, str(tmp_path / "r.jsonl")]
    found = document(data(info, "list", "--json"))
    assert [entry["level"] for entry in found["artifacts"]["directories"]] == ["prepared", "encoded"]
    assert found["metrics"]["directories"] == 2
    empty = data(info, "list", "--cache-dir", str(tmp_path / "none"))
    assert empty.stdout == f"nothing is prepared in {tmp_path / 'none'}\n"
    (info.path / "train.rows.arrow").unlink()
    assert "damaged" in data(info, "list").stdout.splitlines()[1]


def test_show(info: PreparedInfo) -> None:
    shown = data(info, "show", info.key[:7])
    assert shown.returncode == 0, shown.stderr
    for line in (
        f"key       {info.key}",
        "train     18 documents",
        "eval      2 documents",
        "masks     verified for all 20",
    ):
        assert line in shown.stdout
    found = document(data(info, "show", "-", "--json", stdin=f"{info.path}\n"))
    assert found["metrics"] == info.report
    encoded = next((info.path.parents[1] / "encoded").glob("[!.]*"))
    assert "train     18 documents" in data(info, "show", str(encoded)).stdout
    (info.path / "train.rows.arrow").unlink()
    damaged = document(data(info, "show", info.key, "--json"), 3)
    assert "is damaged" in damaged["error"]["message"]
    assert document(data(info, "show", "0000", "--json"), 3)["error"]["hint"] == "list them: tuner data list"


def test_verify(info: PreparedInfo) -> None:
    whole = data(info, "verify")
    assert (whole.returncode, whole.stdout.split(":")[1].strip()) == (0, "all as they were written")
    for name in ("train.rows.arrow", "samples.jsonl"):
        flip_bit(info.path / name)
    failed = data(info, "verify", info.key[:5], "--json")
    message = document(failed, 6)["error"]["message"]
    assert "2 damaged" in message
    assert all(f"{info.path / name}: its SHA-256 differs" in message for name in ("train.rows.arrow", "samples.jsonl"))
    assert "Traceback" not in failed.stderr
    encoded = next((info.path.parents[1] / "encoded").glob("[!.]*"))
    assert document(data(info, "verify", str(encoded), "--json"))["metrics"]["files"] == 3
    assert document(data(info, "verify", "--json"), 6)


def test_gc(info: PreparedInfo) -> None:
    assert data(info, "gc").stdout == "nothing to remove\n"
    leftover = info.path.parent / f".tmp-{info.key}-1"
    leftover.mkdir()
    (leftover / "a").write_text("12345")
    planned = data(info, "gc", "--dry-run")
    assert planned.stdout == f"would remove {leftover}  5 bytes: left by a builder that was killed\n"
    assert leftover.is_dir()
    found = document(data(info, "gc", "--json"))
    assert found["metrics"] == {"removed": 1, "bytes": 5, "dry_run": False}
    assert not leftover.exists()
    content = (info.path / "samples.jsonl").read_bytes()
    (info.path / "samples.jsonl").write_bytes(b"?" + content[1:])
    assert data(info, "gc").stdout == "nothing to remove\n"
    assert str(info.path) in data(info, "gc", "--verify").stdout
    assert data(info, "gc", "--unused").stdout.count("no prepared data was made from it") == 1
    assert data(info, "list").stdout.startswith("nothing is prepared")


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    return tiny.write_rows(
        tmp_path / "rows.jsonl", [tiny.chat("say \x1b[2Jhello\n\u202ex", "h\u00e9"), tiny.chat("b", "c")]
    )


def test_what_is_trained_is_in_brackets_and_control_characters_are_escaped(rows_file: Path, tmp_path: Path) -> None:
    rows = list(explain(tiny.request(tmp_path / "cache", rows_file), 2))
    text = row_texts(rows, tiny.tokenizer(), colour=False, every_token=False)
    assert "\x1b" not in text and "\u202e" not in text
    assert "[h\u00e9<|im_end|>]" in text and "[c<|im_end|>]" in text
    assert f"{rows_file}:1  " in text and f"{rows_file}:2  " in text
    assert "\x1b[7;32m[c<|im_end|>]\x1b[0m" in row_texts(rows, tiny.tokenizer(), colour=True, every_token=False)


@pytest.mark.parametrize(("too_long", "head", "kept"), cases(__file__, "what_length_costs_is_shown"))
def test_what_length_costs_is_shown(too_long: str, head: str, kept: int, tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "rows.jsonl", [tiny.chat("b", "c" * 26), tiny.chat("b", "c")])
    template = "{% for m in messages %}<|im_start|>{{ m.role[0] + m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
    tokenizer = tiny.tokenizer(template)
    spec = tiny.request(tmp_path / "cache", path, max_length=20, too_long=too_long, tokenizer=tokenizer)
    long, short = explain(spec, 2)
    text = row_texts([long], tokenizer, colour=False, every_token=False)
    assert head in text
    assert (len(long.kept), sum(json.loads(line)["kept"] for line in token_lines([long]).splitlines())) == (kept, kept)
    assert ("-- cut here; what follows is left out --" in text) == (too_long == "truncate")
    if kept:
        counts = prepare(spec).report["train"]  # of both documents; the short one trains two tokens
        assert counts["packed_trained"] == sum(token.trained for token in long.kept) + 2
    assert short.kept == short.tokens and "max_length" not in row_texts([short], tokenizer, False, False)


@pytest.mark.parametrize(("too_long", "heads", "kept"), cases(__file__, "both_answers_are_shown"))
def test_both_answers_are_shown_with_what_length_costs_them(
    too_long: str, heads: list[str], kept: list[int], tmp_path: Path
) -> None:
    rows = [{"prompt": "b b", "chosen": "c" * 30, "rejected": " c c"}]
    spec = pairs.spec(tmp_path, rows, max_length=36, too_long=too_long)
    views = list(explain(spec, 1))
    assert [len(view.kept) for view in views] == kept
    text = row_texts(views, tiny.tokenizer(), colour=False, every_token=False)
    assert all(head in text for head in heads) and "rejected, 8 tokens" in text
    if too_long == "truncate":
        assert prepare(spec).report["train"]["packed_tokens"] == sum(kept)
    (labelled,) = explain(pairs.spec(tmp_path, [{"prompt": "a", "completion": "b", "label": 0}], pairs.UNPAIRED), 1)
    assert "rows.jsonl:1  not wanted, " in row_texts([labelled], tiny.tokenizer(), False, False)


def test_bad_rows_are_left_out_where_they_are_skipped(rows_file: Path, tmp_path: Path) -> None:
    rows_file.write_text("{}\n" + rows_file.read_text())
    with pytest.raises(DataError, match="rows.jsonl:1:1: no "):
        list(explain(tiny.request(tmp_path / "cache", rows_file), 1))
    (row,) = explain(tiny.request(tmp_path / "cache", rows_file, on_bad_row="skip"), 1)
    assert row.line == 2


def test_every_token_has_a_line(rows_file: Path, tmp_path: Path) -> None:
    rows = list(explain(tiny.request(tmp_path / "cache", rows_file), 1))
    lines = row_texts(rows, tiny.tokenizer(), colour=False, every_token=True).splitlines()[-len(rows[0].tokens) :]
    assert [line.split()[2] == "trained" for line in lines] == [token.trained for token in rows[0].tokens]
    assert [int(line.split()[1]) for line in lines] == [token.id for token in rows[0].tokens]
    parsed = [json.loads(line) for line in token_lines(rows).splitlines()]
    assert [line["text"] for line in parsed] == [token.text for token in rows[0].tokens]


def test_a_terminal_gets_text_and_colour(rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.write_directory(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{name_or_path: {model}}}\ndata: {{train: {rows_file}, max_length: 64}}\n"
    )
    main, terminal = pty.openpty()
    monkeypatch.delenv("NO_COLOR", raising=False)
    command = [sys.executable, "-m", "tuner", "prepare-data", "recipe.yaml", "--explain", "1"]
    with forked.Popen(command, cwd=tmp_path, stdout=terminal, stderr=subprocess.PIPE) as process:
        os.close(terminal)
        shown = b""
        while True:
            try:
                part = os.read(main, 4096)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
    os.close(main)
    assert process.returncode == 0
    assert "\x1b[7;32m[h\u00e9<|im_end|>]\x1b[0m" in shown.decode()
