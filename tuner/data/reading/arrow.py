"""Record batches of an Arrow file, memory-mapped."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from tuner.errors import DataError


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
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable Arrow file: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error of Arrow says, without its stack."""
    return str(error).strip().partition("\n")[0]
