"""Codes of quantised weights against bitsandbytes, on a CPU, and their kernels compiled for GPUs that are not there.

    python -m tools.quantize_campaign [blocks] [files] [models] [compiler] [--peer DIRECTORY] [--write]

`blocks`: a thousand random blocks of 64, in three types, have bitsandbytes' NF4 codes, scales and dequantised values
bit for bit, and so have a million numbers around each boundary between codes; the hashes that the tests hold are
printed. `files`: layers of bitsandbytes saved to safetensors (4 bits with plain and with quantised scales, of several
blocks, shapes and types; 8 bits) are read to the bits that bitsandbytes computes with. `models`: so are whole models
that transformers quantised and saved, whose config.json says what they are. `compiler`: the Triton kernels
become machine code for compute capabilities 8.0 to 12.0. bitsandbytes is installed alone into the directory (default
.demo/peers/bitsandbytes). Exits with 1 where one fails.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.model.quantize import drawn
from tools.commands import ROOT, asked, judged, workplace
from tools.liger_campaign import Launch, problem
from tuner.model.quantize import codes, published
from tuner.model.quantize.codes import TYPES, dequantize, quantize

RESULTS = (torch.float32, torch.bfloat16, torch.float16)
GENERATIONS = (80, 86, 89, 90, 100, 120)
GOLDEN = ROOT / "tests" / "model" / "quantize" / "stored_by_bitsandbytes.safetensors"
MEASURED = "0.50.2"
"""The version whose results are the tests' (drawn.py)."""


def installed(place: Path) -> Any:
    """The package bitsandbytes, in a directory of its own."""
    if not (place / "bitsandbytes").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place)]
        subprocess.run([*command, f"bitsandbytes=={MEASURED}"], check=True)
    sys.path.append(str(place))
    import bitsandbytes

    return bitsandbytes


def blocks(peer: Any) -> Iterator[str]:
    """Problems of codes, scales and values."""
    for dtype in TYPES:
        weight = drawn.blocks(dtype)
        packed, state = peer.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        theirs = [packed.view(len(weight), -1), state.absmax[:, None]]
        theirs += [_values_of(peer, packed, state, other) for other in RESULTS]
        made = quantize(weight, "nf4")
        own = [made.codes, made.scales]
        own += [dequantize(made.codes, made.scales, 64, other) for other in RESULTS]
        names = ("codes", "scales", "float32 values", "bfloat16 values", "float16 values")
        for name, one, other in zip(names, own, theirs, strict=True):
            if not torch.equal(one, other):
                yield f"{dtype}: {int((one != other).sum())} {name} of {one.numel()} differ"
        found = drawn.sha256(*theirs)
        print(f'"{dtype}": "{found}",  # {len(weight)} blocks', flush=True)
        if found != drawn.MADE_BY_BITSANDBYTES.get(str(dtype)):
            yield f"{dtype}: bitsandbytes {peer.__version__} gives {found}, the tests hold another ({MEASURED})"
    yield from _boundaries(peer)
    yield from _rows_of_8_bits(peer)


