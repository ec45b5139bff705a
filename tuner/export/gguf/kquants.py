"""K-quants: types of blocks that only llama.cpp's own code writes, which the wheel xllamacpp has, and their mixes."""

import ctypes
import functools
import importlib.util
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from ruamel.yaml import YAML

from tuner.errors import MachineError

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


@functools.cache
def mixes() -> Mapping[str, Any]:
    """The file of mixes."""
    loaded: Mapping[str, Any] = YAML(typ="safe").load(Path(__file__).with_name("mixes.yaml"))
    return loaded


def mixed(shapes: Mapping[str, tuple[int, ...]], keys: Mapping[str, Any], wanted: str) -> dict[str, str]:
    """The type of each of the matrices of a model in a file of this type, by the model's keys."""
    mix, (architecture, facts) = mixes()[wanted], _facts(keys)
    layers, experts, gqa = (facts[key] for key in ("layers", "experts", "gqa"))
    parts: dict[str, list[str]] = {}
    for name in sorted(shapes, key=_in_order):
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


def _facts(keys: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """The architecture, its layers and experts, and how many query heads share one of keys in the first layer."""
    architecture = next(key for key in keys if key.endswith(".block_count")).partition(".")[0]
    heads, kv = (keys[f"{architecture}.attention.{key}"] for key in ("head_count", "head_count_kv"))
    kv = kv[0] if isinstance(kv, list) else kv
    experts = keys.get(f"{architecture}.expert_count", 0)
    layers = keys[f"{architecture}.block_count"]
    return architecture, {"layers": layers, "experts": experts, "gqa": heads // kv if kv else 0}


def _layer(name: str) -> int:
    layer = name.split(".")[1]
    return int(layer) if layer.isdigit() else -1


def _in_order(name: str) -> tuple[int, str]:
    return _layer(name), name


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
            "K-quants are written by llama.cpp's own code, which is missing",
            hint="install it: pip install xllamacpp",
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
