"""A run in fp16: what its lines and checkpoints hold, and that it resumes at every step bit for bit."""

from pathlib import Path

from tests.fixtures.trainings import launch, lines, outcome, saved
from tuner.checkpoint.load import read_tensors
from tuner.train.loss_scale import LOSS_SCALE

STEPS = 3
KEYS = {"train__precision": "fp16", "train__duration": f"{STEPS} steps", "checkpoint__every": "never"}


def test_it_resumes_at_every_step_bit_for_bit(workplace: Path) -> None:
    launch(workplace, name="whole", **KEYS)
    for _ in range(STEPS):
        launch(workplace, "auto", name="parts", train__stop_after="1 step", **KEYS)
    whole, parts = workplace / "runs" / "whole", workplace / "runs" / "parts"
    assert outcome(whole) == outcome(parts)
    assert [line["loss_scale"] for line in lines(parts)] == [65536.0] * STEPS
    assert dict(read_tensors(saved(parts)))[LOSS_SCALE].tolist() == [65536.0, STEPS]
