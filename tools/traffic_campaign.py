"""What sharding makes a GPU move in a micro-batch, counted on tensors without memory: a table of Markdown.

    python -m tools.traffic_campaign [--only 8b] [--tree ../other] [--out figures.json]

The step of a model of 8 B weights on 8 GPUs, and of 70 B on 32, is traced as the predictor traces it; every collective,
and every copy and conversion that sharding takes, is counted on the way. ``--tree`` counts in the package of another
tree, by this tree's counter: before and after a change. Seconds are bytes over rates that an H100 reaches: 2.8 TB/s of
its memory, 330 GB/s from GPUs of its machine and 40 GB/s over the network, 620 TFLOP/s in products; collectives are
exposed where they last longer than the computing of their pass.
"""

import importlib.util
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tools.commands import ROOT, asked, some, workplace

HBM, LINK, NETWORK, PRODUCTS = 2.8e12, 330e9, 40e9, 620e12
GIB = 1 << 30
SHAPE = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Case:
    """A model, its processes, and keys of the recipe."""

    name: str
    shape: dict[str, int]
    processes: tuple[int, int]
    train: dict[str, Any]
    parallel: dict[str, Any]


CASES = (
    Case(
        "8b",
        {
            "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32,
        },
        (8, 8), {"global_batch_size": 16, "micro_batch_size": 1, "gradient_checkpointing": "none"}, {},
    ),
    Case(
        "70b",
        {
            "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
        (32, 8), {"global_batch_size": 64, "micro_batch_size": 1, "gradient_checkpointing": "full"}, {"shard": "full"},
    ),
)  # fmt: skip


def counter_of(shapes: set[Any], local_size: int) -> Any:
    """A counter of this tree: another may have none."""
    spec = importlib.util.spec_from_file_location("traffic_counter", ROOT / "tuner" / "profile" / "traffic.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TrafficCounter(shapes, local_size)


def count(case: Case, rows: int) -> dict[str, Any]:
    """The traffic of each traced micro-batch, the whole step's FLOPs and the predicted peak of one process."""
    from transformers.models.qwen3 import Qwen3Config

    from tuner.config.load import load_recipe
    from tuner.profile import predict as predicting
    from tuner.profile import tracing
    from tuner.profile.devices import find_device
    from tuner.runtime import phase
    from tuner.runtime.dist import RankInfo
    from tuner.runtime.torch_private import TorchDispatchMode
    from tuner.train.step import optimizer_step

    counters: list[Any] = []

    class Watched(TorchDispatchMode):  # type: ignore[misc]  # its type is not known
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            counters[-1].count(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    def step(state: Any, *rest: Any) -> Any:
        shapes = {shape for p in state.root.parameters() for shape in (p.shape, getattr(p, "_local_tensor", p).shape)}
        counters.append(counter_of(shapes, case.processes[1]))
        with phase.observed(counters[-1].begin), Watched():
            return optimizer_step(state, *rest)

    with workplace() as directory:
        Qwen3Config(**case.shape, **SHAPE, architectures=["Qwen3ForCausalLM"]).save_pretrained(directory)
        tree = {
            "model": {"name_or_path": str(directory), "init": "random"}, "tokenizer": {"name_or_path": "byte"},
            "data": {"train": f"{directory}/rows.jsonl", "max_length": rows}, "method": {"kind": "pretrain"},
            "train": {"device": "cuda", "precision": "bf16", **case.train}, "parallel": case.parallel,
        }
        recipe, card = load_recipe(tree).recipe, find_device("h100-80g")
        world, local = case.processes
        with patch.object(tracing, "optimizer_step", step):
            found = predicting.predict(recipe, predicting.Target(card, RankInfo(0, world, 0, local), card.memory_bytes))
    n_micro = max(1, recipe.train.global_batch_size // (recipe.train.micro_batch_size * world))
    return {
        "name": case.name, "micro": [asdict(one) for one in counters[0].micro], "n_micro": n_micro,
        "flops": sum(found.time.flops.values()) / n_micro / world, "peak_bytes": found.peak_bytes,
    }


def mean(figures: dict[str, Any]) -> dict[str, float]:
    """Of a micro-batch: all are like the first but the last."""
    first, last, n = figures["micro"][0], figures["micro"][-1], figures["n_micro"]
    return {key: (first[key] * (n - 1) + last[key]) / n for key in first}


def shares(figures: dict[str, Any]) -> dict[str, float]:
    """Estimated shares of a micro-batch's time."""
    moved = mean(figures)
    computing = figures["flops"] / PRODUCTS
    near = moved["gathered"] + moved["reduced"] - moved["far"]
    parts = {"casts": moved["converted"] / HBM, "copies": moved["copied"] / HBM}
    parts["exposed"] = max(0.0, near / LINK + moved["far"] / NETWORK - computing)
    whole = computing + sum(parts.values())
    return {name: seconds / whole for name, seconds in parts.items()}


def row(figures: dict[str, Any]) -> str:
    """A line of the table."""
    moved, share = mean(figures), shares(figures)
    cells = [figures["name"], *(f"{moved[key] / GIB:.2f}" for key in ("gathered", "reduced", "copied", "converted"))]
    cells += [f"{share[key]:.1%}" for key in ("casts", "copies", "exposed")]
    cells.append(f"{figures['peak_bytes'] / GIB:.1f}")
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Count, and print the table."""
    options = asked(
        __doc__, only=some([case.name for case in CASES], [c.name for c in CASES]), rows=(4096, "tokens of a row"),
        tree=(ROOT, "whose package is counted"), out=(Path, "where the figures go, as JSON"),
    )
    sys.path.insert(0, str(options.tree.resolve()))
    logging.disable(logging.WARNING)
    print("| model | gathered, GiB | reduced | copied | converted | casts | copies | exposed | peak, GiB |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    found = []
    for case in CASES:
        if case.name in options.only:
            found.append(count(case, options.rows))
            print(row(found[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
