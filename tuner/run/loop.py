"""The training loop: one function on one screen; what it calls is already built."""

from tuner.run.diagnose import TakenStep
from tuner.run.session import Session
from tuner.run.steplog import StepEntry
from tuner.runtime import phase
from tuner.train.prefetcher import Prefetcher
from tuner.train.step import optimizer_step


def train_loop(session: Session, feed: Prefetcher) -> bool:
    """Train to the end of the plan; true when finished, false when stopped with a checkpoint saved."""
    assembly, progress = session.assembly, session.progress
    train_state, table, settings = assembly.train_state, assembly.timetable, assembly.resolved.recipe
    total = table.plan.total_steps
    if progress.evaluation_owed or (progress.step == 0 and settings.eval.at_start):
        session.evaluate()
    stop = progress.evaluation_owed
    while progress.step < total and not stop:
        index = progress.step
        factor = table.schedule.factor(index + 1)
        phase.enter(f"step {index + 1}, data")
        with session.watch.step(index + 1):
            batches, data_s = session.meter.timed(feed.next)
            scalars = optimizer_step(train_state, index, batches, factor)
        progress.advance(batches)
        lr, epoch = train_state.optimizer.peak_lr * factor, table.plan.epoch_at(progress.step - table.data_start)
        session.log.add(StepEntry(TakenStep(index, batches), epoch, progress.tokens, lr, data_s, scalars))
        stop, save_due = session.wishes()
        if table.evaluation.due_at(progress.step) or (progress.step == total and settings.eval.at_end):
            session.evaluate()
            stop = stop or progress.evaluation_owed
        save_due = save_due or table.saving.due_at(progress.step) or session.is_kept()
        if save_due and progress.step < total and not stop:
            session.save(finished=False, last=False)
        session.refresh()
    finished = progress.step >= total and not progress.evaluation_owed
    session.log.settle()
    session.settle_save()
    if settings.checkpoint.at_end or session.is_kept() if finished else progress.saved_step != progress.step:
        session.save(finished, last=True)
    session.end()
    return finished
