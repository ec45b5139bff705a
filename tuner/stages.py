"""Directories in object stores: how they are named, and the local stage in which each is worked on.

``s3://BUCKET/PREFIX`` (``gs``, ``az``) and its stage ``CACHE/stores/s3/BUCKET/PREFIX`` stand for each other, both
ways; the cache is $TUNER_CACHE, else ~/.cache/tuner. ``file:///x/y`` is the path ``/x/y``. Nothing is asked or opened.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

SCHEMES = ("s3", "gs", "az")
"""Of stores: S3 and what speaks as it does, Google's, Azure's."""
STORES = "stores"
"""Of the cache: where the stages lie."""
_URL = re.compile(r"(?s)([A-Za-z][A-Za-z0-9+.-]*)://(.*)")
_OTHER_NAMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az", "wasbs": "az"}
_WEB = ("http", "https", "hf")


def cache_root() -> Path:
    """Return $TUNER_CACHE, else ~/.cache/tuner."""
    return Path(os.environ.get("TUNER_CACHE") or "~/.cache/tuner").expanduser()


def is_url(text: str) -> bool:
    """Whether a text names a directory by a URL of this kind, whatever the store; addresses of web pages are none."""
    found = _URL.fullmatch(text)
    return found is not None and found[1].lower() not in _WEB


def stage_of(url: str) -> Path:
    """The local path that stands for a URL. Raises ValueError, with what is wrong, for one that names no directory."""
    found = _URL.fullmatch(url)
    scheme, rest = ("", url) if found is None else (found[1], found[2])
    if scheme == "file":
        if not rest.startswith("/") or "\0" in rest:
            raise ValueError("a file URL has three slashes and an absolute path: file:///data/runs")
        return Path(os.path.normpath(rest))
    if scheme not in SCHEMES:
        known = _OTHER_NAMES.get(scheme.lower(), scheme.lower() if scheme.lower() in SCHEMES else None)
        write = f"write {known}://" if known else f"known are {', '.join(f'{name}://' for name in SCHEMES)} and file://"
        raise ValueError(f"no store {scheme}://; {write}")
    names = rest.rstrip("/").split("/")
    if len(names) < 2:
        raise ValueError(f"a directory in a bucket is wanted: {scheme}://{names[0] or 'BUCKET'}/DIRECTORY")
    if "@" in names[0] or ":" in names[0]:
        raise ValueError("no credentials and no port: the environment has them (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL)")
    if any(name in {"", ".", ".."} or "\\" in name or not name.isprintable() for name in names):
        raise ValueError("names in it are not empty, not . or .., and printable, without a backslash")
    return _root() / scheme / Path(*names)


def url_of(path: Path) -> str | None:
    """The URL that a path stands for; None for one that is no stage, nor in one."""
    absolute = os.path.abspath(path)
    for root in dict.fromkeys((str(_root()), os.path.realpath(_root()))):
        if absolute.startswith(f"{root}/"):
            scheme, _, rest = absolute.removeprefix(f"{root}/").partition("/")
            return f"{scheme}://{rest}" if scheme in SCHEMES and "/" in rest else None
    return None


def shown(path: Path) -> str:
    """A path as messages and results have it: the URL of a stage."""
    return url_of(path) or str(path)


def local_path(text: str, in_store: bool) -> Path:
    """The absolute path of a path or a URL; with ``in_store`` that of a store's directory is its stage. ValueError."""
    if not is_url(text):
        return Path(os.path.abspath(Path(text).expanduser()))
    path = stage_of(text)
    if url_of(path) is not None and not in_store:
        raise ValueError("is in an object store, and a path on a disk is wanted here")
    return path


def _root() -> Path:
    return Path(os.path.abspath(cache_root() / STORES))
