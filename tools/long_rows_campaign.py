"""What activations on the host and tiled MLPs do for long rows: gradients, peaks, and the longest row that trains.

    python -m tools.long_rows_campaign gradients
    python -m tools.long_rows_campaign peaks [--tokens 65536]
    python -m tools.long_rows_campaign longest [--limit 16GB] [--where cpu] [--run] [--out figures.json]
    python -m tools.long_rows_campaign --limit 2GB --run          (all three)

``gradients``: full models of every tiny family, in float32, with tiles and inputs on the host at each level of
recomputing, against the plain step; fails beyond 1e-6. ``peaks``: four layers of the shape of Llama 3.1 8B, the step
traced on fake tensors as for a GPU: its tensors' peak on the device, and what is on the host. ``longest``: the longest
row of a small model, in whole 1,024 tokens, that is predicted to fit into the limit, on a card of such memory and on
this CPU; with ``--run`` the CPU's are trained, two steps each in a process whose memory is limited to that, and so is a
row longer by half, which must not fit. Tables are Markdown, on stdout.
"""

import json
import logging
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import PretrainedConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig

from tests.fixtures.packed import LENGTHS, gradient, packed_inputs, random_ids, relative
from tests.model.tiny import FAMILIES, family_config
from tools.commands import asked, done, environment, one_of, read_lines, workplace, write_lines
from tuner.config.load import load_recipe
from tuner.model import tiles
from tuner.model.blocks import apply_offload, apply_recompute
from tuner.model.build import ModelSpec, build_model
from tuner.model.root import CausalLM
from tuner.profile.devices import Device, find_device, parse_memory
from tuner.profile.predict import ERRORS, Target, predict
from tuner.profile.prediction import Prediction
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import gib

ALLOWED, STEP, MOST = 1e-6, 1024, 1 << 22
HEADER = "| | longest row | predicted peak | on the host | process (RSS) | seconds a step | half more |"
BYTES = "byte"
"""The tokenizer of UTF-8 bytes: a row of so many tokens is a text of as many letters."""
LAYERS_OF_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "num_hidden_layers": 4, "vocab_size": 128256, "max_position_embeddings": MOST,
}  # fmt: skip
SMALL = {
    "hidden_size": 128, "intermediate_size": 2048, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "num_hidden_layers": 4, "vocab_size": 512, "max_position_embeddings": MOST,
    "sliding_window": 256,
}  # fmt: skip
"""Whose time grows with the tokens and not with their square: such rows can be trained on a processor."""
RECOMPUTED = {"gradient_checkpointing": "full"}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"gradient_checkpointing": "none"}, "recomputed": RECOMPUTED,
    "+ on the host": {**RECOMPUTED, "offload_activations": True},
    "+ tiles": {**RECOMPUTED, "offload_activations": True, "tiled_mlp": True},
    "recomputed, tiles": {**RECOMPUTED, "tiled_mlp": True},
}


@dataclass(frozen=True)
class Figure:
    """Of a way: the longest row, what is predicted for it, and what was measured."""

    way: str
    tokens: int
    predicted: int
    host: int
    peak_rss: int | None = None
    seconds: float | None = None
    longer_fails: bool | None = None


def gradients() -> int:
    """Compare the gradients; exit code 1 where one is further off than allowed."""
    print("| family | level | tiles | tiles, inputs on the host |\n| --- | --- | --- | --- |")
    worst = 0.0
    with workplace() as name, patch.object(tiles, "LEAST", 8):
        for family in FAMILIES:
            expected = _gradient(family, name, "none", False, False)
            for level in ("none", "selective", "full"):
                ways = [(True, False)] + [(True, True)] * (level != "none")
                off = [relative(_gradient(family, name, level, *way), expected) for way in ways]
                print(f"| {family} | {level} | {off[0]:.1e} | {f'{off[1]:.1e}' if len(off) > 1 else ''} |", flush=True)
                worst = max(worst, *off)
    print(f"\nworst {worst:.1e}, allowed {ALLOWED:.0e}")
    return int(worst > ALLOWED)


def _gradient(family: str, directory: Path, level: Any, tiled: bool, offload: bool) -> torch.Tensor:
    family_config(family, tied=False).save_pretrained(directory)
    root = CausalLM(build_model(ModelSpec(str(directory), random_init=True), torch.float32, seed=1)).train()
    with torch.no_grad():
        for parameter in root.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(6.0)
    if tiled:
        tiles.prove_tiles(root)
        tiles.apply_tiles(root)
    if level != "none":
        apply_recompute(root, level)
    if offload:
        apply_offload(root)
    root(document_lengths=LENGTHS, **packed_inputs(random_ids(97), LENGTHS)).backward()
    return gradient(root)