def _values_of(peer: Any, packed: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    state.dtype = dtype
    found: torch.Tensor = peer.functional.dequantize_4bit(packed, state)
    return found


def _boundaries(peer: Any) -> Iterator[str]:
    """Numbers around each boundary: blocks whose scale is 1, and others, hold the 62 float32 numbers next to it."""
    bounds, generator = codes.nf4_bounds(torch.device("cpu")), torch.Generator().manual_seed(0)
    for scale in (1.0, *torch.rand(1000, generator=generator).tolist()):
        steps = (bounds * scale).view(torch.int32)[:, None] + torch.arange(-31, 31, dtype=torch.int32)
        weight = torch.cat([steps.view(torch.float32), torch.full((15, 2), scale)], 1)
        packed, _ = peer.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        if not torch.equal(packed.view(15, -1), quantize(weight, "nf4").codes):
            yield f"scale {scale}: another code next to a boundary"
    print("1,001 scales: the codes of 62 numbers around each of the 15 boundaries compared", flush=True)


def _rows_of_8_bits(peer: Any) -> Iterator[str]:
    """Where a row is one block of 64, our int8 is LLM.int8's."""
    weight = drawn.blocks(torch.float16)
    codes, scales, _ = peer.functional.int8_vectorwise_quant(weight.clone())
    made = quantize(weight, "int8")
    if not torch.equal(made.codes, codes) or not torch.equal(made.scales[:, 0], scales):
        yield "int8: codes or scales of rows of 64 are not those of LLM.int8"
    theirs = peer.functional.int8_vectorwise_dequant(codes, scales)
    if not torch.equal(dequantize(made.codes, made.scales, 64), theirs):
        yield "int8: values of rows of 64 are not those of LLM.int8"


def files(peer: Any) -> Iterator[str]:
    """Problems of what is read of saved layers."""
    shapes = ((96, 64), (33, 192), (7, 4096), (128, 576))
    for (rows, columns), dtype, nested in itertools.product(shapes, TYPES, (False, True)):
        for block in (64, 128, 256) if columns % 256 == 0 else (64,):
            weight = drawn.blocks(dtype, rows, columns)
            parameter = peer.nn.Params4bit(
                weight, requires_grad=False, compress_statistics=nested, blocksize=block, quant_type="nf4"
            )
            layer = peer.nn.Linear4bit(columns, rows, bias=False, compress_statistics=nested, quant_type="nf4")
            layer.weight = parameter.to("cpu")
            expected = peer.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            yield from _read(f"nf4 {rows}x{columns} {dtype} block {block} nested {nested}", layer, expected)
    for rows, columns in shapes:
        layer = peer.nn.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False)
        weight = drawn.blocks(torch.float16, rows, columns)
        layer.weight = peer.nn.Int8Params(weight, requires_grad=False).to("cpu")
        expected = peer.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
        yield from _read(f"int8 {rows}x{columns}", layer, expected)


