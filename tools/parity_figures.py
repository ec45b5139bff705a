"""Print how equal the equal things are: packed against alone, one process against two and against accumulation.

    python tools/parity_figures.py [--smollm2 DIR]

Prints one JSON object of largest relative differences; the tests in tests/model/test_packing.py and
tests/multi/test_parity.py hold the same figures to their bounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def packing(smollm2: str | None) -> dict[str, Any]:
    """Relative norms of the differences in logits and gradients, and of the control without isolation."""
    from tests.model import test_packing as packed
    from tests.model.tiny import TINY

    found: dict[str, Any] = {}
    for kind in TINY:
        with tempfile.TemporaryDirectory() as directory:
            found[kind] = packed.figures(packed.tiny_root(kind, Path(directory)), packed.random_ids(97), packed.LENGTHS)
    if smollm2:
        root, ids, lengths = packed.smollm2(smollm2)
        found["SmolLM2-135M"] = packed.figures(root, ids, lengths)
    return found


def processes() -> dict[str, Any]:
    """Largest relative differences over 20 fp32 steps, and at step 0 in bf16."""
    from tests.multi import test_parity as parity
    from tests.train.synthetic import write_model

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write_model(model)
        for adapter in parity.ADAPTERS:
            one = parity.steps(model, adapter, 1)
            others = {
                "2 processes": parity.steps(model, adapter, 2, micro=2),
                "4 microbatches": parity.steps(model, adapter, 1, micro=1),
            }
            for name, other in others.items():
                found[f"{adapter}, fp32, {name}"] = {
                    key: parity.largest_relative(one[key], other[key]) for key in ("loss", "grad_norm")
                }
            first = parity.steps(model, adapter, 1, precision="bf16", steps=1)
            second = parity.steps(model, adapter, 2, precision="bf16", steps=1, micro=2)
            found[f"{adapter}, bf16 step 0, 2 processes"] = {
                key: parity.largest_relative(first[key], second[key]) for key in ("loss", "grad_norm")
            }
    return found


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", help="directory that tools/build_smollm2.py made")
    options = parser.parse_args()
    print(json.dumps({"packing": packing(options.smollm2), "processes": processes()}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
