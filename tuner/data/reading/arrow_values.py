"""Arrow's values as plain ones: a struct's null field is a key that is not there.

Arrow has one set of keys for all structs of a column and fills with null what a record does not have, at every depth.
Which nulls somebody wrote cannot be told from these, so all of them are left out. Where nothing is filled in, nulls
stay: elements of lists, values of maps and of unions, and JSON, as text or in a column of that type.
"""

from collections.abc import Callable
from typing import Any

import orjson
import pyarrow as pa

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
