"""Weights that other models and checkpoints give a run when it begins (`model.init_from`)."""

from dataclasses import replace

from tuner.config.recipe import Recipe
from tuner.run.meta import GIVEN
from tuner.run.parts.part import Before, Part, Preflight
from tuner.runtime.console import Console
from tuner.runtime.stop import StopSignals
from tuner.setup.build import Assembly
from tuner.setup.resolve import Resolved
from tuner.setup.specs import trainable_of


class InitialWeights(Part):
    """Given once: a resumed run goes by what its checkpoint notes of them."""

    @staticmethod
    def wanted(recipe: Recipe) -> bool:
        """Where the recipe names sources."""
        return bool(recipe.model.init_from)

    def check(self, before: Before) -> None:
        """Match the sources with the model. Raises RecipeError with every problem, DataError for a damaged file."""
        if before.status.checkpoint is not None:
            return
        from tuner.setup.findings import Findings
        from tuner.setup.initial import check_initial

        recipe, findings = before.loaded.recipe, Findings(before.loaded)
        with before.console.doing("looking at the weights of model.init_from"):
            check_initial(recipe, trainable_of(recipe, before.spec.tokenizer.new_ids), findings)
            findings.raise_any()

    def before_build(self, ready: Preflight, resolved: Resolved) -> Resolved:
        """What the run was given, where it began before."""
        begins = ready.status.checkpoint
        return resolved if begins is None else replace(resolved, given=begins.meta[GIVEN])

    def built(self, ready: Preflight, assembly: Assembly, console: Console, signals: StopSignals) -> Assembly:
        """Say what was given now."""
        given = assembly.facts.given or {}
        if "summary" in given:
            console.say("init_from", given["summary"])
        return assembly
