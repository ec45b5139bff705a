"""Arrow's values as plain ones, a struct's null field a key that is not there; and what they take unpacked.

Arrow has one set of keys for all structs of a column and fills with null what a record does not have, at every depth.
Which nulls somebody wrote cannot be told from these, so all of them are left out. Where nothing is filled in, nulls
stay: elements of lists, values of maps and of unions, and JSON, as text or in a column of that type.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
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
    columns = [_unfolded(column, _plain(column.type)) for column in batch.columns]
    fields = [field.with_type(column.type) for field, column in zip(batch.schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, batch.schema.metadata))


def _unfolded(column: Any, kind: Any) -> Any:
    if kind.equals(column.type):
        return column
    return column.take(pa.array(range(len(column)), pa.int64())).cast(kind)  # a cast unfolds all before a slice, too


def _plain(kind: Any) -> Any:
    if pa.types.is_dictionary(kind) and _has_lengths(kind.value_type):
        return kind.value_type
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    return kind


Decode = Callable[[Any], Any]
_LISTS = (
    pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list,
    pa.types.is_list_view, pa.types.is_large_list_view,
)  # fmt: skip


def plain_records(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch; a column's own null stays, which counts as absent, so that messages can name it.

    A map whose keys are strings becomes an object. Raises ValueError (also for a map with a key twice), OverflowError
    and ArrowException for a value that Python cannot hold.
    """
    records: list[dict[str, Any]] = batch.to_pylist()
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        decode = _decoder(column)
        if decode is not None:
            for record in records:
                if record[name] is not None:
                    record[name] = decode(record[name])
    return records


def _decoder(array: Any) -> Decode | None:
    """How a value of an array, not null, becomes plain; None where all are already: most columns cost nothing."""
    kind = array.type
    if isinstance(kind, pa.JsonType):
        return orjson.loads
    if isinstance(kind, pa.BaseExtensionType):
        return _decoder(array.storage) if pa.types.is_nested(kind.storage_type) else None
    if pa.types.is_dictionary(kind):
        return _decoder(array.dictionary)
    if pa.types.is_run_end_encoded(kind):
        return _decoder(array.values)
    if any(is_lists(kind) for is_lists in _LISTS):
        inner = _decoder(array.values)
        return inner and (lambda items: [item if item is None else inner(item) for item in items])
    if pa.types.is_struct(kind):
        return _of_struct({field.name: array.field(i) for i, field in enumerate(kind)})
    return _of_map(array) if pa.types.is_map(kind) else None


def _of_struct(fields: dict[str, Any]) -> Decode | None:
    inside = {name: inner for name, values in fields.items() if (inner := _decoder(values)) is not None}
    if not inside and not any(values.null_count for values in fields.values()):
        return None
    if not inside:
        return _without_nulls

    def decode(value: dict[str, Any]) -> dict[str, Any]:
        plain = _without_nulls(value)
        for key, of_key in inside.items():
            if key in plain:
                plain[key] = of_key(plain[key])
        return plain

    return decode


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if item is not None}


def _of_map(array: Any) -> Decode:
    inner = _decoder(array.items)
    has_names = pa.types.is_string(array.type.key_type) or pa.types.is_large_string(array.type.key_type)

    def decode(pairs: list[tuple[Any, Any]]) -> Any:
        plain = [(key, item if inner is None or item is None else inner(item)) for key, item in pairs]
        value = dict(plain) if has_names else plain
        if len(value) < len(pairs):
            raise ValueError("a map with two values of one key")
        return value

    return decode
