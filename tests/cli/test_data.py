"""`tuner data` by its real command lines: list, show, verify and clean up; what is printed, and with which code."""

import subprocess
from pathlib import Path

import pytest

from tests.data import tiny
from tests.fixtures import commands
from tests.fixtures.bits import flip_bit
from tests.fixtures.commands import document
from tuner.data.building.prepare import PreparedInfo, prepare


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