def predicted(  # noqa: PLR0917 - what a case is made of
    directory: Path,
    shape: Mapping[str, int],
    train: Mapping[str, Any],
    device: Device,
    tokens: int,
    adapter: str = "none",
) -> Prediction:
    """What is predicted for training such a model, one row of so many tokens at a time."""
    _config(shape).save_pretrained(directory)
    tree = {
        "model": {"name_or_path": str(directory), "init": "random"}, "adapter": {"kind": adapter},
        "method": {"kind": "pretrain"}, "tokenizer": {"name_or_path": BYTES},
        "data": {"train": "rows.jsonl", "max_length": tokens},
        "train": {"global_batch_size": 1, "micro_batch_size": 1, "compile": False, "precision": "bf16", **train},
        "checkpoint": {"async_save": False},
    }
    target = Target(device, RankInfo(0, 1, 0, 1), device.memory_bytes)
    return predict(load_recipe(tree).recipe, target)


def _config(shape: Mapping[str, int]) -> PretrainedConfig:
    if "sliding_window" in shape:
        return MistralConfig(**shape, architectures=["MistralForCausalLM"])
    return LlamaConfig(**shape, architectures=["LlamaForCausalLM"])


def peaks(tokens: int) -> int:
    """The peaks of four large layers at a long row."""
    device = find_device("h200-141g")
    print(f"{tokens:,} tokens, 4 layers of the shape of Llama 3.1 8B, bf16, {device.shown}\n")
    print("| adapter | | tensors on the device | of them activations | on the host |\n| --- | --- | --- | --- | --- |")
    for adapter in ("lora", "none"):
        for way in ("plain", "recomputed", "+ on the host", "+ tiles"):
            with workplace() as name:
                found = predicted(name, LAYERS_OF_8B, WAYS[way], device, tokens, adapter)
            parts = found.memory.counted_peak()
            print(
                f"| {adapter} | {way} | {gib(sum(parts.values()))} | {gib(parts['activations'] + parts['other'])} "
                f"| {gib(found.host_bytes)} |", flush=True,
            )  # fmt: skip
    return 0


def longest(limit: int, where: str, run: bool, out: Path | None) -> int:
    """The longest row of each way, on a card and on this CPU; exit code 1 where a run says otherwise."""
    card = replace(find_device("rtx4080-16g"), memory_bytes=limit, shown=f"a card of {gib(limit)}", host_bytes=1 << 40)
    cpu = replace(find_device("cpu"), memory_bytes=limit)
    found: dict[str, list[Figure]] = {card.shown: [], "this CPU": []}
    with workplace() as name:
        for device, ways in ((card, ("plain", "recomputed", "+ on the host", "+ tiles")),
                             (cpu, ("plain", "recomputed", "recomputed, tiles"))):  # fmt: skip
            if where not in {"any", device.kind}:
                continue
            lines = found[card.shown if device is card else "this CPU"]
            for way in ways:
                room = int(limit / (1 + ERRORS[device.kind]))
                tokens, said = _search(partial(predicted, name, SMALL, WAYS[way], device), room)
                lines.append(Figure(way, tokens, said.peak_bytes, said.host_bytes))
                print(f"{device.shown}: {way}: {tokens:,} tokens, {gib(said.peak_bytes)}", file=sys.stderr, flush=True)
        if run:
            found["this CPU"] = [_trained(figure, limit, name) for figure in found["this CPU"]]
    for place, figures in ((place, figures) for place, figures in found.items() if figures):
        print(f"\n{place}, {gib(limit)}\n\n{HEADER}\n{' --- '.join('|' * 8)}")
        for one in figures:
            ran = ["" if one.peak_rss is None else gib(one.peak_rss), f"{one.seconds:.0f}" if one.seconds else ""]
            more = {None: "", True: "does not fit", False: "fits"}[one.longer_fails]
            cells = (one.way, f"{one.tokens:,}", gib(one.predicted), gib(one.host), *ran, more)
            print(f"| {' | '.join(cells)} |")
    if out is not None:
        made = {place: [vars(one) for one in figures] for place, figures in found.items()}
        out.write_text(json.dumps(made, indent=1))
    return int(any(one.longer_fails is False or (one.peak_rss or 0) > limit for one in found["this CPU"]))


