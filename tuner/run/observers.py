"""The recipe's hooks and trackers, checked before anything heavy is done and built for a launch."""

from collections.abc import Callable, Sequence

from tuner.config.recipe import HookSection, LoggingSection
from tuner.run.hooks import Hooks, Registration, RunFacts, check_hooks, user_hook
from tuner.run.setup import Assembly
from tuner.run.trackers.choose import check_trackers, tracker_hooks
from tuner.runtime.collective import Collective
from tuner.runtime.console import Console
from tuner.runtime.process import gloo_group
from tuner.train.plan import Cadence, cadence

Attach = Callable[[Cadence, Console], Sequence[Registration]]
"""What a command adds to the recipe's hooks on rank 0, given when exports are due: training does not know export."""


def check_observers(hooks: Sequence[HookSection], logging: LoggingSection) -> None:
    """Check user code and trackers' libraries. Raises PluginError, MachineError; calls no user code but its import."""
    check_hooks(hooks)
    check_trackers(logging.trackers)


def build_hooks(assembly: Assembly, facts: RunFacts, console: Console, attach: Attach | None) -> Hooks:
    """Trackers first, then the user's hooks in their order, then the command's; none on ranks other than 0.

    Collective. Raises PluginError, on every rank, for a hook that cannot be built.
    """
    recipe = assembly.resolved.recipe
    plan, tokens = assembly.timetable.plan, assembly.prepared.train.tokens_per_row
    built: list[Registration] = []

    def build() -> None:
        built.extend(tracker_hooks(recipe.logging, console.say, console.warn))
        built.extend(user_hook(section, cadence(section.every, plan, tokens)) for section in recipe.hooks)
        if attach is not None:
            built.extend(attach(assembly.timetable.exporting, console))

    Collective(gloo_group()).on_rank0(build)
    return Hooks(built, facts)
