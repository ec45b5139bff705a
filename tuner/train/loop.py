"""The training loop: one function on one screen; what it calls is already built."""

from tuner.train.prefetcher import Prefetcher
from tuner.train.progress import Progress
from tuner.train.schedule import Schedule
from tuner.train.step import TrainState, optimizer_step
from tuner.train.tasks import TakenStep, Tasks


def train_loop(state: TrainState, progress: Progress, batches: Prefetcher, schedule: Schedule, tasks: Tasks) -> bool:
    """Step until the plan ends or a task asks to stop; true when finished, false when stopped with a checkpoint.

    Every rank runs it alike. What is not the mathematics of a step is a task.
    """
    tasks.start()
    while not progress.is_over and not tasks.stopping:
        index = progress.step
        factor = schedule.factor(index + 1)
        with tasks.around_step(index + 1):
            of_step = batches.next()
            scalars = optimizer_step(state, index, of_step, factor)
        progress.advance(of_step)
        lr = state.optimizer.peak_lr * factor
        tasks.after_step(TakenStep(index, of_step, progress.epoch, progress.tokens, lr, batches.waited_s, scalars))
    tasks.finish(progress.is_finished)
    return progress.is_finished
