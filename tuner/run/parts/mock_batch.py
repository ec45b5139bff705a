"""A step on rows of the largest size before the first one that counts (`train.mock_batch`)."""

from tuner.run.parts.part import LaunchContext, Part
from tuner.setup.resolve import takes_mock_batch
from tuner.train.tasks import Tasks


class MockBatch(Part):
    """A run that would not fit ends before its first step."""

    def before_steps(self, context: LaunchContext, tasks: Tasks) -> None:
        """Take the step, and leave everything as it was. Collective."""
        if takes_mock_batch(context.assembly.resolved):
            from tuner.setup.mock import mock_batch

            with tasks.around_step(0):
                mock_batch(context.assembly, context.console)
