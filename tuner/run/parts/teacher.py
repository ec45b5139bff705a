"""The teacher of a distillation: what it gives each token, and its versions where it is still learning."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tuner.config.methods import DistillMethod
from tuner.config.recipe import Recipe
from tuner.model.build import fetch_weights
from tuner.run.parts.part import LaunchContext, LaunchRequest, Part, Preflight, TaskNeeds
from tuner.runtime import phase, startup
from tuner.runtime.console import Console
from tuner.runtime.stop import StopSignals
from tuner.setup.build import Assembly
from tuner.setup.resolve import Resolved
from tuner.train.tasks import Task

if TYPE_CHECKING:
    from tuner.run.teacher import TeacherVersions


class Teacher(Part):
    """In memory next to the student, or as columns that were computed once (`method.top_k`)."""

    def __init__(self, recipe: Recipe) -> None:
        assert isinstance(recipe.method, DistillMethod), "`PARTS` asks for it with this method alone"
        self._method = recipe.method
        self._versions: TeacherVersions | None = None
        """Those of `method.teacher_every`, as far as the launch is."""

    def check(self, request: LaunchRequest) -> None:
        """Fetch the teacher, and check that it reads the student's tokens. Raises RecipeError, DataError."""
        from tuner.setup.teacher import check_teacher, teacher_model

        with request.console.doing(f"looking at the teacher, {self._method.teacher}"):
            check_teacher(self._method, request.spec.tokenizer, request.spec.cache_dir)
            if not request.options.dry_run and self._method.top_k is None:
                fetch_weights(teacher_model(self._method))

    def before_build(self, ready: Preflight, resolved: Resolved, console: Console) -> Resolved:
        """The version that the launch begins with, where newer ones are looked for. Collective."""
        if self._method.teacher_every is None:
            return resolved
        from tuner.run.teacher import begin_versions

        self._versions = begin_versions(self._method, ready.status, ready.spec)
        return replace(resolved, teacher=str(self._versions.path))

    def after_build(self, ready: Preflight, assembly: Assembly, console: Console, signals: StopSignals) -> Assembly:
        """What the teacher gives the trained tokens, where that is kept. Collective."""
        if self._versions is not None:
            self._versions.identify(assembly.teacher_facts)
        if self._method.top_k is None:
            return assembly
        from tuner.run.teacher import taught

        phase.enter("teacher")
        with startup.phase("teacher"):
            return taught(ready, assembly, console, lambda: signals.requested)

    def tasks(self, context: LaunchContext, needs: TaskNeeds) -> Sequence[Task]:
        """What takes newer versions: before the evaluation and the save of the step, which show it."""
        if self._versions is None:
            return ()
        from tuner.run.tasks.versions import VersionsTask

        return (VersionsTask(context, self._versions, needs.log),)

    def state(self, step: int) -> Mapping[str, Any]:
        """Which versions the run learned from."""
        return {} if self._versions is None else {"teachers": self._versions.as_state(step)}
