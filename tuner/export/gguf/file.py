"""GGUF files written front to back: keys and names first, then every tensor a block at a time.

K-quants are types of blocks that only llama.cpp's own code writes, which the wheel xllamacpp has.
"""

import ctypes
import functools
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value

from tuner.checkpoint.storage import tensor_bytes
from tuner.errors import MachineError
from tuner.export.gguf.tables import table
from tuner.export.tensors import TensorSource, groups_of, require_space, write_blocks
from tuner.runtime.files import machine_errors, opened

PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ROUNDED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4")
"""Types of blocks of 32, which need no llama.cpp."""
TYPES = (
    *PLAIN, "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "iq4_nl", "iq4_xs", "q4_1", "q4_0",
    "mxfp4", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
)  # fmt: skip
"""Of files; those of blocks with the closest to the trained weights first."""
_OF_FILES = {"f32": "ALL_F32", "mxfp4": "MOSTLY_MXFP4_MOE"}
"""What the format calls files of these types; others by a rule."""
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
    return "f16" if shape[-1] % 32 else "q8_0" if name in _HEADS else wanted


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
    kind = gguf.LlamaFileType[_OF_FILES.get(wanted, f"MOSTLY_{wanted.upper()}")]
    keys = {**keys, "general.quantization_version": gguf.GGML_QUANT_VERSION, "general.file_type": int(kind)}
    types = {name: type_of(name, source.shape, wanted) for name, source in tensors.items()}
    if wanted in table("mixes"):
        matrices = {name: source.shape for name, source in tensors.items() if types[name] != "f32"}
        types |= mixed(matrices, keys, wanted)
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
    path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, TensorSource],
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
            yield quantized(block, kind)


_PART = re.compile(r"blk\.(\d+)\.(attn_v|attn_k|attn_qkv|attn_output|ffn_down)(?:_exps)?\.weight")
_HEAD, _EMBEDDINGS = "output.weight", "token_embd.weight"
_NARROWER = {
    "q2_k": "q4_0", "q3_k": "q4_0", "iq4_xs": "iq4_nl", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"
}  # fmt: skip
"""Where rows do not fill blocks of 256: one of 32."""
_SAME = {"attn_qkv": "attn_v"}
_FEW, _DEEP = 8, 80
"""Experts of which attention is small enough to be kept wide; layers of a model whose values are small likewise."""
_NEXT_TO_FEW = {"attn_v": "q8_0", "attn_k": "q8_0"}
_WIDE = {"q6_k", "q5_k_m", "q5_k_s", "q3_k_l"}
"""Types whose attention's output stays as it is next to so few experts."""


def mixed(shapes: Mapping[str, tuple[int, ...]], keys: Mapping[str, Any], wanted: str) -> dict[str, str]:
    """The type of each of the matrices of a model in a file of this type, by the model's keys."""
    mix, (architecture, layers, experts, gqa) = table("mixes")[wanted], _facts(keys)
    parts: dict[str, list[str]] = {}
    for name in sorted(shapes, key=lambda name: (_layer(name), name)):
        if match := _PART.fullmatch(name):
            parts.setdefault(_SAME.get(match[2], match[2]), []).append(name)
    found = dict.fromkeys(shapes, str(mix["most"]))
    head = _HEAD if _HEAD in shapes else _EMBEDDINGS
    found[head] = "q8_0" if shapes[head][-1] % _size(mix["most"]) else "q6_k"
    for part, names in parts.items():
        for at, name in enumerate(names):
            layer, n = (_layer(name) if experts > 1 else at, layers) if part == "ffn_down" else (at, len(names))
            kind = _of_part(mix, part, layer, n, gqa)
            if part == "attn_v" and layers == _DEEP and gqa > 1 and architecture in {"llama", "qwen2"}:
                kind = {"q3_k": "q5_k", "q4_k": "q5_k"}.get(kind, kind)
            found[name] = _NEXT_TO_FEW.get(part, kind) if experts == _FEW else kind
            if experts == _FEW and part == "attn_output":
                found[name] = mix["most"] if wanted in _WIDE else "q5_k"
    for name, kind in found.items():
        fits = kind if not shapes[name][-1] % _size(kind) else _NARROWER.get(kind, kind)
        found[name] = "f16" if shapes[name][-1] % _size(fits) else fits
    return found


def _facts(keys: Mapping[str, Any]) -> tuple[str, int, int, int]:
    """The architecture, its layers and experts, and how many query heads share one of keys in the first layer."""
    architecture = next(key for key in keys if key.endswith(".block_count")).partition(".")[0]
    heads, kv = (keys[f"{architecture}.attention.{key}"] for key in ("head_count", "head_count_kv"))
    kv = kv[0] if isinstance(kv, list) else kv
    layers, experts = keys[f"{architecture}.block_count"], keys.get(f"{architecture}.expert_count", 0)
    return architecture, layers, experts, heads // kv if kv else 0


def _layer(name: str) -> int:
    layer = name.split(".")[1]
    return int(layer) if layer.isdigit() else -1


def _size(kind: str) -> int:
    return int(gguf.GGML_QUANT_SIZES[Type[kind.upper()]][0])


def _of_part(mix: Mapping[str, Any], part: str, at: int, n: int, gqa: int) -> str:
    holds = {
        "all": True,
        "shared": gqa >= 4,  # noqa: PLR2004 - as mixes.yaml says
        "eighth": at < n // 8,
        "sixteenth": at < n // 16,
        "more": at < n // 8 or at >= 7 * n // 8 or (at - n // 8) % 3 == 2,  # noqa: PLR2004 - the last of three
    }
    rules = mix.get(part, ())
    for when, kind in [["all", rules]] if isinstance(rules, str) else rules:
        if holds[when] if isinstance(when, str) else at < when:
            return str(kind)
    return str(mix["most"])


@functools.cache
def quantizer() -> Any:
    """llama.cpp's `ggml_quantize_chunk`. Raises MachineError where there is none."""
    found = importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("xllamacpp.xllamacpp")
    function: Any = getattr(ctypes.CDLL(found.origin), "ggml_quantize_chunk", None) if found and found.origin else None
    if function is None:
        raise MachineError(
            "K-quants are written by llama.cpp's own code, which is missing", hint="install it: pip install xllamacpp"
        )
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (ctypes.c_int, pointer, pointer, number, number, number, pointer)
    function.restype = ctypes.c_size_t
    return function


def quantized(block: torch.Tensor, kind: str) -> memoryview:
    """Rows in this type, by as many threads as torch has. Infinite and undefined values are the caller's to refuse."""
    rows = block.reshape(-1, block.shape[-1]).contiguous().float().numpy()
    size, width = gguf.GGML_QUANT_SIZES[Type[kind.upper()]]
    made = np.empty((len(rows), rows.shape[1] // size * width), dtype=np.uint8)
    quantize, number = quantizer(), int(Type[kind.upper()])

    def some(part: slice) -> None:
        source, target = rows[part], made[part]
        done = quantize(number, source.ctypes.data, target.ctypes.data, 0, len(source), rows.shape[1], None)
        if done != target.nbytes:
            raise MachineError(f"llama.cpp wrote {done:,} bytes of {kind} where {target.nbytes:,} were expected")

    step = -(-len(rows) // torch.get_num_threads())
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # ctypes lets others run meanwhile
        for _ in pool.map(some, [slice(at, at + step) for at in range(0, len(rows), step)]):
            pass
    return made.reshape(-1).data
