"""The cache of prepared data: directories named by their content, each built once, under its lock, and renamed.

    <cache>/encoded/<key>/     documents of the first level       <cache>/prepared/<key>/   packed rows, the second
    <cache>/reference/<key>/   what a model gives the documents of prepared rows (`data/building/columns.py`)
    <cache>/teacher/<key>/     the same of their trained tokens
    <cache>/<level>/.<key>.lock   held by whoever builds or removes that key; the file itself is never removed
    <cache>/{choices,exports,fits,hashes,kernels,proofs}/<key>.json   what launches found out and keep for later ones
    <cache>/<level>/.tmp-<key>-*, .trash-*<key>-*   leftovers of a builder that was killed

No name among these may be a link: nothing is read or written through one. `collect` leaves links alone.
A directory is valid when its manifest is as it was written and every file has its size; `damages` also compares
SHA-256 sums.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tuner.data.prepared import PREPARED_SCHEMA, hashed_files
from tuner.errors import DataError, MachineError, RecipeError
from tuner.runtime import files as disk
from tuner.runtime.console import Console
from tuner.runtime.files import MANIFEST_NAME, discard_dir, publish_dir, read_json, write_json
from tuner.runtime.lock import FileLock
from tuner.runtime.stop import undone

ColumnLevel = Literal["reference", "teacher"]
Level = Literal["prepared", "encoded"] | ColumnLevel
COLUMN_LEVELS: tuple[ColumnLevel, ...] = ("reference", "teacher")
LEVELS: tuple[Level, ...] = ("prepared", "encoded", *COLUMN_LEVELS)
ENCODED_SCHEMA, REFERENCE_SCHEMA, TEACHER_SCHEMA = "tuner.encoded/3", "tuner.reference/1", "tuner.teacher/1"
SCHEMAS: dict[Level, str] = {
    "prepared": PREPARED_SCHEMA, "encoded": ENCODED_SCHEMA, "reference": REFERENCE_SCHEMA, "teacher": TEACHER_SCHEMA
}
RECORDS = ("choices", "exports", "fits", "hashes", "kernels", "proofs", "sources")
"""Directories of what launches keep for later ones (:func:`~tuner.runtime.files.keep_json`), one file each."""
SELF = "manifest_sha256"
"""The manifest's own digest in it: a key changed by hand or by the disk is damage, as in any other file."""
_KEY = re.compile(r"[0-9a-f]{16}")
_LEFTOVER = re.compile(r"\.(?:(?:tmp|trash)-)+([0-9a-f]{16})-.+")


class Entry(NamedTuple):
    """One directory of the cache."""

    level: Level
    path: Path
    manifest: dict[str, Any] | None
    """None where it is damaged."""

    @property
    def key(self) -> str:
        """Its name: the hash of what it was made from."""
        return self.path.name

    @property
    def size(self) -> int:
        """Bytes of its files, those that it shares with other directories included."""
        return _size(self.path)


class Garbage(NamedTuple):
    """Something that `collect` removes, or would remove."""

    path: Path
    reason: str
    size: int


def cache_path(cache_dir: Path, level: Level, key: str) -> Path:
    """Return where a directory is or would be. Raises DataError for a link on the way there."""
    return disk.unlinked(cache_dir, level, key)


def valid(path: Path, level: Level) -> dict[str, Any] | None:
    """The manifest of a whole directory, by its files' sizes; None where there is none or it is damaged."""
    try:
        disk.regular_size(path / MANIFEST_NAME)
        manifest = read_json(path / MANIFEST_NAME)
        disk.verify_entries(path, manifest["files"], hash=False)
        if manifest.get(SELF, _digest(manifest)) != _digest(manifest):
            return None
    except (DataError, KeyError, TypeError, AttributeError):
        return None
    return manifest if manifest.get("schema") == SCHEMAS[level] else None


