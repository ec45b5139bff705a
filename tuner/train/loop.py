"""The training loop: one function on one screen; what it calls is already built."""

from collections.abc import Sequence

from tuner.config.numbers import StepRange, is_among
from tuner.train.plan import Schedule
from tuner.train.prefetcher import BatchSource
from tuner.train.progress import Progress
from tuner.train.step import TrainState, optimizer_step, skip_step
from tuner.train.tasks import TakenStep, Tasks


def train_loop(
    state: TrainState, progress: Progress, source: BatchSource, schedule: Schedule, tasks: Tasks,
    to_skip: Sequence[StepRange] = (),
) -> bool:
    """Step until the plan ends or a task asks to stop; whether the run is finished. What is
    not finished is saved by the tasks before this returns.

    Every rank runs it alike. What is not the mathematics of a step is a task. Steps ``to_skip`` are counted, with their
    rows and their place in the schedule, and nothing is computed of them.
    """
    tasks.start()
    while not progress.is_over and not tasks.stopping:
        index = progress.step
        factor = schedule.factor(index + 1)  # factor(1) is the first update's: a warm-up never starts at 0
        with tasks.around_step(index + 1):  # profilers and memory records: the step, its wait for data included
            batches = source.step(index)
            is_skipped = is_among(index + 1, to_skip)
            scalars = skip_step(state) if is_skipped else optimizer_step(state, index, batches, factor)
        # Before the tasks: a checkpoint that one of them saves is of a run that has taken this step.
        progress.advance(batches)
        lr = state.optimizer.peak_lr * factor
        tasks.after_step(
            TakenStep(index, batches, progress.epoch, progress.tokens, lr, source.waited_s, scalars, is_skipped)
        )
    # The save task saves here what was asked to stop, or is at its end, unless the recipe wants no last checkpoint.
    tasks.finish(progress.is_finished)
    return progress.is_finished
