"""The bytes of a source file as one stream, inflated where it is compressed, in bounded memory."""

import io
from typing import BinaryIO, cast

import pyarrow as pa

from tuner.data.reading.data_sets import first_line
from tuner.data.sources import SourceFile, file_error
from tuner.errors import DataError

MAX_RATIO = 1000
"""No text compresses better than this over `RATIO_FROM` bytes: more is a decompression bomb."""
RATIO_FROM = 256 << 20
_BUFFER_BYTES = 1 << 20


def open_stream(file: SourceFile) -> BinaryIO:
    """Open a file for buffered reading from its start. DataError, also from later reads: truncated, corrupt, a bomb."""
    try:
        if not file.compression:
            return file.path.open("rb", buffering=_BUFFER_BYTES)
        return cast(BinaryIO, io.BufferedReader(_Inflated(file), _BUFFER_BYTES))
    except OSError as error:
        raise file_error(file, error) from error


class _Inflated(io.RawIOBase):
    """A gzip or zstd file of one or several frames, checked to its end."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._source = pa.OSFile(str(file.path), "rb")
        self._stream = pa.CompressedInputStream(self._source, file.compression)
        self._inflated = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` from the inflated bytes. DataError."""
        try:
            count = int(self._stream.readinto(buffer))
            consumed = int(self._source.tell())
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{self._file.name}: damaged or cut off {self._file.compression} file: {first_line(error)}",
                hint="fetch or compress it again",
            ) from error
        if count == 0 and consumed == 0:
            raise DataError(f"{self._file.name}: an empty file is no {self._file.compression} file")
        self._inflated += count
        if self._inflated > max(RATIO_FROM, MAX_RATIO * consumed):
            raise DataError(
                f"{self._file.name}: {consumed:,} bytes inflate to more than {self._inflated:,}: a decompression bomb"
            )
        return count

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._stream.close()
            self._source.close()
        super().close()
