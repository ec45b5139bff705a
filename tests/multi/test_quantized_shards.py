"""Frozen codes and scales are sharded and gathered by FSDP2 as bytes, next to adapters that are trained."""

from pathlib import Path

import pytest

from tests.multi.launcher import run

WORKER = str(Path(__file__).with_name("quantized_worker.py"))


@pytest.mark.multi
def test_codes_and_scales_are_gathered_to_the_bit_and_adapters_train_as_in_one_process() -> None:
    assert run([WORKER], 2) == "all as in one process\n"
