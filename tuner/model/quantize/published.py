"""Weights that bitsandbytes stored in 4 or 8 bits, as transformers publishes them: read as they are, or refused.

Beside a weight's codes (`weight`) a file holds, under the weight's name and a dot, `absmax`, `quant_map` and
`quant_state.bitsandbytes__nf4` (JSON in uint8), and where the scales are quantised too `nested_absmax` and
`nested_quant_map`; of an int8 weight, next to its name, `SCB` and `weight_format`.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tuner.errors import DataError, RecipeError
from tuner.model.quantize.codes import BLOCK, INT8_STEP, Kind, Quantized, decode_nf4, nf4_values, scale_columns

STATE = "quant_state.bitsandbytes__"
_OF_4_BITS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", f"{STATE}nf4", f"{STATE}fp4")
_OF_8_BITS = ("SCB", "weight_format")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_UNQUANTISED = "name the model that it was quantised from, and write model.quantize: nf4 to train it in 4 bits"
_REASONS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""By names of formats that are not read, why not."""


def published_kind(config: Mapping[str, Any], where: str) -> Kind | None:
    """What the weights of a model are stored in, by `quantization_config` in its config.json; None: nothing special.

    ``where`` is the file, for the messages. Raises RecipeError for formats that are not read, by name.
    """
    if not (about := config.get("quantization_config")):
        return None
    method = str(about.get("quant_method", "")) if isinstance(about, Mapping) else ""
    if method not in {"bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"}:
        reason = _REASONS.get(method, "its format is not known")
        named = method or "an unnamed method"
        raise RecipeError(
            f"{where}: quantization_config: the weights are quantised by {named}, which is not read: {reason}",
            hint=_UNQUANTISED,
        )
    if about.get("load_in_8bit") or about.get("_load_in_8bit"):
        return "int8"
    if about.get("load_in_4bit") or about.get("_load_in_4bit"):
        values = about.get("bnb_4bit_quant_type", "fp4")
        if values != "nf4":
            raise _not_nf4(where, str(values))
        return "nf4"
    raise RecipeError(
        f"{where}: quantization_config: bitsandbytes with neither load_in_4bit nor load_in_8bit", hint=_UNQUANTISED
    )


