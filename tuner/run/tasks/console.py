"""The task that shows a run to the person at the terminal."""

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from tuner.rundir.records import Records
from tuner.runtime.console import Console, ProgressBar, clock
from tuner.train.tasks import Event, Request, Task

HEADER = f"{'step':>6} {'loss':>8} {'eval':>8} {'grad':>8} {'lr':>10} {'tok/s':>9} {'mfu':>6} {'wait':>6} {'left':>8}"


class ConsoleTask(Task):
    """Prints a line of the newest step, and writes the records so far, whenever ``refresh_s`` seconds have passed."""

    def __init__(self, console: Console, records: Records, refresh_s: float, total_steps: int) -> None:
        self._console, self._records, self._refresh_s = console, records, refresh_s
        self._total_steps = total_steps
        self._open = ExitStack()
        self._bar: ProgressBar | None = None
        self._last_shown = time.monotonic()
        self._mean_step_s = 0.0
        self._line: Mapping[str, Any] | None = None
        self._shown_step = 0
        self._header_shown = False

    def start(self) -> Iterable[Event]:
        """Show the bar and start the clock."""
        self._bar = self._open.enter_context(self._console.progress("train", self._total_steps))
        self._last_shown = time.monotonic()
        return ()

    def notify(self, event: Event) -> None:
        """Keep the newest step; print an evaluation."""
        if event.stage == "evaluation":
            self._show_evaluation(event)
        elif event.stage == "step":
            self._line, step_s = event.metrics, event.metrics["step_s"]
            self._mean_step_s = step_s if self._mean_step_s == 0 else 0.9 * self._mean_step_s + 0.1 * step_s

    def between_steps(self, agreed: Request) -> Iterable[Event]:
        """Print and write where it is time."""
        if time.monotonic() - self._last_shown >= self._refresh_s:
            self._show()
            self._records.flush()
        return ()

    def finish(self, finished: bool) -> Iterable[Event]:
        """Print and write what is left."""
        self._show()
        self._records.flush()
        self._records.sync()
        self._open.close()
        return ()

    def close(self) -> Iterable[Event]:
        """Write what is left."""
        self._open.close()
        self._records.flush()
        return ()

    def _show(self) -> None:
        """Print the newest step, unless it was printed before."""
        self._last_shown = time.monotonic()
        line = self._line
        if line is None or line["step"] == self._shown_step:
            return
        self._shown_step = line["step"]
        self._show_header()
        remaining = clock((self._total_steps - line["step"]) * self._mean_step_s)
        loss, norm = _shown(line["loss"], 4), _shown(line["grad_norm"], 3)
        mfu = f"{line['mfu']:.1%}" if "mfu" in line else "-"
        self._console.line(
            f"{line['step']:>6} {loss:>8} {'':>8} {norm:>8} {line['lr']:>10.2e} "
            f"{line['tok_per_s']:>9,.0f} {mfu:>6} {line['data_wait']:>6.1%} {remaining:>8}"
        )
        if self._bar is not None:
            self._bar.update(line["step"], f"loss {loss}  {line['tok_per_s']:,.0f} tok/s")

    def _show_evaluation(self, event: Event) -> None:
        """Print an evaluation, below it the losses of its sources."""
        self._show_header()
        for name, loss in event.metrics.items():
            kind, _, source = name.partition("/")
            if kind != "loss":
                continue
            none = "".join(f" {'-':>{width}}" for width in (8, 10, 9, 6, 6, 8))
            at, rest = ("", f" {source}") if source else (event.step, none)
            self._console.line(f"{at:>6} {'' if source else '-':>8} {_shown(loss, 4):>8}{rest}")

    def _show_header(self) -> None:
        if not self._header_shown:
            self._console.line(HEADER)
            self._header_shown = True


def _shown(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"
