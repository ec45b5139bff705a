"""Durable files and directories."""

import errno
import hashlib
import json
import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.tables import cases
from tuner.errors import DataError, MachineError, as_tuner_error
from tuner.runtime import files


def test_write_atomic_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    files.write_json(target, {"b": 1, "a": [1.5, "é"]})
    files.write_json(target, {"b": 2})
    assert files.read_json(target) == {"b": 2}
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_is_kept_for_later_takes_what_killed_writers_left(tmp_path: Path) -> None:
    record = tmp_path / "hashes" / "a.json"
    files.keep_json(record, {"a": 1})
    for name in (".tmp-a.json-12-abcdef00", ".tmp-b.json-12-abcdef00"):
        (record.parent / name).write_bytes(b"{")
    files.keep_json(record, {"a": 2})
    assert files.read_json(record) == {"a": 2}
    assert sorted(os.listdir(record.parent)) == [".tmp-b.json-12-abcdef00", "a.json"]
    files.keep_json(record / "below" / "a.json", {})  # no place: nothing is kept, and nothing ends


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    target = tmp_path / "a"
    files.write_atomic(target, b"old")

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(MachineError, match=r"a.*: No space left on device \(needed 3 bytes, free [\d,]+ bytes\)"):
        files.write_atomic(target, b"new")
    monkeypatch.undo()
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(("name", "limit", "hint"), cases(__file__, "what_ran_out_has_its_own_hint"))
def test_what_ran_out_has_its_own_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: int | None, hint: str | None
) -> None:
    number, most = getattr(errno, name), resource.RLIM_INFINITY if limit is None else limit
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (most, most))
    failure = OSError(number, os.strerror(number))
    for error in (files.machine_error(tmp_path / "a", failure, 20), as_tuner_error(failure)):
        assert error.exit_code == 4 and os.strerror(number) in error.message
        assert error.hint is None if hint is None else str(error.hint).startswith(hint)
        assert "then run the same command" in (error.hint or "then run the same command")


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(MachineError, match=r"/a: File too large \(needed 5,000 bytes") as caught:
            files.write_atomic(tmp_path / "a", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "ulimit -f unlimited" in str(caught.value.hint)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("name", "said"), cases(__file__, "a_directory_that_is_gone"))
def test_a_directory_that_is_gone_is_named_and_no_temporary_file(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(MachineError) as caught:
        files.write_atomic(tmp_path / "gone" / name, b"1")
    assert caught.value.message == f"{tmp_path}{said}"


def test_what_an_interrupted_removal_has_renamed_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (made := tmp_path / ".tmp-[a]-1").mkdir()
    (other := tmp_path / ".trash-tmp-b-1").mkdir()

    def interrupted(path: Path) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(files.shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.discard_dir(made)
    assert len(os.listdir(tmp_path)) == 2
    files.discard_whatever_is_left(made)
    assert os.listdir(tmp_path) == [other.name]


def test_write_new_never_overwrites_or_follows(tmp_path: Path) -> None:
    files.write_new(tmp_path / "a", b"1")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("a", "link"):
        with pytest.raises(MachineError, match="File exists"):
            files.write_new(tmp_path / name, b"2")
    assert (tmp_path / "a").read_bytes() == b"1"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [*cases(__file__, "bad_json_names_the_file"), ("[" * 100_000, "not valid JSON: nested too deeply")],
)
def test_bad_json_names_the_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=rf"x\.json: {words}"):
        files.read_json(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for read in (files.read_json, files.sha256_file, files.regular_size):
        with pytest.raises(DataError, match=r"gone\.json"):
            read(tmp_path / "gone.json")


@given(data=st.binary(max_size=3000))
def test_sha256(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("f") / "a"
    path.write_bytes(data)
    assert files.sha256_file(path) == hashlib.sha256(data).hexdigest()


def test_nan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="NaN|nan|JSON compliant"):
        files.write_json(tmp_path / "a", {"loss": float("nan")})


def test_publish_refuses_what_exists_even_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / ".tmp-x" / "sub").mkdir(parents=True)
    (tmp_path / ".tmp-x" / "sub" / "a").write_text("1")
    (tmp_path / "final").mkdir()
    with pytest.raises(MachineError, match="exists already"):
        files.publish_dir(tmp_path / ".tmp-x", tmp_path / "final")
    (tmp_path / "final").rmdir()
    files.publish_dir(tmp_path / ".tmp-x", tmp_path / "final")
    assert os.listdir(tmp_path) == ["final"]
    assert (tmp_path / "final" / "sub" / "a").read_text() == "1"


