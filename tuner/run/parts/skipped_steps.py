"""Steps that a recipe leaves out (`train.steps_to_skip`): the loop passes over them, and the launch says so."""

from tuner.run.parts.part import LaunchContext, Part
from tuner.train.tasks import Tasks


class SkippedSteps(Part):
    """Said before the first step."""

    def before_steps(self, context: LaunchContext, tasks: Tasks) -> None:
        """Say which are still to come, and warn of those that the run has not."""
        progress, console = context.progress, context.console
        ranges, last = context.assembly.steps_to_skip, progress.plan.total_steps
        if ahead := [str(steps) for steps in ranges if progress.step < steps.last and steps.first <= last]:
            console.say("skips", f"{', '.join(ahead)}: nothing is trained in these steps (train.steps_to_skip)")
        beyond = [str(steps) for steps in ranges if steps.last > last]
        if beyond and not progress.more_to_come:
            console.warn(f"train.steps_to_skip: {', '.join(beyond)} reaches beyond the last step, {last}")
