"""The model of a disk that loses power: what was flushed is there, what was not may be."""

import os
import random
from collections.abc import Callable
from pathlib import Path

from tests.faults.disk import MODES, Disk, lay_out
from tests.faults.supervisor import supervise
from tuner.runtime.files import fsync_dir, fsync_path


def images(tmp_path: Path, work: Callable[[], object]) -> list[dict[str, bytes | None | str]]:
    """Every tree that may be left after `work`, the surest first."""
    start, root = tmp_path / "start", tmp_path / "root"
    for directory in (start, root):
        directory.mkdir()
        (directory / "old").write_bytes(b"old")
    trace = supervise(lambda: work() and 0 or 0, root, record=True)
    assert trace.code == 0, trace.output
    disk = Disk(start, root)
    disk.apply(trace.calls)
    seen = {path: node.data for path, node in disk.top.names.items() if not node.directory and not node.target}
    assert seen == {path.name: path.read_bytes() for path in root.iterdir() if path.is_file()}
    return [disk.image(mode, random.Random(seed)) for mode in MODES for seed in range(20)]


def test_an_unflushed_file_is_there_in_any_part(tmp_path: Path) -> None:
    found = images(tmp_path, lambda: Path("new").write_bytes(b"123456"))
    assert "new" not in found[0]
    left = {image.get("new") for image in found}
    assert {None, b"", b"123456", bytes(6)} <= left


def test_a_flushed_file_without_a_flushed_name_may_be_gone_but_is_never_torn(tmp_path: Path) -> None:
    def work() -> None:
        Path("new").write_bytes(b"123456")
        fsync_path(Path("new"))

    assert {image.get("new") for image in images(tmp_path, work)} == {None, b"123456"}


def test_what_is_flushed_is_there(tmp_path: Path) -> None:
    def work() -> None:
        Path("new").write_bytes(b"123456")
        os.rename("old", "older")
        fsync_path(Path("new"))
        fsync_dir(Path())

    assert all(image == {"": None, "new": b"123456", "older": b"old"} for image in images(tmp_path, work))


def test_a_rename_is_all_or_nothing(tmp_path: Path) -> None:
    left = {frozenset(image) - {""} for image in images(tmp_path, lambda: os.rename("old", "new"))}
    assert left == {frozenset({"old"}), frozenset({"new"})}


def test_an_overwritten_file_may_hold_old_and_new_bytes(tmp_path: Path) -> None:
    def work() -> None:
        with open("old", "r+b") as file:
            file.write(b"NE")

    assert {b"old", b"NEd"} <= {image["old"] for image in images(tmp_path, work)}


def test_names_that_depend_on_each_other_are_flushed_together(tmp_path: Path) -> None:
    def work() -> None:
        os.mkdir("d")
        os.rename("old", "d/a")
        fsync_dir(Path("d"))  # of two directories, one is flushed: the file must be in one of them

    for image in images(tmp_path, work):
        assert ("old" in image) != ("d/a" in image) or "d" not in image


def test_an_image_can_be_laid_out(tmp_path: Path) -> None:
    lay_out({"": None, "a": None, "a/b": b"1", "a/c": "b"}, tmp_path)
    assert (tmp_path / "a" / "c").read_bytes() == b"1"
