"""16 bytes that stand for one document's ids and mask: how two preparations are compared document by document."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

Array = np.ndarray[Any, np.dtype[Any]]


def digests(ids: Array, trained: Array, offsets: Array) -> list[bytes]:
    """The digest of each document: `ids` and `trained` [tokens] lie one after the other, `offsets` [documents + 1]."""
    flat, flags = ids.astype("<u4"), trained.astype("u1")
    return [
        hashlib.blake2b(flat[a:b].tobytes() + flags[a:b].tobytes(), digest_size=16).digest()
        for a, b in zip(offsets.tolist(), offsets.tolist()[1:], strict=False)
    ]


def prepared_digests(prepared: Path) -> list[bytes]:
    """The digests of a prepared directory's training documents, in its order."""
    found = []
    with pa.memory_map(str(prepared / "train.documents.arrow")) as source, pa.ipc.open_stream(source) as stream:
        for batch in stream:
            ids, trained = batch.column("input_ids"), batch.column("trained")
            offsets, first = ids.offsets.to_numpy(), ids.offsets[0].as_py()
            flags = trained.values.to_numpy(zero_copy_only=False)
            found += digests(ids.values.to_numpy()[first:], flags[first:], offsets - first)
    return found
