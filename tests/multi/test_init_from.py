"""Weights from elsewhere: one process and two FSDP2 processes begin with the same ones and take the same steps."""

from pathlib import Path
from typing import Any

import pytest

from tests.init_from.built import LORA, write_family, write_peft
from tests.multi.parity import steps_of_two, take_steps
from tuner.runtime.dist import RankInfo


@pytest.mark.slow
@pytest.mark.multi
def test_one_process_and_two_agree(tmp_path: Path) -> None:
    base, other = write_family(tmp_path / "base"), write_family(tmp_path / "other", seed=2)
    adapter, _ = write_peft(base, tmp_path / "adapter")
    entries: dict[str, tuple[dict[str, Any], list[Any], list[int]]] = {
        "none": ({"kind": "none"}, [], [0, 0]),
        "full": ({"kind": "none"}, [str(other), {"path": str(base), "load": ["mlp"]}], [0, 0]),
        "grown": ({"kind": "none"}, [{"path": str(other), "grow": True}], [97, 99]),
        "below": (LORA, [{"path": str(other), "load": ["norm"]}, {"path": str(adapter), "adapter": "merge"}], [0, 0]),
        "kept": ({**LORA, "target_modules": ["q_proj", "down_proj"]}, [str(adapter)], [0, 0]),
    }
    wishes = [
        {"model": str(base), "adapter": section, "model_keys": {"init_from": given}, "new_ids": new_ids}
        for section, given, new_ids in entries.values()
    ]
    two = steps_of_two(wishes, tmp_path)
    first = set()
    for name, wish, there in zip(entries, wishes, two, strict=True):
        here = take_steps(wish, RankInfo())
        for a, b in zip(here["loss"] + here["grad_norm"], there["loss"] + there["grad_norm"], strict=True):
            assert abs(a - b) <= 1e-5 * abs(a), (name, here, there)
        first.add(here["loss"][0])
    assert len(first) == len(entries), "each begins with weights of its own"
