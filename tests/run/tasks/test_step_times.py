"""The times of steps are the device's, on one that runs behind its host: a stand-in whose clock is virtual."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.queued_device import QueuedDevice
from tests.fixtures.trainings import launch, lines
from tuner.run.tasks import evaluate, log
from tuner.run.tasks.console import ConsoleTask
from tuner.run.tasks.save import Saver
from tuner.runtime import phase
from tuner.train import step
from tuner.train.progress import MfuMeter

EVALUATION_S, SAVE_S = 7.0, 2.0
FIRST_S = 30.0
RUN = {
    "train__duration": "7 steps",
    "data__eval": "25%",
    "eval__every": "3 steps",
    "eval__samples": "0",
    "checkpoint__every": "2 steps",
}


def queued(patch: pytest.MonkeyPatch, reads: bool = False) -> QueuedDevice:
    """Have steps, evaluations and saves take their time on a stand-in."""
    device = QueuedDevice({"forward": 0.2, "backward": 0.3, "optimizer": 0.5}, FIRST_S, reads)
    for module in (step, log):
        patch.setattr(module, "timeline_of", lambda _: device)

    def taking(work: Callable[..., Any], on_device: float, on_host: float) -> Callable[..., Any]:
        def slowly(*arguments: Any) -> Any:
            device.queue(on_device)
            device.mark().wait()
            device.host += on_host
            return work(*arguments)

        return slowly

    patch.setattr(evaluate, "evaluate", taking(evaluate.evaluate, EVALUATION_S, 0.0))
    patch.setattr(Saver, "save", taking(Saver.save, 0.0, SAVE_S))
    return device


@pytest.mark.parametrize("reads", [False, True], ids=["far-ahead", "read-in-each-step"])
def test_each_step_has_its_time_and_they_add_up_to_the_run(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """Steps before and after evaluations and saves, and the last one; work that is none of theirs lies between them."""
    device, shown, asked = queued(monkeypatch, reads), list[float](), list[float]()
    monkeypatch.setattr(MfuMeter, "mfu", lambda self, batches, seconds: asked.append(seconds))
    monkeypatch.setattr(ConsoleTask, "_left", lambda self, step: shown.append(self._time_left.seconds(step)) or "")
    with phase.observed(device.part):
        found = lines(launch(workplace, checkpoint__async_save="false", **RUN).run_dir)
    trained = [line for line in found if line["kind"] == "train"]
    took = [line["step_s"] for line in trained]
    assert took == pytest.approx(device.worked, rel=0.02) and took[0] > FIRST_S > 10 * max(took[1:])
    assert [line["eval_s"] for line in found if line["kind"] == "eval"] == pytest.approx([EVALUATION_S] * 4, rel=0.02)
    saved = 3  # after steps 2, 4 and 6; the one at the end is after the last step
    between = device.ends[-1] - device.ends[0] - 2 * EVALUATION_S - saved * SAVE_S
    assert sum(took[1:]) == pytest.approx(between, rel=0.005)
    assert asked == pytest.approx(took, abs=1e-4)  # MFU is of the same seconds
    rates = [line["tok_per_s"] * line["step_s"] for line in trained]
    ends = [line["tokens"] for line in trained]
    assert rates == pytest.approx([now - before for before, now in zip([0, *ends], ends, strict=False)], rel=0.01)
    assert device.ahead > 0.5 and shown[-1] == 0.0