def test_publish_flushes_every_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".tmp-x" / "sub").mkdir(parents=True)
    (tmp_path / ".tmp-x" / "sub" / "a").write_text("1")
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    files.publish_dir(tmp_path / ".tmp-x", tmp_path / "final")
    assert flushed == ["a", "sub", ".tmp-x", tmp_path.name]


def test_discard_and_sweep_never_follow_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("1")
    work = tmp_path / "work"
    (work / "old").mkdir(parents=True)
    (work / "old" / "inner").symlink_to(outside)
    (work / "link").symlink_to(outside)
    (work / ".tmp-dir").mkdir()
    (work / ".tmp-dir" / "inner").symlink_to(outside)
    (work / ".trash-link").symlink_to(outside)
    (work / ".tmp-file").write_text("")
    (work / "keep").write_text("")
    files.discard_dir(work / "old")
    files.discard_dir(work / "link")
    files.discard_dir(work / "missing")
    assert files.sweep(work) == [".tmp-dir", ".tmp-file", ".trash-link"]
    assert os.listdir(work) == ["keep"]
    assert (outside / "precious").read_text() == "1"
    assert files.sweep(tmp_path / "missing") == []


def test_discarded_again_trash_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed once more, it is found by the name that those who tidy up look for."""
    trash = tmp_path / f"{files.TRASH_PREFIX}tmp-step-4-1-0a"
    (trash / "sub").mkdir(parents=True)
    monkeypatch.setattr(os, "rename", lambda *names: pytest.fail(f"renamed {names}"))
    files.discard_dir(trash)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("deletions", [0, 1, 3])
def test_discard_renames_before_it_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletions: int) -> None:
    old = tmp_path / "old"
    (old / "sub").mkdir(parents=True)
    for name in ("a", "b", "sub/c"):
        (old / name).write_text(name)

    class KilledError(BaseException):
        pass

    done: list[str] = []

    def until_killed(real: Callable[..., None], path: str, dir_fd: int | None = None) -> None:
        if len(done) == deletions:
            raise KilledError
        real(path, dir_fd=dir_fd)
        done.append(path)

    for call in ("unlink", "rmdir"):
        monkeypatch.setattr(os, call, partial(until_killed, getattr(os, call)))
    with pytest.raises(KilledError):
        files.discard_dir(old)
    monkeypatch.undo()
    (trash,) = os.listdir(tmp_path)
    assert trash.startswith(files.TRASH_PREFIX)
    assert len(list((tmp_path / trash).rglob("*"))) == 4 - deletions
    assert files.sweep(tmp_path) == [trash]


def test_entries_are_verified_by_size_and_by_hash(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_text("one")
    (tmp_path / "b").write_text("two")
    (tmp_path / "manifest.json").write_text("{}")
    entries = files.file_entries(tmp_path)
    assert sorted(entries) == ["b", "sub/a"]
    files.verify_entries(tmp_path, json.loads(json.dumps(entries)), hash=True)
    (tmp_path / "b").write_text("owt")
    files.verify_entries(tmp_path, entries, hash=False)
    with pytest.raises(DataError, match="b: its SHA-256 differs"):
        files.verify_entries(tmp_path, entries, hash=True)
    (tmp_path / "b").write_text("longer")
    with pytest.raises(DataError, match="b: 6 bytes, the manifest says 3"):
        files.verify_entries(tmp_path, entries, hash=False)
    (tmp_path / "b").unlink()
    with pytest.raises(DataError, match="b: missing"):
        files.verify_entries(tmp_path, entries, hash=False)
    with pytest.raises(DataError, match="no size"):
        files.verify_entries(tmp_path, {"sub/a": None}, hash=False)


def test_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        files.file_entries(tmp_path)


@given(name=st.text(max_size=20))
def test_a_name_stays_inside_or_is_refused(name: str) -> None:
    directory = Path("/base/dir")
    try:
        path = files.inside(directory, name)
    except DataError:
        return
    assert os.path.normpath(path).startswith("/base/dir/")


def test_byte_counts_for_people() -> None:
    assert [files.gib(n) for n in (340, 12 << 20, 3 << 29)] == ["340 bytes", "12.0 MiB", "1.50 GiB"]
