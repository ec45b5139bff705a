"""What `auto` becomes for real models on real cards: the recipe with defaults, its model's shape, no weights.

    python -m tools.auto_campaign [--only NAME ...]

Each case leaves micro-batch, recomputing and sharding open, as the default recipe does, and is settled by prediction as
a training on that device would settle it. Prints the values, the predicted peak and the reasons, and how many settings
were predicted in how many seconds; exits with 1 where a case is not predicted to fit, or its values are not what the
case demands.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tools.commands import asked, some, workplace
from tuner.config.load import LoadedRecipe, load_recipe
from tuner.setup.settled import LEVEL, MICRO, SHARD

QWEN3: dict[str, Any] = {
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}  # fmt: skip
"""By what differs from Qwen3's other sizes; the largest has that of Llama 70B."""


@dataclass(frozen=True)
class Case:
    """A model on devices, and what must hold of the values that it gets."""

    name: str
    model: str
    device: str
    processes: str = "1"
    sections: Mapping[str, Any] = field(default_factory=dict)
    holds: Callable[[Mapping[str, Any]], bool] = lambda values: True


LORA = {"adapter": {"kind": "lora"}}
CASES = (
    Case("8b-lora-24g", "8B", "rtx4090-24g", sections=LORA),
    Case("8b-lora-2x24g", "8B", "rtx4090-24g", "2", LORA, lambda values: values[SHARD] == "none"),
    Case("0.6b-24g", "0.6B", "rtx4090-24g", holds=lambda values: values[MICRO] > 1 and values[LEVEL] == "none"),
    Case("0.6b-80g", "0.6B", "h100-80g", holds=lambda values: values[MICRO] > 1 and values[LEVEL] == "none"),
    Case("8b-8x80g", "8B", "h100-80g", "8", {"data": {"max_length": 4096}}, lambda values: values[SHARD] == "full"),
    Case("70b-4x8x80g", "70B", "h100-80g", "4x8", holds=lambda values: values[SHARD] == "full"),
)


def loaded(case: Case, place: Path) -> LoadedRecipe:
    """The default recipe of a case, with a model's config in place of a model."""
    from transformers import AutoConfig

    directory = place / case.model
    if not directory.is_dir():
        AutoConfig.for_model("qwen3", **{**QWEN3, **SHAPES[case.model]}).save_pretrained(directory)
    data = {"train": str(place / "rows.jsonl"), **case.sections.get("data", {})}
    model = {"name_or_path": str(directory), "init": "random"}
    return load_recipe({"model": model, "tokenizer": {"name_or_path": "byte"}, **case.sections, "data": data})


def settle(case: Case, place: Path) -> bool:
    """Settle a case and print what came out; whether it fits and holds."""
    from tuner.profile import search
    from tuner.profile.choose import choose
    from tuner.profile.devices import find_device, parse_processes
    from tuner.profile.predict import Target, predict_by_layers
    from tuner.runtime.dist import RankInfo
    from tuner.runtime.files import gib
    from tuner.setup.settled import with_whole_batches

    machines, each = parse_processes(case.processes)
    device, ranks = find_device(case.device), RankInfo(0, machines * each, 0, each)
    predicted = [0]

    def counted(*given: Any) -> Any:
        predicted[0] += 1
        return predict_by_layers(*given)

    started = time.monotonic()
    with patch.object(search, "predict_by_layers", counted):
        recipe = with_whole_batches(loaded(case, place), ranks.world_size).recipe
        settled, found = choose(recipe, Target(device, ranks, device.memory_bytes))
    seconds, good = time.monotonic() - started, found.verdict == "fits" and case.holds(settled.values)
    values = ", ".join(f"{key} {value}" for key, value in settled.values.items())
    ended = "ok" if good else "FAILED"
    print(f"{case.name:14} {ended:7} {gib(found.peak_bytes)} of {gib(found.limit_bytes)}, {values}")
    for key, reason in settled.reasons.items():
        print(f"{'':22} {key}: {reason}")
    print(f"{'':22} {predicted[0]} settings predicted in {seconds:.1f} s", flush=True)
    return good


def main() -> int:
    """Settle those that were asked for."""
    names = [case.name for case in CASES]
    chosen = asked(__doc__, only=some(names)).only
    with workplace() as directory:
        good = [settle(case, directory) for case in CASES if case.name in chosen]
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
