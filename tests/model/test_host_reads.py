"""Forward and backward of a microbatch read nothing back from the device."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.fixtures.packed import LENGTHS, packed_inputs, random_ids, tiny_root
from tests.model.tiny import TINY

READS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("llama", "gpt2", "gemma3") else pytest.mark.slow) for kind in TINY]
)
def test_a_microbatch_reads_nothing_back(kind: str, tmp_path: Path) -> None:
    root, inputs = tiny_root(kind, tmp_path), packed_inputs(random_ids(97), LENGTHS)
    root.train()
    for watched in (nullcontext(), profile(activities=[ProfilerActivity.CPU])):
        with watched as seen, torch.autocast("cpu", dtype=torch.bfloat16):
            root(document_lengths=LENGTHS, **inputs).backward()  # the first time makes the masks of this layout
    assert seen is not None
    names = {event.key for event in seen.key_averages()}
    assert "aten::mm" in names or "aten::addmm" in names
    assert not names & READS
