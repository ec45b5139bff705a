"""What packing is worth where it takes more than flat attention: steps a second, packed and one document at a time.

    python tools/bench_routes.py [--only mamba qwen3_next] [--rounds 5] [--tokens 1024] [--device cuda] [--out FILE]

Of each type a small model with random weights is built as `tuner train` builds it, and one step (forward and backward
of the same documents) is timed by turns: ``packed`` as one row, ``single`` as one document to a micro-batch. Documents
are drawn log-normally, median 100 tokens, until they are ``--tokens``. Losses of both are compared first, and the
program fails where they differ by more than 1e-4: two ways that compute different things are not timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.causal_cases import VOCAB, tiny_config  # noqa: E402
from tuner.model import attention  # noqa: E402
from tuner.model.root import CausalLM  # noqa: E402
from tuner.model.transformers_private import takes_our_attention  # noqa: E402

TYPES = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe",
    "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya",
)  # fmt: skip
ALLOWED = 1e-4


def small_model(model_type: str) -> PreTrainedModel:
    """A model of the type with our attention where its class takes it."""
    config = tiny_config(model_type)
    attention.register()
    torch.manual_seed(1)
    chosen = {"attn_implementation": attention.PACKED} if takes_our_attention(config) else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **chosen)
    return model


def document_lengths(tokens: int) -> list[int]:
    """Lengths that sum up to ``tokens``."""
    generator, lengths = np.random.default_rng(3), list[int]()
    while sum(lengths) < tokens:
        drawn = int(generator.lognormal(np.log(100), 1.0))
        lengths.append(min(max(drawn, 2), tokens - sum(lengths)))
    return lengths


def step(root: CausalLM, rows: Sequence[Sequence[torch.Tensor]]) -> float:
    """Forward and backward of rows of documents; the loss is their sum."""
    total = 0.0
    for documents in rows:
        ids, lengths = torch.cat(list(documents)), tuple(map(len, documents))
        positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
        loss = root(ids, positions, lengths, torch.arange(len(ids) - 1, device=ids.device), ids[1:])
        loss.backward()
        total += loss.item()
    return total


def loss_of_each_document(root: CausalLM, rows: Sequence[Sequence[torch.Tensor]]) -> float:
    """The sum over all documents, each from its first token on; what the two ways are compared by."""
    total = 0.0
    for documents in rows:
        ids, lengths = torch.cat(list(documents)), tuple(map(len, documents))
        positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
        starts = np.cumsum([0, *lengths[:-1]])
        inside = torch.tensor(np.setdiff1d(np.arange(len(ids)), np.array(starts)), device=ids.device)
        total += float(root.losses(ids, positions, lengths, inside - 1, ids[inside]).double().sum())
    return total


def timed(act: Callable[[], object], device: torch.device) -> float:
    """Seconds that a call takes, its device included."""
    started = time.perf_counter()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(model_type: str, tokens: int, rounds: int, device: torch.device) -> dict[str, object]:
    """Steps a second of both ways, by turns; medians."""
    root = CausalLM(small_model(model_type)).to(device)
    lengths = document_lengths(tokens)
    generator = torch.Generator().manual_seed(4)
    documents = [torch.randint(3, VOCAB, (length,), generator=generator).to(device) for length in lengths]
    ways = {"packed": [documents], "single": [[document] for document in documents]}
    losses = {name: loss_of_each_document(root.train(False), rows) for name, rows in ways.items()}
    off = abs(losses["packed"] - losses["single"]) / losses["single"]
    if not off <= ALLOWED:
        raise ValueError(f"{model_type}: packed and single differ by {off:.1e}")
    root.train()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, rows in ways.items():
            took = timed(lambda rows=rows: step(root, rows), device)  # type: ignore[misc]
            if turn:  # the first one warms up
                seconds[name].append(took)
    found: dict[str, object] = {name: 1 / statistics.median(each) for name, each in seconds.items()}
    return {"type": model_type, "documents": len(lengths), "tokens": tokens, **found, "off": off}


def main() -> int:
    """Print a line of JSON for each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="these types alone")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is timed")
    parser.add_argument("--tokens", type=int, default=1024, help="of all documents together")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    options = parser.parse_args()
    device = torch.device(options.device)
    figures = []
    for model_type in options.only or TYPES:
        figures.append(measure(model_type, options.tokens, options.rounds, device))
        print(json.dumps(figures[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
