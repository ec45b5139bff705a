"""The state of a source tree: what is recorded of it, how much, and that nothing which it names is run."""

import os
import stat
import time
from pathlib import Path

import pytest

from tests.fixtures.commands import git
from tuner.runtime import git as module
from tuner.runtime.git import source_tree


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of one commit, clean."""
    git(tmp_path, "init", "-b", "trunk")
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "below").mkdir()
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-m", "one")
    return tmp_path


def program(path: Path, mark: Path) -> str:
    """A program that leaves a mark."""
    path.write_text(f"#!/bin/sh\ntouch '{mark}'\ncat\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_what_differs_from_the_commit(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = source_tree(tree / "below")
    assert clean is not None
    assert (clean.root, len(clean.commit), clean.branch) == (str(tree.resolve()), 40, "trunk")
    assert (clean.dirty, clean.diff, clean.untracked) == (False, b"", ())
    (tree / "a.txt").write_text("two\n")
    (tree / "secret.env").write_text("PASSWORD=1\n")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    changed = source_tree(tree / "below")
    assert changed is not None
    assert (changed.dirty, changed.untracked) == (True, ("secret.env",))
    assert b"-one\n+two\n" in changed.diff
    assert b"PASSWORD" not in changed.diff
    assert "diff" not in changed.facts()


def test_a_long_diff_is_cut_at_a_line_and_many_names_too(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DIFF_BYTES", 300)
    monkeypatch.setattr(module, "MOST_UNTRACKED", 3)
    (tree / "a.txt").write_text("".join(f"line {i}\n" for i in range(1000)))
    for i in range(5):
        (tree / f"new{i}").touch()
    found = source_tree(tree)
    assert found is not None
    assert 200 < len(found.diff) <= 300
    assert found.diff.endswith(b"\n")
    assert found.untracked == ("new0", "new1", "new2")


def test_nothing_that_the_configuration_names_is_run(tree: Path) -> None:
    mark = tree / "ran"
    for key in ("core.fsmonitor", "diff.external", "filter.own.clean", "filter.own.smudge", "diff.own.textconv"):
        git(tree, "config", key, program(tree / "below" / key, mark))
    hooks = tree / ".git" / "hooks"
    program(hooks / "post-index-change", mark)
    (tree / ".gitattributes").write_text("*.txt filter=own diff=own\n")
    (tree / "a.txt").write_text("two\n")
    os.utime(tree / "a.txt", (1, 1))
    before = (tree / ".git" / "index").read_bytes()
    found = source_tree(tree)
    assert found is not None
    assert b"+two\n" in found.diff
    assert not mark.exists()
    assert (tree / ".git" / "index").read_bytes() == before


def test_without_an_answer_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source_tree(tmp_path) is None
    assert source_tree(tmp_path / "missing") is None
    git(tmp_path, "init")
    assert source_tree(tmp_path) is None
    (tmp_path / "bin").mkdir()
    slow = tmp_path / "bin" / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "LIMIT_S", 0.1)
    started = time.monotonic()
    assert source_tree(tmp_path) is None
    assert time.monotonic() - started < 30
    monkeypatch.setenv("PATH", "/nowhere")
    assert source_tree(tmp_path) is None
