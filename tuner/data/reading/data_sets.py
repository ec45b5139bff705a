"""Data sets of the `datasets` library, saved or of the hub, as the Arrow files that they lie in.

The library itself fetches and caches those of the hub, in a process of its own: it loads half a second of code, and
nothing of it is needed to read Arrow.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from tuner.data.reading.problems import first_line
from tuner.errors import DataError, MachineError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
UNCOUNTED = 1 << 62
"""The total of rows, where slices by numbers alone need none."""
_BOUND = re.compile(r"(-?\d{1,15})(%)?")
_FETCH = """
import json, sys
try:
    from datasets import load_dataset
    data = load_dataset(sys.argv[1], split=sys.argv[2])
    answer = {"files": [file["filename"] for file in data.cache_files], "rows": len(data)}
except ModuleNotFoundError as error:
    answer = {"missing": error.name}
except Exception as error:
    answer = {"error": f"{type(error).__name__}: {error}"}
print("\\n" + json.dumps(answer))
"""


class SplitFiles(NamedTuple):
    """The Arrow files of a data set's split, in order, and which of their records are read."""

    path: Path
    """What stands for the split: its directory, or the first of its files."""
    files: tuple[Path, ...]
    records: tuple[int, int] | None
    """[start, stop); None is all."""


def saved_directory(path: Path, name: str) -> SplitFiles | None:
    """The split that a directory of `save_to_disk` is; None where it is no such directory. DataError."""
    if (path / "dataset_dict.json").is_file():
        names = ", ".join(f"{path.name}:{split}" for split in _read(path / "dataset_dict.json", "splits"))
        raise DataError(f"{path}: a data set of several splits", hint=f"name one: {names}")
    whole = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    return _saved(path, None, name) if whole else None


def named_split(place: str, split: str, part: str | None, name: str) -> SplitFiles:
    """A split, or a `part` of it such as `10%:`, of a saved data set or of one on the hub.

    `name` is what messages call it. DataError, MachineError.
    """
    directory = Path(place).expanduser()
    if (directory / "dataset_dict.json").is_file():
        splits = _read(directory / "dataset_dict.json", "splits")
        if split not in splits:
            raise DataError(f"{directory}: no split {split}", hint=f"there are {', '.join(splits)}")
        return _saved(directory / split, part, name)
    if (directory / "state.json").is_file():
        own = _read(directory / "state.json", "_split")
        if own != split:
            raise DataError(f"{directory}: no split {split}", hint=f"it holds the split {own}")
        return _saved(directory, part, name)
    if directory.exists() or _HUB_NAME.fullmatch(place) is None:
        raise DataError(
            f"{name}: no data set there",
            hint="a split is of a directory that datasets' save_to_disk wrote, or of a hub data set owner/name",
        )
    files, total = hub_files(place, split)
    return SplitFiles(files[0], files, records_in(part, total, name))


def _saved(directory: Path, part: str | None, name: str) -> SplitFiles:
    names = [str(entry["filename"]) for entry in _read(directory / "state.json", "_data_files")]
    if any(Path(file).name != file for file in names):
        raise DataError(f"{directory / 'state.json'}: a file name that leaves the directory")
    files = tuple(directory / file for file in names)
    total = 0 if part is None else sum(batch.num_rows for path in files for batch in arrow_batches(path))
    return SplitFiles(directory, files, records_in(part, total, name))


def arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an Arrow stream or file, memory-mapped. DataError."""
    try:
        with pa.memory_map(str(path), "r") as source:
            magic = source.read(6)
            source.seek(0)
            if magic == b"ARROW1":
                reader = pa.ipc.open_file(source)
                yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                yield from pa.ipc.open_stream(source)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable Arrow file: {first_line(error)}") from error


def hub_files(name: str, split: str) -> tuple[tuple[Path, ...], int]:
    """Return the cached Arrow files of a whole split, fetched where they are not, and its records. MachineError."""
    command = [sys.executable, "-c", _FETCH, name, split]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MachineError(f"{name}: {last}", hint="the datasets library failed on it")
    answer = json.loads(lines[-1])
    if "missing" in answer:
        raise MachineError(
            f"{name}: a hub data set needs the {answer['missing']} library", hint="install it: pip install datasets"
        )
    if "error" in answer:
        raise MachineError(
            f"{name}:{split}: {' '.join(answer['error'].split())[:500]}",
            hint="is the name right, is there a network, is HF_TOKEN set where it is private? "
            "A local file is named by its path, such as ./rows.jsonl",
        )
    if not answer["files"]:
        raise MachineError(f"{name}:{split}: datasets kept no file of it", hint="fetch it and name its files")
    return tuple(Path(file) for file in answer["files"]), int(answer["rows"])


def records_in(part: str | None, total: int, name: str) -> tuple[int, int] | None:
    """Records [start, stop) of so many, by `[10%:]`, `[:1000]` or `[-5%:]`; percents are rounded as datasets does."""
    if part is None:
        return None
    first, colon, last = part.replace("_", "").partition(":")
    if not colon:
        raise DataError(f"{name}: [{part}] is no slice", hint="write [:5%], [10%:], [:1000] or [100:200]")
    start, stop = _bound(first.strip(), 0, total, name), _bound(last.strip(), total, total, name)
    if start >= stop:
        of = "" if total == UNCOUNTED else f" of {total:,} rows"
        raise DataError(f"{name}: [{part}]{of} leaves none")
    return start, stop


def _bound(text: str, default: int, total: int, name: str) -> int:
    if not text:
        return default
    match = _BOUND.fullmatch(text)
    if match is None:
        raise DataError(f"{name}: {text} is no row and no percent", hint="write [:5%], [10%:], [:1000] or [100:200]")
    number = round(int(match[1]) * total / 100) if match[2] else int(match[1])
    return min(max(number + total if text.startswith("-") else number, 0), total)


def _read(path: Path, key: str) -> Any:
    try:
        return json.loads(path.read_bytes())[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not what datasets' save_to_disk writes ({error})") from error
