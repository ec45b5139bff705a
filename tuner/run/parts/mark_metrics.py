"""What was measured at each mark of a run, as a file of its own: `RUN/marks/metrics_stepN.json`."""

from collections.abc import Sequence

from tuner.run.parts.part import LaunchContext, Part, TaskNeeds
from tuner.train.tasks import Task


class MarkMetrics(Part):
    """Written on rank 0 as soon as a mark is evaluated: before its checkpoint, so that no mark is without."""

    def tasks(self, context: LaunchContext, needs: TaskNeeds) -> Sequence[Task]:
        """The one that writes them."""
        if not context.assembly.rank_info.is_main:
            return ()
        from tuner.run.tasks.mark_metrics import MarkMetricsTask

        table = context.assembly.timetable
        steps = table.evaluation.at_steps | table.keeping.at_steps
        return [MarkMetricsTask(context.run.path, context.progress, steps)]
