"""Rows that are short in the first steps of a run (`train.length_warmup`)."""

from dataclasses import replace

from tuner.config.recipe import Recipe
from tuner.errors import RecipeError
from tuner.run.parts.part import LaunchRequest, Part, Preflight
from tuner.runtime.console import Console
from tuner.runtime.stop import StopSignals
from tuner.setup.build import Assembly


class LengthWarmup(Part):
    """The batches are changed, which nothing else of a launch knows: a resumed run has those of its step."""

    def __init__(self, recipe: Recipe) -> None:
        self._section = recipe.train.length_warmup

    def check(self, request: LaunchRequest) -> None:
        """Raise RecipeError where rows are no longer than those of the first step."""
        start, whole = self._section.start, request.spec.max_length
        if start >= whole:
            raise RecipeError(
                f"train.length_warmup.start: {start:,} tokens are no fewer than a whole row's {whole:,}",
                hint=f"write train.length_warmup.start: {max(whole // 4, 2)}, or a longer data.max_length",
            )

    def after_build(self, ready: Preflight, assembly: Assembly, console: Console, signals: StopSignals) -> Assembly:
        """Have the batches of the first steps cut, and say so."""
        from tuner.train import length_warmup

        section, whole = self._section, ready.spec.max_length
        how = (section.steps or 0, section.start, section.multiple_of, section.truncate)
        console.say("rows", f"of {section.start:,} tokens at first, of {whole:,} from step {how[0] + 1:,} on")
        warmup, begun = length_warmup.RowLengths(*how, whole), assembly.timetable.data_start
        return replace(assembly, batches=length_warmup.GrowingBatches.of(assembly.batches, warmup, begun))
