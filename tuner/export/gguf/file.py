"""GGUF files written front to back: keys and names first, then every tensor a block at a time."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value

from tuner.checkpoint.storage import tensor_bytes
from tuner.export.gguf import kquants
from tuner.export.shards import groups_of, require_space, write_blocks
from tuner.export.tensors import TensorSource
from tuner.runtime.files import machine_errors, opened

PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ROUNDED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4")
"""Types of blocks of 32, which need no llama.cpp."""
TYPES = (
    *PLAIN, "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "iq4_nl", "iq4_xs", "q4_1", "q4_0",
    "mxfp4", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
)  # fmt: skip
"""Of files; those of blocks with the closest to the trained weights first."""
_OF_FILE, _OF_TENSOR = 512, 128
"""Bytes, more than enough, of what every file says of itself, and of each tensor besides its name."""
_KINDS = {bool: Value.BOOL, int: Value.UINT32, float: Value.FLOAT32, str: Value.STRING, list: Value.ARRAY}
_OF_SHARDS = {"split.no": Value.UINT16, "split.count": Value.UINT16, "split.tensors.count": Value.INT32}
"""Of values, and of keys whose value is a number of another size."""
_HEADS = ("token_embd.weight", "output.weight")
_ALWAYS_F32 = ("norm.weight", "ffn_gate_inp.weight", "shortconv.conv.weight", "attn_sinks.weight", "rope_freqs.weight")


def type_of(name: str, shape: tuple[int, ...], wanted: str) -> str:
    """The type of one tensor in a file of this type: vectors and routers stay f32; what blocks do not fit, f16.

    The embeddings and the head of a file below 8 bits are q8_0, as rounding costs most there.
    """
    if len(shape) < 2 or name.endswith((*_ALWAYS_F32, ".bias")):  # noqa: PLR2004 - a vector
        return "f32"
    if wanted not in ROUNDED:
        return wanted
    if shape[-1] % 32:
        return "f16"
    return "q8_0" if name in _HEADS else wanted


def write_gguf(  # noqa: PLR0913, PLR0917 - what a file is
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, TensorSource],
    wanted: str,
    shard_bytes: int | None = None,
) -> list[Path]:
    """Write a new file and flush it, or several of at most ``shard_bytes``, a larger tensor alone; returns them.

    Several lie in a directory of the file's name without `.gguf`, named as llama.cpp reads them. Raises MachineError,
    and what the tensors' sources raise.
    """
    keys = {**keys, "general.quantization_version": gguf.GGML_QUANT_VERSION, "general.file_type": _file_type(wanted)}
    types = {name: type_of(name, source.shape, wanted) for name, source in tensors.items()}
    if wanted in kquants.mixes():
        matrices = {name: source.shape for name, source in tensors.items() if types[name] != "f32"}
        types |= kquants.mixed(matrices, keys, wanted)
    sizes = {name: _nbytes(types[name], source.shape) + len(name) + _OF_TENSOR for name, source in tensors.items()}
    header = _header_bytes(keys)
    require_space(path.parent, header + sum(sizes.values()))
    groups = groups_of(sizes, shard_bytes or math.inf, header, _OF_FILE)
    if len(groups) == 1:
        _write_file(path, architecture, keys, {name: tensors[name] for name in groups[0]}, types)
        return [path]
    stem = path.name.removesuffix(".gguf")
    directory = path.with_name(stem)
    with machine_errors(directory):
        directory.mkdir()
    paths = [directory / f"{stem}-{at + 1:05d}-of-{len(groups):05d}.gguf" for at in range(len(groups))]
    for at, (each, group) in enumerate(zip(paths, groups, strict=True)):
        own = (keys if at == 0 else {}) | {"split.no": at, "split.count": len(groups)}
        own |= {"split.tensors.count": len(tensors)}
        _write_file(each, architecture, own, {name: tensors[name] for name in group}, types)
    return paths


def _header_bytes(keys: Mapping[str, Any]) -> int:
    """At most so many bytes of a file are its keys."""
    items = (item for value in keys.values() for item in (value if isinstance(value, list) else [value]))
    return _OF_FILE + 32 * len(keys) + sum(map(len, keys)) + sum(8 + len(str(item).encode()) for item in items)


def _nbytes(kind: str, shape: tuple[int, ...]) -> int:
    block, size = gguf.GGML_QUANT_SIZES[Type[kind.upper()]]
    return math.prod(shape) // block * size


def _write_file(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, TensorSource],
    types: Mapping[str, str],
) -> None:
    writer = gguf.GGUFWriter(None, architecture)
    for key, value in keys.items():
        if value not in ("", []):  # of which the format has none
            writer.add_key_value(key, value, _OF_SHARDS.get(key) or _KINDS[type(value)])
    for name, source in tensors.items():
        kind, shape = Type[types[name].upper()], cast("Any", source.shape)
        writer.add_tensor_info(name, shape, np.dtype("float32"), _nbytes(types[name], shape), raw_dtype=kind)
    with machine_errors(path):
        with closing(writer):
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        with opened(path, os.O_WRONLY | os.O_APPEND) as descriptor:
            write_blocks(descriptor, _data(path.stat().st_size, tensors, types))


def _data(header: int, tensors: Mapping[str, TensorSource], types: Mapping[str, str]) -> Iterator[memoryview]:
    """What comes after so many bytes: each tensor begins at a multiple of the format's 32."""
    yield _padding(header)
    for name, source in tensors.items():
        yield from _blocks(source, types[name])
        yield _padding(_nbytes(types[name], source.shape))


def _padding(size: int) -> memoryview:
    return memoryview(bytes(-size % gguf.GGUF_DEFAULT_ALIGNMENT))


def _blocks(source: TensorSource, kind: str) -> Iterator[memoryview]:
    if kind in PLAIN:
        yield from (tensor_bytes(block) for block in source.blocks(PLAIN[kind]))
        return
    for block in source.blocks(torch.float32):
        if kind in ROUNDED:
            yield gguf.quants.quantize(block.contiguous().numpy(), Type[kind.upper()]).reshape(-1).data
        else:
            yield kquants.quantized(block, kind)


def _file_type(wanted: str) -> int:
    name = {"f32": "ALL_F32", "mxfp4": "MOSTLY_MXFP4_MOE"}.get(wanted, f"MOSTLY_{wanted.upper()}")
    return int(gguf.LlamaFileType[name])