def grouped(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Of the names in a model's files, those of quantised weights: the weight's name to its parts and their names.

    Parts are called as in :data:`_OF_4_BITS` and :data:`_OF_8_BITS`, and the codes ``weight``.
    """
    known, found = set(names), dict[str, dict[str, str]]()
    for name in known:
        for part in (*_OF_4_BITS, *_OF_8_BITS):
            if not name.endswith(f".{part}"):
                continue
            stem = name[: -len(part) - 1]
            weight = stem if part in _OF_4_BITS else f"{stem}.weight"
            if weight in known:
                found.setdefault(weight, {"weight": weight})[part] = name
    return found


def read(name: str, parts: Mapping[str, torch.Tensor]) -> Quantized:
    """Our codes and scales of a stored weight, which stand for the very values that bitsandbytes would make of it.

    ``parts`` are the tensors of :func:`grouped`. Scales that are quantised themselves are made whole, as float32.
    Raises RecipeError for what blocks of 64 inside rows cannot say, DataError for parts that do not go together.
    """
    if "SCB" in parts:
        codes, scales = _of_8_bits(name, parts)
        return Quantized(codes, scales[:, None].repeat(1, scale_columns(codes.shape[1])), codes.shape[1])
    state = _state(name, parts)
    scales = _scales(name, parts, state)
    rows, columns = state.shape
    if columns % state.block or state.block % BLOCK:
        raise RecipeError(
            f"{name}: its blocks of {state.block} values do not lie inside its rows of {columns}, or are no blocks "
            f"of {BLOCK}: other codes would be other weights",
            hint=_UNQUANTISED,
        )
    repeated = scales.repeat_interleave(state.block // BLOCK)
    return Quantized(_bytes(name, parts, state).view(rows, columns // 2), repeated.view(rows, -1), columns)


def dequantized_as_stored(name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The weight that bitsandbytes makes of what it stored, bit for bit: any block, in the type that it was made from.

    Float32 where the codes are int8. Raises RecipeError and DataError as :func:`read`.
    """
    if "SCB" in parts:
        codes, scales = _of_8_bits(name, parts)
        return codes * scales[:, None] * INT8_STEP
    state = _state(name, parts)
    rows, columns = state.shape
    each = _scales(name, parts, state).repeat_interleave(state.block)[: rows * columns]
    values = decode_nf4(_bytes(name, parts, state))[: rows * columns]
    return (values * each).view(rows, columns).to(state.dtype)


class _State(NamedTuple):
    """What the JSON of a stored weight says: its shape, its type before, its blocks and those of its scales."""

    shape: tuple[int, int]
    dtype: torch.dtype
    block: int
    nested_block: int
    nested_offset: float


def _state(name: str, parts: Mapping[str, torch.Tensor]) -> _State:
    if f"{STATE}fp4" in parts:
        raise _not_nf4(name, "fp4")
    try:
        told = json.loads(bytes(parts[f"{STATE}nf4"].to(torch.uint8).tolist()))
        rows, columns = (int(size) for size in told["shape"])
        state = _State(
            (rows, columns), _DTYPES[told["dtype"]], int(told["blocksize"]), int(told.get("nested_blocksize") or 0),
            float(told.get("nested_offset") or 0.0),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{name}: its {STATE}nf4 is not what bitsandbytes writes: {error!r}") from error
    if told.get("quant_type") != "nf4" or min(rows, columns, state.block) < 1:
        raise DataError(f"{name}: its {STATE}nf4 says {told.get('quant_type')!r}, {state.block} and {told['shape']}")
    table = parts.get("quant_map")
    if table is None or not torch.equal(table.float(), nf4_values(table.device)):
        raise DataError(f"{name}: its quant_map is not the 16 values of NF4")
    return state


def _scales(name: str, parts: Mapping[str, torch.Tensor], state: _State) -> torch.Tensor:
    """Float32, one of each block; where they are quantised, made whole as bitsandbytes does: product, then sum."""
    count = -(-state.shape[0] * state.shape[1] // state.block)
    scales = parts.get("absmax")
    if scales is not None and scales.dtype == torch.uint8:
        table, nested = parts.get("nested_quant_map"), parts.get("nested_absmax")
        if table is None or nested is None or len(nested) * state.nested_block < len(scales) or table.numel() != 256:
            raise DataError(f"{name}: its nested_absmax or nested_quant_map is missing, or too short")
        each = nested.float().repeat_interleave(state.nested_block)[: len(scales)]
        scales = table.float()[scales.to(torch.int32)] * each + torch.tensor(state.nested_offset)
    if scales is None or scales.shape != (count,) or not bool(torch.isfinite(scales).all()):
        raise DataError(f"{name}: its absmax is not {count} finite numbers")
    return scales.float()


def _bytes(name: str, parts: Mapping[str, torch.Tensor], state: _State) -> torch.Tensor:
    """Codes, two in a byte, in one dim; whatever type they are stored as."""
    stored = parts["weight"].contiguous().flatten().view(torch.uint8)
    if len(stored) != -(-state.shape[0] * state.shape[1] // 2):
        raise DataError(f"{name}: {len(stored)} bytes of codes for a weight of {[*state.shape]}")
    return stored


def _of_8_bits(name: str, parts: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 ``[out, in]`` and the largest magnitudes of rows, float32 ``[out]``."""
    codes, scales = parts["weight"], parts["SCB"].float().flatten()
    if codes.dtype != torch.int8 or codes.ndim != 2 or len(scales) != len(codes):
        raise DataError(f"{name}: its codes are {codes.dtype} of {[*codes.shape]}, its SCB of {[*scales.shape]}")
    if not bool(torch.isfinite(scales).all()):
        raise DataError(f"{name}: its SCB is not finite")
    if (layout := parts.get("weight_format")) is not None and int(layout) != 0:
        raise RecipeError(
            f"{name}: its codes lie in tiles of one kind of GPU (weight_format {int(layout)}), not in rows",
            hint=_UNQUANTISED,
        )
    return codes, scales


def _not_nf4(where: str, values: str) -> RecipeError:
    return RecipeError(f"{where}: its 4-bit codes stand for {values}, not nf4: they are not read", hint=_UNQUANTISED)
