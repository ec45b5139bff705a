"""Code of the user's own, and libraries of trackers, that a recipe names: tried before anything is loaded."""

from tuner.config.optimizers import CustomOptimizer
from tuner.run.parts.part import LaunchRequest, Part
from tuner.train.methods.method import check_method
from tuner.train.plan import check_schedule


class OwnCode(Part):
    """Each is imported only where it is named."""

    def check(self, request: LaunchRequest) -> None:
        """Import what is named, and try it as far as it goes without a model. Raises PluginError, MachineError."""
        recipe = request.loaded.recipe
        check_method(recipe.method)
        check_schedule(recipe.schedule)
        if isinstance(recipe.optimizer, CustomOptimizer):
            from tuner.run.trial import try_optimizer

            try_optimizer(recipe.optimizer)
        data = recipe.data
        for source in (*data.train, *(data.eval if isinstance(data.eval, tuple) else ())):
            if source.use is not None:
                from tuner.data.reading.spool import check_source

                check_source(source.use, source.args)
        if recipe.eval.tasks:
            from tuner.evals.load import check_tasks

            check_tasks(recipe.eval.tasks)
        if recipe.hooks:
            from tuner.run.tasks.hooks import check_hooks

            check_hooks(recipe.hooks)
        if recipe.logging.trackers:
            from tuner.run.tasks.trackers.choose import check_trackers

            check_trackers(recipe.logging.trackers)