def _digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of what a manifest says, but for this digest itself."""
    said = {key: value for key, value in manifest.items() if key != SELF}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def build_once(
    cache_dir: Path, level: Level, key: str, make: Callable[[Path], dict[str, Any]], console: Console | None = None,
    use: Callable[[Path], None] | None = None,
) -> tuple[dict[str, Any], bool]:
    """Return (manifest, whether it was there already), building the directory when it is missing or damaged.

    One process builds and the others wait for it, on every node that shares the cache. `make` writes into a temporary
    directory and returns the manifest's body; entries under `files` in it are taken over, other files are hashed.
    `use` is called with the valid directory while it is locked: nothing removes it meanwhile. Raises MachineError.
    """
    final = cache_path(cache_dir, level, key)

    def waiting(holder: str) -> None:
        if console is not None:
            console.say("waiting", f"{holder} is preparing the same data")

    with disk.machine_errors(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock_path(final), on_wait=waiting):
        for leftover in _leftovers(final):
            discard_dir(leftover)
        manifest = valid(final, level)
        found = manifest is not None
        if manifest is None:
            if os.path.lexists(final):
                if console is not None:
                    console.warn(f"{final} is damaged; it is built again")
                discard_dir(final)
            manifest = build_held(final, level, make)
        if use is not None:
            use(final)
    return manifest, found


def build_held(final: Path, level: Level, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Build a directory, by whoever holds its lock; `make` as for `build_once`. Raises MachineError."""
    tmp = final.parent / f".tmp-{final.name}-{os.getpid()}"
    with undone(lambda: disk.discard_whatever_is_left(tmp)), disk.machine_errors(final):
        try:
            tmp.mkdir()
            body = make(tmp)
            known = body.pop("files", {})
            files = {**disk.file_entries(tmp, exclude={MANIFEST_NAME, *known}), **known}
            manifest = {**body, "schema": SCHEMAS[level], "key": final.name, "files": files}
            manifest[SELF] = _digest(json.loads(disk.json_bytes(manifest)))
            write_json(tmp / MANIFEST_NAME, manifest)
            publish_dir(tmp, final)
        finally:
            discard_dir(tmp)
    return manifest


def entries(cache_dir: Path) -> list[Entry]:
    """Every directory of the cache, prepared ones first, by key."""
    roots = [(level, disk.unlinked(cache_dir, level)) for level in LEVELS]
    paths = ((level, root / name) for level, root in roots for name in _names(root) if _KEY.fullmatch(name))
    return [Entry(level, path, valid(path, level)) for level, path in paths if path.is_dir() and not path.is_symlink()]


def find(cache_dir: Path, wanted: str) -> Entry:
    """The directory that a path or the beginning of a key names. DataError without one, RecipeError with several."""
    path = Path(wanted).expanduser()
    if path.is_dir() and ("/" in wanted or not _KEY.match(wanted.ljust(16, "0"))):
        level = next((level for level in LEVELS if level == path.absolute().parent.name), LEVELS[0])
        return Entry(level, path.absolute(), valid(path, level))
    matching = [entry for entry in entries(cache_dir) if entry.key.startswith(wanted)]
    if not matching:
        raise DataError(f"{wanted}: no such directory or key in {cache_dir}", hint="list them: tuner data list")
    if len(matching) > 1:
        listed = ", ".join(f"{entry.level}/{entry.key}" for entry in matching[:5])
        raise RecipeError(f"{wanted} names {len(matching)} directories: {listed}", hint="give more of the key")
    return matching[0]


def damages(entry: Entry) -> list[str]:
    """What is wrong with a directory: one sentence for each file that is not as its manifest says, by SHA-256."""
    try:
        disk.regular_size(entry.path / MANIFEST_NAME)
        manifest = read_json(entry.path / MANIFEST_NAME)
    except DataError as error:
        return [error.message]
    files = manifest.get("files")
    if manifest.get("schema") not in SCHEMAS.values() or not isinstance(files, dict):
        return [f"{entry.path / MANIFEST_NAME}: not of this version (schema {manifest.get('schema')!r})"]
    found = []
    if manifest.get(SELF) != _digest(manifest):
        found.append(f"{entry.path / MANIFEST_NAME}: its SHA-256 differs from the one that it names")
    for name, facts in sorted(files.items()):
        try:
            disk.verify_entries(entry.path, {name: facts}, hash=bool(hashed_files(entry.path, {name: facts})))
        except DataError as error:
            found.append(error.message)
    return found


def others_may_write(cache_dir: Path) -> Iterator[str]:
    """Yield a warning of the first of a cache's directories that users besides this one and root may write.

    A group of the user's own, as most systems give each user one, is nobody else.
    """
    for path in (cache_dir, *(cache_dir / level for level in LEVELS)):
        try:
            facts = path.stat()
        except OSError:
            continue  # what is not there is not used
        if facts.st_uid not in (os.getuid(), 0):
            why = f"belongs to another user ({facts.st_uid})"
        elif facts.st_mode & stat.S_IWOTH:
            why = "may be written by everybody"
        elif facts.st_mode & stat.S_IWGRP and facts.st_gid not in (os.getuid(), 0):
            why = f"may be written by group {facts.st_gid}"
        else:
            continue
        yield (
            f"{path} {why}: rows that somebody else puts there under a key are trained on. chmod go-w {path}, or name "
            "another data.cache_dir"
        )
        return


