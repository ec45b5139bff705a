"""Print how equal the equal things are: packed against alone, one process against two and against accumulation.

    python -m tools.parity_figures [--smollm2 DIR]

Prints one JSON object of largest relative differences; the tests in tests/model/test_packing.py and
tests/multi/test_parity.py hold the same figures to their bounds.
"""

import json
from typing import Any

from tools.commands import ROOT, parser_of, workplace

TRAINED = [1, 29, 3, 15, 30, 7, 5, 2, 9, 24, 20, 7, 25, 2, 18, 11]
"""Trained tokens of each row."""


def packing(smollm2: str | None) -> dict[str, Any]:
    """Relative norms of the differences in logits and gradients, and of the control without isolation."""
    from tests.fixtures import packed
    from tests.model.tiny import TINY

    found: dict[str, Any] = {}
    for kind in TINY:
        with workplace() as directory:
            found[kind] = packed.figures(packed.tiny_root(kind, directory), packed.random_ids(97), packed.LENGTHS)
    if smollm2:
        root, ids, lengths = packed.smollm2(smollm2)
        found["SmolLM2-135M"] = packed.figures(root, ids, lengths)
    return found


def processes() -> dict[str, Any]:
    """Largest relative differences over 20 fp32 steps, and at step 0 in bf16."""
    from tests.train.synthetic import write_model

    found: dict[str, Any] = {}
    with workplace() as model:
        write_model(model)
        for name, adapter in {"full": {"kind": "none"}, "lora": {"kind": "lora", "r": 4}}.items():
            wish = {"model": str(model), "adapter": adapter, "trained": TRAINED, "global": 8, "micro": 8}
            wish |= {"precision": "fp32", "steps": 20}
            one = taken(wish, 1)
            found[f"{name}, fp32, 2 processes"] = differences(one, taken({**wish, "micro": 4}, 2))
            found[f"{name}, fp32, 4 microbatches"] = differences(one, taken({**wish, "micro": 2}, 1))
            first = {**wish, "precision": "bf16", "steps": 1}
            found[f"{name}, bf16 step 0, 2 processes"] = differences(taken(first, 1), taken({**first, "micro": 4}, 2))
    return found


def taken(wish: dict[str, Any], world_size: int) -> dict[str, list[float]]:
    """Losses and gradient norms of a wish's steps on so many processes."""
    from tests.multi.launcher import run

    worker = str(ROOT / "tests/multi/parity_worker.py")
    steps: dict[str, list[float]] = json.loads(run([worker, json.dumps(wish)], world_size))
    return steps


def differences(one: dict[str, list[float]], other: dict[str, list[float]]) -> dict[str, float]:
    """The largest relative difference of each figure."""
    return {
        key: max(abs(a - b) / abs(b) for a, b in zip(one[key], other[key], strict=True))
        for key in ("loss", "grad_norm")
    }


def main() -> int:
    """Print the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--smollm2", help="directory that tools/build_smollm2.py made")
    options = parser.parse_args()
    print(json.dumps({"packing": packing(options.smollm2), "processes": processes()}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
