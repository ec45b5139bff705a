"""A builder of prepared data as a process of its own: `-m tests.data.building.builder CACHE ROWS`."""

import hashlib
import json
import sys
from pathlib import Path

from tests.data import tiny
from tuner.data.building.prepare import prepare
from tuner.data.prepared import open_prepared


def main(cache: Path, rows: Path) -> None:
    """Prepare the rows; print the key, whether they were there, and the SHA-256 of each file."""
    info = prepare(tiny.request(cache, rows))
    open_prepared(info.path, verify=True)
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in info.path.iterdir()}
    print(json.dumps([info.key, info.cached, hashes]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