def collect(cache_dir: Path, unused: bool = False, verify: bool = False, dry_run: bool = False) -> list[Garbage]:
    """Remove leftovers and damaged directories.

    With `unused` also encoded directories that no prepared one was made from, and references of none that is there.

    With `verify` damage is looked for by SHA-256, else by size. What somebody is building is left alone, and so are
    symbolic links and everything that is not named like a part of the cache. With `dry_run` nothing is removed.
    Raises MachineError where the cache cannot be written.
    """
    garbage = [item for name in RECORDS for item in _unwritten(disk.unlinked(cache_dir, name), dry_run)]
    for level in LEVELS:
        needed = _needed(cache_dir, level, {item.path for item in garbage}) if unused and level != "prepared" else None
        root = disk.unlinked(cache_dir, level)
        for key in sorted(_keys(root)):
            final = root / key
            if not _condemned(final, level, needed, verify):
                continue
            with _free(final, dry_run) as free:
                # Again, now that nobody else can change it.
                for item in _condemned(final, level, needed, verify) if free else []:
                    if not dry_run:
                        discard_dir(item.path)
                    garbage.append(item)
    return garbage


def _unwritten(root: Path, dry_run: bool) -> Iterator[Garbage]:
    """Records that a launch was killed over. One that is being written now is lost at that, and found out again."""
    for path in disk.unfinished(root):
        if path.is_file() and not path.is_symlink():
            yield Garbage(path, "left by a launch that was killed", path.stat().st_size)
            if not dry_run:
                path.unlink(missing_ok=True)


def _condemned(final: Path, level: Level, needed: set[str] | None, verify: bool) -> list[Garbage]:
    """What is to be removed of one key."""
    found = [Garbage(path, "left by a builder that was killed", _size(path)) for path in _leftovers(final)]
    if not final.is_dir() or final.is_symlink():
        return found
    manifest = valid(final, level)
    if manifest is None:
        found.append(Garbage(final, "damaged", _size(final)))
    elif verify and (wrong := damages(Entry(level, final, manifest))):
        found.append(Garbage(final, wrong[0], _size(final)))
    elif needed is not None and final.name not in needed:
        why = "no prepared data was made from it" if level == "encoded" else "its prepared data is not there"
        found.append(Garbage(final, why, _size(final)))
    return found


def _needed(cache_dir: Path, level: Level, gone: set[Path]) -> set[str]:
    """Keys of a level's directories that prepared ones which are there were made from, or are for."""
    whole = [entry for entry in entries(cache_dir) if entry.manifest is not None and entry.path not in gone]
    prepared = {entry.key: entry.manifest for entry in whole if entry.level == "prepared"}
    if level == "encoded":
        return {str((manifest or {}).get("encoded_key")) for manifest in prepared.values()}
    return {entry.key for entry in whole if (entry.manifest or {}).get("prepared_key") in prepared}


@contextmanager
def _free(final: Path, dry_run: bool) -> Iterator[bool]:
    """Hold the lock of a key for the length of the block; false where somebody else holds it."""
    with ExitStack() as held:
        free = True
        try:
            if not dry_run or lock_path(final).exists():
                held.enter_context(FileLock(lock_path(final), wait=False))
        except MachineError as error:
            if error.__cause__ is not None:  # the lock cannot be taken by anybody
                raise
            free = False
        yield free


def lock_path(final: Path) -> Path:
    """The file that is locked by whoever builds or removes a directory."""
    # Dotted, and one lock for each key: other keys are built meanwhile.
    return final.parent / f".{final.name}.lock"


def _leftovers(final: Path) -> list[Path]:
    """What killed builders and removers of one key left, links excepted."""
    matches = ((name, _LEFTOVER.fullmatch(name)) for name in _names(final.parent))
    paths = [final.parent / name for name, match in matches if match is not None and match[1] == final.name]
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def _keys(root: Path) -> set[str]:
    """Every key that has a directory or leftovers."""
    names = _names(root)
    left = (_LEFTOVER.fullmatch(name) for name in names)
    return {name for name in names if _KEY.fullmatch(name)} | {match[1] for match in left if match is not None}


def _names(root: Path) -> list[str]:
    with disk.machine_errors(root), suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.listdir(root))
    return []


def _size(path: Path) -> int:
    """Bytes of the files below a directory; what vanishes meanwhile counts nothing."""
    total = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
