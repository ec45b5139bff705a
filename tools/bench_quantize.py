"""What a quantised weight costs on this processor: dequantising it, and products with it against plain ones in turns.

    python tools/bench_quantize.py [--rows 2048] [--shapes 1536x576 576x1536 ...] [--repeats 9]

Shapes are those of weights, out x in; defaults are SmolLM2-135M's. Each line is the median over the repeats, in which
both ways take turns; `plain` is torch's linear layer in bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn import functional

from tuner.model.quantize.codes import Kind, quantize
from tuner.model.quantize.product import quantized_linear
from tuner.model.quantize.rows import fill

SHAPES = ("1536x576", "576x1536", "576x576", "192x576")
KINDS: tuple[Kind, Kind] = ("nf4", "int8")


def medians(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds that each way takes: the median of turns, in each of which a way runs for about 50 ms."""
    counts = {}
    for name, way in ways.items():
        way()
        started = time.perf_counter()
        way()
        counts[name] = max(1, int(0.05 / (time.perf_counter() - started)))
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            started = time.perf_counter()
            for _ in range(counts[name]):
                way()
            taken[name].append((time.perf_counter() - started) / counts[name])
    return {name: statistics.median(each) for name, each in taken.items()}


def bench_rows(rows: int, columns: int, repeats: int) -> None:
    """How fast weights are made of codes, and codes of weights."""
    weight = torch.randn(rows, columns).bfloat16()
    for kind in KINDS:
        made = quantize(weight, kind)
        ways: dict[str, Callable[[], object]] = {}
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
            output = torch.empty(rows, columns, dtype=dtype)
            for way, native in (("C", True), ("torch", False)):
                ways[f"{name} {way}"] = partial(fill, output, made.codes, made.scales, native)
        copied = torch.empty_like(weight)
        ways["copy bfloat16"] = partial(copied.copy_, weight)
        for way, native in (("C", True), ("torch", False)):
            ways[f"quantise {way}"] = lambda kind=kind, native=native: quantize(weight, kind, native=native)
        for name, seconds in medians(ways, repeats).items():
            size = 4 if "float32" in name else 2
            print(f"{kind:4} {name:15} {weight.numel() * size / seconds / 1e9:7.2f} GB/s of weight", flush=True)


def bench_products(rows: int, shape: str, repeats: int) -> None:
    """Forward, and forward with backward, against the plain layer."""
    out, columns = (int(size) for size in shape.split("x"))
    source = torch.randn(rows, columns).bfloat16().requires_grad_()
    weight = (torch.randn(out, columns) / columns**0.5).bfloat16()
    upstream = torch.randn(rows, out).bfloat16()
    forwards: dict[str, Callable[[], torch.Tensor]] = {"plain": lambda: functional.linear(source, weight)}
    for kind in KINDS:
        made = quantize(weight, kind)
        forwards[kind] = lambda made=made: quantized_linear(source, made.codes, made.scales, None, True)
    ways: dict[str, Callable[[], object]] = {f"{name} forward": way for name, way in forwards.items()}
    ways |= {
        f"{name} both": lambda way=way: torch.autograd.grad(way(), source, upstream) for name, way in forwards.items()
    }
    found = medians(ways, repeats)
    for part in ("forward", "both"):
        plain = found[f"plain {part}"]
        line = ", ".join(f"{kind} {found[f'{kind} {part}'] / plain:.3f}x" for kind in KINDS)
        print(f"{shape:10} {rows} rows {part:8} plain {plain * 1e3:8.3f} ms, {line}", flush=True)


def main() -> None:
    """Time what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="OUTxIN")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    print(f"{torch.get_num_threads()} threads")
    bench_rows(4096, 4096, options.repeats)
    for shape in options.shapes:
        bench_products(options.rows, shape, options.repeats)


if __name__ == "__main__":
    main()
