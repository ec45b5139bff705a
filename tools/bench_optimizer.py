"""Time and bytes of an update with compact optimizer states, against torch's fused AdamW in float32, in turns.

    python -m tools.bench_optimizer [--model DIR] [--rounds 7] [--threads N]

Parameters have the shapes of the model (SmolLM2 by default), values and gradients are drawn. In each round every way
takes one step; prints, per way, the median of its milliseconds and of its ratio to float32's in the same round, and the
bytes of state a parameter, counted. Plain torch is what is used where there is no C compiler.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tools.commands import ROOT, asked, some

WAYS: dict[str, dict[str, str]] = {
    "fp32": {}, "8bit": {"state": "8bit"}, "8bit in plain torch": {"state": "8bit"},
    "bf16 stochastic": {"rounding": "stochastic"}, "bf16 8bit stochastic": {"state": "8bit", "rounding": "stochastic"},
}


def shapes_of(model: Path) -> dict[str, tuple[int, ...]]:
    """Those of the model's parameters, by name."""
    import torch
    from transformers import AutoConfig

    from tuner.model.build import meta_model

    made = meta_model(AutoConfig.from_pretrained(model), torch.float32)
    return {name: tuple(parameter.shape) for name, parameter in made.named_parameters()}


class Way:
    """One set of parameters with its optimizer."""

    def __init__(self, name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        import torch
        from torch import nn

        from tuner.config.optimizers import AdamwOptimizer
        from tuner.train.optimizer import build_optimizer

        dtype = torch.bfloat16 if name.startswith("bf16") else torch.float32
        self.plain = "plain" in name
        self.parameters = {key: nn.Parameter(torch.randn(shape).to(dtype)) for key, shape in shapes.items()}
        section = AdamwOptimizer.model_validate({"lr": 1e-4, **WAYS[name]})
        embeddings = frozenset(key for key in shapes if "embed" in key)
        self.optimizer = build_optimizer(section, self.parameters, embeddings, embeddings)
        self.gradients = {key: torch.randn_like(parameter) * 1e-3 for key, parameter in self.parameters.items()}

    def step(self) -> float:
        """Milliseconds of a step."""
        import torch

        for key, parameter in self.parameters.items():
            parameter.grad = self.gradients[key].clone()
        with patch("tuner.train.compact_adamw._has_native", lambda: not self.plain):
            started = time.perf_counter()
            self.optimizer.step(torch.tensor(False), torch.tensor(1.5))
            taken = (time.perf_counter() - started) * 1e3
        self.optimizer.zero_grad()
        return taken

    @property
    def bytes_each(self) -> float:
        """Of state, a parameter."""
        held = sum(t.numel() * t.element_size() for t in self.optimizer.state_tensors().values())
        return held / sum(parameter.numel() for parameter in self.parameters.values())


def main() -> int:
    """Take the rounds."""
    options = asked(__doc__, model=ROOT / ".demo" / "smollm2", rounds=7, threads=int, only=some(WAYS))
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    shapes = shapes_of(options.model)
    ways = {name: Way(name, shapes) for name in dict.fromkeys(["fp32", *options.only])}
    for way in ways.values():
        way.step()
    rounds: list[dict[str, float]] = [{name: way.step() for name, way in ways.items()} for _ in range(options.rounds)]
    for name, way in ways.items():
        found: dict[str, Any] = {
            "way": name, "ms": round(statistics.median(one[name] for one in rounds), 1),
            "to_fp32": round(statistics.median(one[name] / one["fp32"] for one in rounds), 2),
            "state_bytes": round(way.bytes_each, 3),
        }
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
