"""Files and directories that are either durably whole or absent.

Nothing here trusts a name it reads: entries that leave their directory, symbolic links and special files are refused.
Unfinished work is named `.tmp-*`, unwanted work `.trash-*`, always beside its target; `sweep` removes both.
"""

import ctypes
import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from tuner.errors import DataError, MachineError, TunerError, space_hint
from tuner.runtime.stop import undone
from tuner.stages import url_of

TMP_PREFIX = ".tmp-"
TRASH_PREFIX = ".trash-"
MANIFEST_NAME = "manifest.json"
HASH_BLOCK_BYTES = 1 << 20
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
"""How a file is opened that must not be there."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux' `fcntl.h` and `fs.h`: below the working directory, and two names change places."""


def gib(count: int) -> str:
    """`count` bytes for people: `1.50 GiB`, `12.0 MiB` or `340 bytes`."""
    if count >= 1 << 29:
        return f"{count / (1 << 30):.2f} GiB"
    if count >= 1 << 20:
        return f"{count / (1 << 20):.1f} MiB"
    return f"{count:,} bytes"


def free_bytes(path: Path) -> int:
    """Bytes that this process may still write to the file system of `path`. Raises MachineError."""
    with machine_errors(path):
        return shutil.disk_usage(path).free


def machine_error(path: Path, error: OSError, needed: int | None = None) -> TunerError:
    """The MachineError for an I/O failure at `path`: names the path, the reason and, when full, the space.

    Where a directory above `path` is gone, that one is named.
    """
    if error.errno == errno.ENOENT and not path.parent.exists():
        gone = next(above for above in reversed(path.absolute().parents) if not above.exists())
        missing = f"{path}: its directory" if gone == path.absolute().parent else f"{gone}: this directory"
        return MachineError(f"{missing} is not there any more", hint="find out what removed it, and start again")
    message, hint = f"{path}: {error.strerror or error}", space_hint(error)
    if hint is not None and needed is not None:
        free = ""
        with suppress(OSError):
            free = f", free {shutil.disk_usage(path if path.is_dir() else path.parent).free:,} bytes"
        message += f" (needed {needed:,} bytes{free})"
    return MachineError(message, hint)


@contextmanager
def machine_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """Have an OSError within raised as the :func:`machine_error` at `path`."""
    try:
        yield
    except OSError as error:
        raise machine_error(path, error, needed) from error


