"""Weights that other models and checkpoints give a run when it begins, and newer ones while it trains
(`model.init_from`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tuner.config.recipe import Recipe
from tuner.run.parts.part import LaunchContext, LaunchRequest, Part, Preflight, TaskNeeds
from tuner.run.state import GIVEN
from tuner.runtime.console import Console
from tuner.runtime.stop import StopSignals
from tuner.setup.build import Assembly
from tuner.setup.resolve import Resolved
from tuner.setup.specs import trainable_of
from tuner.train.tasks import Task

if TYPE_CHECKING:
    from tuner.run.bank import ModelBank


class InitialWeights(Part):
    """Given once: a resumed run goes by what its checkpoint notes of them. Newer versions of some come in between."""

    def __init__(self, recipe: Recipe) -> None:
        self._entries = recipe.model.init_from
        self._bank: ModelBank | None = None
        """Of the entries that say `every`, as far as the launch is."""

    def check(self, request: LaunchRequest) -> None:
        """Match the sources with the model. Raises RecipeError with every problem, DataError for a damaged file."""
        if request.status.checkpoint is not None:
            return
        from tuner.setup.findings import Findings
        from tuner.setup.initial import check_initial

        recipe, findings = request.loaded.recipe, Findings(request.loaded)
        with request.console.doing("looking at the weights of model.init_from"):
            check_initial(recipe, trainable_of(recipe, request.spec.tokenizer.new_ids), findings)
            findings.raise_any()

    def before_build(self, ready: Preflight, resolved: Resolved, console: Console) -> Resolved:
        """What the run was given, where it began before; else the versions that it begins with. Collective."""
        begins = ready.status.checkpoint
        if any(entry.every for entry in self._entries):
            from tuner.run.bank import begin_bank

            self._bank = begin_bank(self._entries, ready.status)
            resolved = replace(resolved, versions={n: one.name for n, one in self._bank.current.items()})
        return resolved if begins is None else replace(resolved, given=begins.meta[GIVEN])

    def after_build(self, ready: Preflight, assembly: Assembly, console: Console, signals: StopSignals) -> Assembly:
        """Say what was given now, and hold it against what the run had. Raises DataError."""
        given = assembly.facts.given or {}
        if "summary" in given:
            console.say("init_from", given["summary"])
        if self._bank is not None:
            self._bank.identify(given)
        return assembly

    def tasks(self, context: LaunchContext, needs: TaskNeeds) -> Sequence[Task]:
        """What takes newer versions: before the evaluation and the save of the step, which show them."""
        if self._bank is None:
            return ()
        from tuner.run.tasks.versions import VersionsTask

        return (VersionsTask(context, self._bank, needs.log),)

    def facts(self, step: int) -> Mapping[str, Any]:
        """Which versions the weights are of, and the hash of those that are not trained."""
        return {} if self._bank is None else self._bank.facts(step)