def models(peer: Any) -> Iterator[str]:
    """Problems of models that transformers saves."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    wishes: dict[str, dict[str, Any]] = {
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "nf4 twice": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "nf4 as bfloat16": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
        "int8": {"load_in_8bit": True},
    }
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 100}
    with workplace() as plain:
        config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
        LlamaForCausalLM(config).bfloat16().save_pretrained(plain)
        for name, wish in wishes.items():
            quantised = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.bfloat16, **wish)
            model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=quantised, device_map="cpu")
            with workplace() as saved:
                model.save_pretrained(saved)
                about = json.loads((saved / "config.json").read_text())
                stored = load_file(saved / "model.safetensors")
            if published.published_kind(about, "config.json") != name.split()[0]:
                yield f"{name}: its config.json is not read as that"
            yield from _weights_of(peer, name, model, stored)


def _weights_of(peer: Any, case: str, model: torch.nn.Module, stored: dict[str, torch.Tensor]) -> Iterator[str]:
    """Each quantised weight of a model, as it was saved and as it computes."""
    weights = published.grouped(stored)
    if len(weights) != 2 * 7:
        yield f"{case}: {len(weights)} weights of two layers are found"
    for name, parts in weights.items():
        weight: Any = model.get_parameter(name)  # one of bitsandbytes' own
        tensors = {part: stored[full] for part, full in parts.items()}
        if "SCB" in tensors:
            expected = peer.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
        else:
            expected = peer.functional.dequantize_4bit(weight.data, weight.quant_state)
        made = published.read(name, tensors)
        if not torch.equal(dequantize(made.codes, made.scales, made.columns, expected.dtype), expected):
            yield f"{case} {name}: our codes and scales stand for other values"
        if not torch.equal(published.dequantized_as_stored(name, tensors), expected):
            yield f"{case} {name}: the values are not those of bitsandbytes"
    print(f"ok  {case}: {len(weights)} weights of a model", flush=True)


def golden(peer: Any, place: Path) -> None:
    """Write the small file that the tests read: every kind of weight, next to its values (`expected.NAME`)."""
    kinds = {
        "plain": (torch.bfloat16, {}), "nested": (torch.float32, {"compress_statistics": True}),
        "wide": (torch.float16, {"blocksize": 128}), "packed": (torch.bfloat16, {"quant_storage": torch.bfloat16}),
    }
    tensors = {}
    for name, (dtype, wishes) in kinds.items():
        given = {"quant_type": "nf4", "compress_statistics": False, **wishes}
        parameter = peer.nn.Params4bit(drawn.blocks(dtype, 6, 128), **given).to("cpu")
        layer = peer.nn.Linear4bit(128, 6, bias=False)
        layer.weight = parameter
        tensors |= {f"{name}.{part}": one for part, one in layer.state_dict().items()}
        tensors[f"expected.{name}"] = peer.functional.dequantize_4bit(parameter.data, parameter.quant_state)
    layer = peer.nn.Linear8bitLt(100, 6, bias=False, has_fp16_weights=False)
    layer.weight = peer.nn.Int8Params(drawn.blocks(torch.float16, 6, 100), requires_grad=False).to("cpu")
    tensors |= {f"bytes.{part}": one for part, one in layer.state_dict().items()}
    tensors["expected.bytes"] = peer.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
    save_file({name: one.contiguous() for name, one in tensors.items()}, place)


def _read(case: str, layer: torch.nn.Module, expected: torch.Tensor) -> Iterator[str]:
    """Save a layer as transformers does, read the file, and compare values."""
    with workplace() as place:
        path = place / "model.safetensors"
        state = {f"layers.0.q_proj.{name}": value for name, value in layer.state_dict().items()}
        save_file({name: value.contiguous() for name, value in state.items()}, path)
        stored = load_file(path)
    weights = published.grouped(stored)
    if [*weights] != ["layers.0.q_proj.weight"]:
        yield f"{case}: found {weights} among {sorted(stored)}"
        return
    ((name, parts),) = weights.items()
    tensors = {part: stored[full] for part, full in parts.items()}
    if not torch.equal(published.dequantized_as_stored(name, tensors), expected):
        yield f"{case}: the values are not those of bitsandbytes"
    made = published.read(name, tensors)
    if not torch.equal(dequantize(made.codes, made.scales, made.columns, expected.dtype), expected):
        yield f"{case}: our codes and scales stand for other values"
    print(f"ok  {case}: {expected.numel()} values, {len(parts)} tensors", flush=True)


def compiler(_: Any) -> Iterator[str]:
    """Problems of the kernels' programs."""
    from tuner.model.quantize import triton_rows

    for kind, kernel in (("nf4", triton_rows._pairs), ("int8", triton_rows._bytes)):
        for pointer, generation in itertools.product(("*bf16", "*fp16", "*fp32"), GENERATIONS):
            problem = compiled(kernel, kind, pointer, generation)
            print(f"{'ok ' if problem is None else 'no '} {kind} {pointer} sm_{generation}", flush=True)
            if problem is not None:
                yield f"{kind} {pointer} sm_{generation}: {problem}"


def compiled(kernel: Any, kind: str, pointer: str, generation: int) -> str | None:
    """Compile a kernel with Triton's own assembler; None where machine code comes out."""
    from tuner.model.quantize.triton_rows import _ROWS

    constants = {"ROWS": _ROWS[kind], "BLOCK": 64}
    types = {name: "i32" for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    types |= {"codes": "*u8" if kind == "nf4" else "*i8", "scales": "*fp32", "values": "*fp32", "output": pointer}
    return problem(Launch(kernel, tuple(types.items()), tuple(constants.items()), (("num_warps", 4),)), generation)


def main() -> int:
    """Run those that were asked for."""
    parts = {"blocks": blocks, "files": files, "models": models, "compiler": compiler}
    options = asked(
        __doc__, {"parts": ([], ", ".join(parts))}, peer=ROOT / ".demo" / "peers" / "bitsandbytes",
        write=(False, "write the stored weights that the tests read, and stop"),
    )
    if options.write:
        golden(installed(options.peer), GOLDEN)
        return 0
    chosen = options.parts or list(parts)
    peer = installed(options.peer) if {"blocks", "files", "models"} & {*chosen} else None
    return judged(problem for name in chosen for problem in parts[name](peer))


if __name__ == "__main__":
    sys.exit(main())