@contextmanager
def scratch_dir(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A new directory of this user's for the block, in `parent` or where temporary files go. Raises OSError.

    A signal that ends the process does not leave it behind.
    """
    place = (parent or Path(tempfile.gettempdir())) / f"{prefix}{secrets.token_hex(6)}"
    with undone(lambda: shutil.rmtree(place, ignore_errors=True)):  # from before it is there
        try:
            place.mkdir(mode=0o700)
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def opened(path: Path, flags: int, mode: int = 0o644) -> Iterator[int]:
    """A descriptor of a file or directory for the length of the block. Raises OSError."""
    descriptor = os.open(path, flags, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def fsync_path(path: Path) -> None:
    """Flush one file or directory to the disk. Raises OSError."""
    with opened(path, os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
        os.fsync(descriptor)


def fsync_dir(path: Path) -> None:
    """Flush a directory's own entries (creations, renames) to the disk. Raises OSError."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def flush_tree(path: Path) -> None:
    """Flush a directory and everything below it to the disk. Raises OSError."""
    for directory, _, names in os.walk(path, topdown=False):
        for name in names:
            fsync_path(Path(directory) / name)
        fsync_dir(Path(directory))


def make_dirs(path: Path) -> None:
    """Make a directory and its missing parents so that a power loss takes none of their names. Raises MachineError."""
    with machine_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        device = path.stat().st_dev
        for parent in path.absolute().parents:  # one that a killed process made may not be on the disk either
            if parent.stat().st_dev != device or not os.access(parent, os.W_OK | os.R_OK):
                break
            fsync_dir(parent)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte of `data`, however often the system writes short. Raises OSError."""
    view = memoryview(data).cast("B")
    while len(view):
        if (written := os.write(descriptor, view)) == 0:
            raise OSError(errno.EIO, "the system wrote nothing")
        view = view[written:]


def append(path: Path, data: bytes) -> None:
    """Add `data` to the end of a file, which is made where it is missing; never through a link. Raises OSError."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW) as descriptor:
        os.write(descriptor, data)


def write_new(path: Path, data: bytes) -> None:
    """Create `path`, which must not exist, with `data`, flushed to the disk. Raises MachineError."""
    with machine_errors(path, len(data)):
        _write_new(path, data)


def _write_new(path: Path, data: bytes, mode: int = 0o644) -> None:
    with opened(path, NEW, mode) as descriptor:
        write_all(descriptor, data)
        os.fsync(descriptor)


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` with `data`: a reader, or a restart after power loss, sees the old or the new bytes.

    Raises MachineError; the old file is then untouched.
    """
    tmp = path.parent / f"{TMP_PREFIX}{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with machine_errors(path, len(data)):
            _write_new(tmp, data, mode)
            os.rename(tmp, path)
            fsync_dir(path.parent)
    except BaseException:
        with suppress(OSError):
            tmp.unlink(missing_ok=True)
        raise


def json_bytes(value: Any) -> bytes:
    """Canonical readable JSON: sorted keys, indent 2, final newline. Raises ValueError on NaN, else TypeError."""
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=True, allow_nan=False) + "\n").encode()


def write_json(path: Path, obj: Any) -> None:
    """`write_atomic` of `json_bytes(obj)`. Raises MachineError, TypeError, ValueError."""
    write_atomic(path, json_bytes(obj))


def keep_json(path: Path, obj: Any) -> None:
    """Keep a JSON object in the cache for later launches, where that can be written.

    What writers of the same that were killed left behind goes; where one is still at it, its own name is gone then, and
    this one's words stay.
    """
    with suppress(OSError, TunerError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(f"{TMP_PREFIX}{path.name}-*"):
            leftover.unlink(missing_ok=True)
        write_json(path, obj)


def typed_path(path: Path) -> str:
    """A path as it is typed here: relative where it lies below; the URL of what lies in a store."""
    if (url := url_of(path)) is not None:
        return url
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


@contextmanager
def reading(path: Path, missing: str | None = None) -> Iterator[None]:
    """Within, what the system says of a file that cannot be read becomes a DataError that names it; of one that is not
    there in other words, where such are given."""
    try:
        yield
    except OSError as error:
        said = missing if isinstance(error, FileNotFoundError) else None
        raise DataError(f"{path}: {said or error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises DataError naming the file when it is missing, unreadable or no object."""
    try:
        with reading(path, "no such file"):
            value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{path}: not valid JSON: {reason}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def hash_of(facts: Any, digits: int) -> str:
    """So many hexadecimal digits by which facts are known: of the SHA-256 of their JSON with sorted keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:digits]


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal, in bounded memory. Raises DataError naming the file."""
    with reading(path), path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
    return digest.hexdigest()


def publish_dir(tmp: Path, final: Path) -> None:
    """Commit `tmp` under the name `final`: flush every file and directory in it, rename, flush the parent.

    A file by itself has to be flushed. `final` must not exist. Raises MachineError; before the rename nothing named
    `final` is there.
    """
    if os.path.lexists(final):
        raise MachineError(f"{final}: exists already")
    with machine_errors(final):
        flush_tree(tmp)
        os.rename(tmp, final)
        fsync_dir(final.parent)


def replace_dir(tmp: Path, final: Path) -> None:
    """Commit directory `tmp` in place of the directory `final`, which goes. Raises MachineError.

    The two change names in one system call, so that `final` is whole at every moment. Where the file system has no such
    call, the old one is renamed away first, and a process that dies in between leaves none.
    """
    with machine_errors(final):
        flush_tree(tmp)
        try:
            _exchange(tmp, final)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
                raise
            discard_dir(final)
            os.rename(tmp, final)
        fsync_dir(final.parent)
    discard_dir(tmp)


def _exchange(first: Path, second: Path) -> None:
    """Have two paths change names (Linux: renameat2, RENAME_EXCHANGE). Raises OSError, ENOSYS where there is none."""
    if (rename := getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)) is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    names = os.fsencode(first), os.fsencode(second)
    if rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(second))


def discard_dir(path: Path) -> None:
    """Remove a directory so that, killed at any moment, nothing under the old name is half there.

    It is renamed to `.trash-*` first, unless that is its name. A symbolic link is removed, never followed. Missing is
    fine. Raises MachineError.
    """
    with machine_errors(path), suppress(FileNotFoundError):
        if path.is_symlink():
            path.unlink()
            return
        if path.name.startswith(TRASH_PREFIX):  # under a second such name nobody would look for it
            shutil.rmtree(path)
            return
        trash = path.parent / f"{TRASH_PREFIX}{path.name.lstrip('.')}-{secrets.token_hex(4)}"
        os.rename(path, trash)
        fsync_dir(path.parent)
        shutil.rmtree(trash)


def discard_whatever_is_left(path: Path) -> None:
    """`discard_dir` in a signal handler: also of what one that was interrupted has renamed. Raises MachineError."""
    discard_dir(path)
    for trash in path.parent.glob(f"{TRASH_PREFIX}{glob.escape(path.name.lstrip('.'))}-*"):
        discard_dir(trash)


def set_aside(path: Path, mark: str) -> None:
    """Rename a damaged directory to `invalid-NAME-MARK`, for people to look at; an older one of that name goes.

    Raises MachineError.
    """
    aside = path.parent / f"invalid-{path.name}-{mark}"
    discard_dir(aside)
    with machine_errors(path):
        os.rename(path, aside)
        fsync_dir(path.parent)


def sweep(parent: Path) -> list[str]:
    """Remove the `.tmp-*` and `.trash-*` leftovers directly in `parent`; returns their names, sorted.

    Call it only while holding the lock under which they are made. Raises MachineError.
    """
    removed: list[str] = []
    for path in unfinished(parent):
        with machine_errors(path), suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(path.name)
    return removed


def unfinished(parent: Path) -> list[Path]:
    """The `.tmp-*` and `.trash-*` directly in `parent`, sorted. Raises MachineError."""
    with machine_errors(parent), suppress(FileNotFoundError):
        return sorted(path for path in parent.iterdir() if path.name.startswith((TMP_PREFIX, TRASH_PREFIX)))
    return []


def file_entries(directory: Path, exclude: Collection[str] = (MANIFEST_NAME,)) -> dict[str, dict[str, Any]]:
    """Name (relative, with `/`) -> `{"size": bytes, "sha256": hex}` of every file below `directory` but `exclude`.

    Raises DataError on a file that is not a regular one or cannot be read.
    """
    entries: dict[str, dict[str, Any]] = {}
    for parent, directories, names in os.walk(directory):
        directories.sort()
        for name in sorted(names):
            path = Path(parent) / name
            if (relative := path.relative_to(directory).as_posix()) not in exclude:
                entries[relative] = {"size": regular_size(path), "sha256": sha256_file(path)}
    return entries


def verify_entries(directory: Path, entries: Mapping[str, Any], hash: bool) -> None:  # noqa: A002 - the contract's name
    """Check that each named file is there, regular and of the noted size; with `hash` also of the noted SHA-256.

    A link on the way to it is one that leads elsewhere. Raises DataError naming the first file that differs.
    """
    for name, entry in sorted(entries.items()):
        path = inside(directory, name)
        for parent in list(path.relative_to(directory).parents)[:-1]:
            if (directory / parent).is_symlink():
                raise DataError(f"{path}: {parent} is a link, and may lead elsewhere")
        size, digest = (entry.get("size"), entry.get("sha256")) if isinstance(entry, Mapping) else (None, None)
        if not isinstance(size, int) or not isinstance(digest, str):
            raise DataError(f"{path}: its manifest entry has no size or no SHA-256")
        if (actual := regular_size(path)) != size:
            raise DataError(f"{path}: {actual:,} bytes, the manifest says {size:,}")
        if hash and sha256_file(path) != digest:
            raise DataError(f"{path}: its SHA-256 differs from the manifest's")


def inside(directory: Path, name: str) -> Path:
    """`directory / name` for a name read from a file. Raises DataError when it would lead anywhere else."""
    pure = PurePosixPath(name)
    if not pure.parts or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts or str(pure) != name:
        raise DataError(f"{directory}: unsafe file name {name!r}")
    return directory / pure


def unlinked(root: Path, *names: str) -> Path:
    """The path of these names below a cache's directory `root`, which may itself be a link. DataError where one is."""
    path = root
    for name in names:
        path = path / name
        if path.is_symlink():
            raise DataError(
                f"{path}: a link, to {os.readlink(path)}: links in the cache are never followed",
                hint="remove it; to have the cache on another disk, name it there: TUNER_CACHE or data.cache_dir",
            )
    return path


CONFIG_BYTES = {
    "config.json": 8 << 20, "generation_config.json": 8 << 20, "tokenizer_config.json": 8 << 20,
    "special_tokens_map.json": 8 << 20, "added_tokens.json": 8 << 20, "adapter_config.json": 4 << 20,
    "tokenizer.json": 64 << 20, "vocab.json": 64 << 20, "tokenizer.model": 64 << 20,
}  # fmt: skip


def require_small_configs(directory: Path) -> None:
    """Check the sizes of a model's configs and tokenizer, before a library parses them whole. Raises DataError."""
    for name, most in CONFIG_BYTES.items():
        path = directory / name
        if path.is_file() and (size := path.stat().st_size) > most:
            raise DataError(f"{path}: {size:,} bytes; such a file has at most {most:,}")


def regular_size(path: Path) -> int:
    """Size in bytes of a regular file. Raises DataError when it is missing, a link or something else."""
    with reading(path, "missing"):
        facts = os.stat(path, follow_symlinks=False)
    if not stat.S_ISREG(facts.st_mode):
        raise DataError(f"{path}: not a regular file")
    return facts.st_size
