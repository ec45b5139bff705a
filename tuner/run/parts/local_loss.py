"""The loss of each process by itself, where each writes its metrics (`logging.metrics_of: all`)."""

from collections.abc import Sequence

from tuner.config.recipe import Recipe
from tuner.run.parts.part import LaunchContext, Part, TaskNeeds
from tuner.train.tasks import Task


class LocalLosses(Part):
    """A part of each step that gives the log a column."""

    @staticmethod
    def wanted(recipe: Recipe) -> bool:
        """Where every process writes its metrics."""
        return recipe.logging.metrics_of == "all"

    def tasks(self, context: LaunchContext, needs: TaskNeeds) -> Sequence[Task]:
        """None: it is of the steps, before all else that these have."""
        from tuner.train.local_loss import LocalLoss

        state = context.assembly.train_state
        column = LocalLoss(state.method, state.step_config.mesh.sequence, context.progress)
        state.parts = (column, *state.parts)
        needs.log.columns.append(column)
        return ()