def _search(ask: Callable[[int], Prediction], limit: int) -> tuple[int, Prediction]:
    """The most tokens, to a 64th of them in whole steps, whose predicted peak is within the limit.

    The peak of long rows is nearly a line, which is followed from the two predictions made last.
    """
    known = {size: ask(size) for size in (16 * STEP, 32 * STEP)}
    if known[16 * STEP].peak_bytes > limit:
        raise SystemExit(f"{16 * STEP} tokens need {gib(known[16 * STEP].peak_bytes)} already")
    while True:
        fits = max(size for size, one in known.items() if one.peak_bytes <= limit)
        over = min((size for size, one in known.items() if one.peak_bytes > limit), default=MOST)
        least = max(STEP, fits // 64 // STEP * STEP)
        if over - fits <= least:
            return fits, known[fits]
        (one, less), (two, more) = [(size, known[size].peak_bytes) for size in list(known)[-2:]]
        guess = two + (limit - more) * (two - one) // (more - less) // STEP * STEP
        guess = min(max(guess, fits + least), max(fits + STEP, over - least))
        known[guess] = ask(guess)


def _trained(figure: Figure, limit: int, directory: Path) -> Figure:
    """Train the row in a process with so much memory, and one that is longer by half."""
    peak, seconds, ok = _train(figure.way, figure.tokens, limit, directory)
    if not ok:
        raise SystemExit(f"{figure.way}: {figure.tokens:,} tokens were predicted to fit, and do not")
    _, _, fits = _train(figure.way, figure.tokens * 3 // 2, limit, directory)
    return replace(figure, peak_rss=peak, seconds=seconds, longer_fails=not fits)


def _train(way: str, tokens: int, limit: int, directory: Path) -> tuple[int, float, bool]:
    """Peak resident bytes, seconds a step, and whether two steps of such rows end well with so much memory."""
    base = directory / f"{way.replace(' ', '')}-{tokens}"
    _config(SMALL).save_pretrained(base)
    write_lines(base / "rows.jsonl", [{"text": "ab" * (tokens // 2 - 2)}] * 2)
    keys = {**WAYS[way], "compile": False, "precision": "bf16", "global_batch_size": 1, "micro_batch_size": 1}
    tree = {
        "output_dir": str(base / "run"), "model": {"name_or_path": str(base), "init": "random", "kernels": "native"},
        "tokenizer": {"name_or_path": BYTES}, "method": {"kind": "pretrain"},
        "data": {"train": str(base / "rows.jsonl"), "max_length": tokens, "cache_dir": str(base / "cache")},
        "train": {**keys, "duration": "2 steps"}, "checkpoint": {"every": "never", "at_end": False},
        "parallel": {"processes": 1},
    }  # fmt: skip
    recipe = base / "r.yaml"
    recipe.write_text(json.dumps(tree))
    env = environment(threads=None)
    done(["-m", "tuner", "prepare-data", str(recipe)], base, env)
    # Private memory that can be written to: what is mapped, as libraries are, does not count.
    limited = partial(resource.setrlimit, resource.RLIMIT_DATA, (limit, limit))
    ended = subprocess.run(
        [sys.executable, "-m", "tuner", "train", str(recipe)],
        env=env, cwd=base, preexec_fn=limited, capture_output=True, text=True, check=False,  # noqa: PLW1509 - one thread
    )  # fmt: skip
    if ended.returncode not in {0, 5}:
        raise SystemExit(f"{way}, {tokens:,} tokens: exit code {ended.returncode}\n{ended.stderr[-2000:]}")
    log = base / "run" / "metrics.jsonl"
    steps = [line for line in read_lines(log) if "mem_gib" in line]
    peak = int(max((line["mem_gib"] for line in steps), default=0.0) * (1 << 30))
    return peak, float(steps[-1].get("step_s", 0.0)) if steps else 0.0, ended.returncode == 0


def main() -> int:
    """Run what is asked for."""
    given = asked(
        __doc__, {"what": {"choices": ("gradients", "peaks", "longest", "all"), "nargs": "?", "default": "all"}},
        tokens=1 << 16, limit="16GB", where=one_of(("any", "cuda", "cpu"), "any"), run=False, out=Path,
    )
    logging.disable(logging.WARNING)
    parts = {
        "gradients": gradients,
        "peaks": partial(peaks, given.tokens),
        "longest": partial(longest, parse_memory("--limit", given.limit), given.where, given.run, given.out),
    }
    return max(part() for name, part in parts.items() if given.what in {name, "all"})


if __name__ == "__main__":
    raise SystemExit(main())
