"""Times and rates of a run, and its table on the console."""

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tuner.data.batches import StepBatches
from tuner.runtime.console import Console, clock
from tuner.train.mfu import MfuMeter

T = TypeVar("T")
HEADER = f"{'step':>6} {'loss':>8} {'eval':>8} {'grad':>8} {'lr':>10} {'tok/s':>9} {'mfu':>6} {'wait':>6} {'left':>8}"



@dataclass
class Meter:
    """Measures steps and prints a line whenever ``refresh_s`` seconds have passed."""

    refresh_s: float
    device: torch.device
    total_steps: int
    effort: MfuMeter
    on_progress: Callable[[int, str], None] = lambda step, note: None
    _last_step: float = 0.0
    _last_shown: float = 0.0
    _mean_step_s: float = 0.0
    _line: dict[str, Any] | None = None
    _shown_step: int = 0
    _header_shown: bool = False

    def begin(self) -> None:
        """Start the clock, before the first step of a launch."""
        self._last_step = self._last_shown = time.monotonic()

    def timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """Run ``work``; its result, and the seconds that it took."""
        started = time.monotonic()
        result = work()
        return result, time.monotonic() - started

    def step_line(self, facts: Mapping[str, Any], batches: StepBatches, data_s: float) -> dict[str, Any]:
        """One line of metrics.jsonl: what is determined by the recipe (``facts``) first, what the clock says last.

        ``data_wait`` is the share of the step spent waiting for its batches, ``mfu`` this process's device's,
        left out where the model's arithmetic is not known.
        """
        now = time.monotonic()
        step_s, self._last_step = now - self._last_step, now
        self._mean_step_s = step_s if self._mean_step_s == 0 else 0.9 * self._mean_step_s + 0.1 * step_s
        mfu = self.effort.mfu(batches.micro, step_s)
        self._line = {
            **facts,
            "step_s": round(step_s, 4),
            "data_s": round(data_s, 4),
            "tok_per_s": round(batches.tokens / step_s, 1),
            "trained_per_s": round(batches.trained_count / step_s, 1),
            "mem_gib": round(peak_memory_bytes(self.device) / 2**30, 3),
            "data_wait": round(data_s / step_s, 4),
            **({} if mfu is None else {"mfu": round(mfu, 4)}),
        }
        return self._line

    def leave_out(self, seconds: float) -> None:
        """Do not count the last ``seconds`` as part of the next step."""
        self._last_step += seconds

    def evaluated(self, console: Console, step: int, losses: Mapping[str, float], seconds: float) -> None:
        """Print an evaluation, below it the losses of its sources, and leave its time out of the step's."""
        self.leave_out(seconds)
        self._show_header(console)
        for name, loss in losses.items():
            source = name.partition("/")[2]
            none = "".join(f" {'-':>{width}}" for width in (8, 10, 9, 6, 6, 8))
            at, rest = ("", f" {source}") if source else (step, none)
            console.line(f"{at:>6} {'' if source else '-':>8} {loss:>8.4f}{rest}")

    def refresh_due(self) -> bool:
        """Whether it is time to print and write what is buffered."""
        return time.monotonic() - self._last_shown >= self.refresh_s

    def show(self, console: Console) -> None:
        """Print the newest step, unless it was printed before."""
        self._last_shown = time.monotonic()
        if self._line is None or self._line["step"] == self._shown_step:
            return
        self._shown_step = self._line["step"]
        self._show_header(console)
        line = self._line
        remaining = clock((self.total_steps - line["step"]) * self._mean_step_s)
        loss, norm = _shown(line["loss"], 4), _shown(line["grad_norm"], 3)
        mfu = f"{line['mfu']:.1%}" if "mfu" in line else "-"
        console.line(
            f"{line['step']:>6} {loss:>8} {'':>8} {norm:>8} {line['lr']:>10.2e} "
            f"{line['tok_per_s']:>9,.0f} {mfu:>6} {line['data_wait']:>6.1%} {remaining:>8}"
        )
        self.on_progress(line["step"], f"loss {loss}  {line['tok_per_s']:,.0f} tok/s")

    def _show_header(self, console: Console) -> None:
        if not self._header_shown:
            console.line(HEADER)
            self._header_shown = True


def _shown(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of allocated device memory, or of the process's resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
