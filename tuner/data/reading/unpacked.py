"""What the values of Arrow's arrays take, each with all that it means, where an array holds some once for many rows."""

from typing import Any

import numpy as np
import pyarrow as pa

_TEXTS = (
    pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary,
    pa.types.is_fixed_size_binary, pa.types.is_string_view, pa.types.is_binary_view,
)  # fmt: skip

_VALUE_BYTES, _OBJECT_BYTES = 8, 32
"""What a value, a list or an object takes at least once it is read, though a null may take nothing in the file."""


def unpacked_bytes(array: Any, texts: bool = False) -> int:
    """Bytes of the values of an array; with `texts`, of its texts alone."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return unpacked_bytes(array.storage, texts)
    if pa.types.is_dictionary(kind):
        return _of_dictionary(array, texts)
    if pa.types.is_run_end_encoded(kind):
        return len(array) * _longest(array.values, texts)
    objects = 0 if texts else _OBJECT_BYTES * len(array)
    if pa.types.is_struct(kind):
        return sum(unpacked_bytes(field, texts) for field in array.flatten()) + objects
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return unpacked_bytes(array.flatten(), texts) + objects
    if pa.types.is_map(kind):
        first, stop = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return sum(unpacked_bytes(part.slice(first, stop - first), texts) for part in (array.keys, array.items))
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return _of_list_view(array, texts)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return _of_views(array)
    if any(is_text(kind) for is_text in _TEXTS):
        return int(array.nbytes)
    return 0 if texts else max(int(array.nbytes), _VALUE_BYTES * len(array))


def _of_dictionary(array: Any, texts: bool) -> int:
    """The sum over the values that are meant, where they are texts; else as if each were all of the dictionary."""
    import pyarrow.compute as pc

    values = array.dictionary
    if not _has_lengths(values.type):
        width = 8 if pa.types.is_primitive(values.type) else unpacked_bytes(values, texts)
        return len(array) * width
    return int(pc.sum(pc.take(pc.binary_length(values), array.indices)).as_py() or 0) + 4 * len(array)


def _longest(values: Any, texts: bool) -> int:
    import pyarrow.compute as pc

    if not _has_lengths(values.type):
        return unpacked_bytes(values, texts)
    return int(pc.max(pc.binary_length(values)).as_py() or 0) if len(values) else 0


def _has_lengths(kind: Any) -> bool:
    return any(is_text(kind) for is_text in _TEXTS[:4])


def _of_list_view(array: Any, texts: bool) -> int:
    """As if each list were all of the values, where two of them share some."""
    offsets, sizes = (part.to_numpy(zero_copy_only=False).astype(np.int64) for part in (array.offsets, array.sizes))
    offsets, sizes = offsets[sizes > 0], sizes[sizes > 0]
    if not len(sizes):
        return _OBJECT_BYTES * len(array)
    order = np.argsort(offsets)
    stops = offsets + sizes
    shares = stops[order][:-1] > offsets[order][1:]
    values = array.values.slice(int(offsets.min()), int(stops.max() - offsets.min()))
    return unpacked_bytes(values, texts) * (len(sizes) if shares.any() else 1) + _OBJECT_BYTES * len(array)


def _of_views(array: Any) -> int:
    """Views say how long each text is; several may be of the same bytes."""
    views = np.frombuffer(array.buffers()[1], dtype=np.int32).reshape(-1, 4)[array.offset : array.offset + len(array)]
    return int(views[:, 0].sum(dtype=np.int64)) + 16 * len(array)


def unfolded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch with each text in its own row: a dictionary would go along with every slice of it."""
    columns = []
    for column in batch.columns:
        kind = _plain(column.type)
        columns.append(column if kind.equals(column.type) else column.cast(kind))
    fields = [field.with_type(column.type) for field, column in zip(batch.schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, batch.schema.metadata))


def _plain(kind: Any) -> Any:
    if pa.types.is_dictionary(kind) and _has_lengths(kind.value_type):
        return kind.value_type
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain(kind.value_type)))
    return kind
