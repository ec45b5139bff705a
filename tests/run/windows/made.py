"""Tiny runs over windows of data, in this process, and what each step trained."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tuner.data.batches import StepBatches
from tuner.run.tasks import windows as task
from tuner.run.windows.finder import PreparedHere
from tuner.runtime.console import Console

RECIPE = """\
model: {name_or_path: ./model}
tokenizer: {name_or_path: byte}
adapter: {kind: lora, r: 4, dropout: 0.2}
data:
  train: 'logs/{window}.jsonl'
  max_length: 64
  packing: false
  windows: {names: [a, b, c], wait: never}
train: {global_batch_size: 4, micro_batch_size: 2, precision: fp32, device: cpu}
optimizer: {lr: 1e-3}
schedule: {kind: constant, warmup: 3 steps}
checkpoint: {every: 2 steps, keep: 9}
logging: {level: warning}
"""
ROWS = {"a": 8, "b": 12, "c": 8}
"""Rows of each window: whole global batches of 4."""


def prepare(directory: Path) -> None:
    """Write a tiny model, the rows of each window, and the recipe."""
    trainings.prepare(directory, 1, layers=1)
    (directory / "r.yaml").write_text(RECIPE)
    (directory / "logs").mkdir()
    for name, count in ROWS.items():
        write(directory, name, count)


def write(directory: Path, name: str, count: int) -> None:
    """The rows of a window: each says which one it is."""
    rng = random.Random(name)
    rows = [{"prompt": f"{name}{i} ", "completion": "ab" * rng.randint(1, 20)} for i in range(count)]
    (directory / "logs" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def entries(run: Path) -> list[dict[str, Any]]:
    """The windows of a run."""
    found: list[dict[str, Any]] = json.loads((run / "windows.json").read_text())["windows"]
    return found


class Trained:
    """What each step trained, by its number in the run's life: a step that is taken again counts as it was last."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from tuner.train import loop

        self.steps: dict[int, list[str]] = {}
        real = loop.optimizer_step

        def noting(state: Any, index: int, batches: StepBatches, factor: float) -> Any:
            self.steps[index] = [text for batch in batches.micro for text in _texts(batch)]
            return real(state, index, batches, factor)

        patch.setattr(loop, "optimizer_step", noting)

    @property
    def documents(self) -> Counter[str]:
        """How often each document was trained."""
        return Counter(text for texts in self.steps.values() for text in texts)


def _texts(batch: Any) -> list[str]:
    """The prompts of a batch, as the byte tokenizer has them."""
    texts, start = [], 0
    for length in batch.lengths:
        ids = [i for i in batch.input_ids[start : start + length].tolist() if i < 256]
        texts.append(bytes(ids).decode(errors="replace"))
        start += length
    return texts


def prepare_at_once(patch: pytest.MonkeyPatch) -> None:
    """Prepare windows in this process: a process for each takes a second."""

    def here(context: Any, windows: Any) -> Any:
        preparation = PreparedHere(windows.spec, Console(main=False))
        position, run = windows.position, context.run
        known = position.entries[position.number + 1 :]
        note = lambda entries: task.write_windows(run.path, entries)  # noqa: E731
        passes = task.PortionPlans(context.assembly.resolved).passes
        return task.Finder(windows.spec, preparation, position.decided, known, note, passes=passes)

    patch.setattr(task, "_finder", here)
