"""The recipe's hooks and trackers, checked before anything heavy is done and built for a launch."""

from collections.abc import Sequence

from tuner.config.recipe import HookSection, LoggingSection
from tuner.runtime.console import Console
from tuner.train.hooks import Hooks, RunFacts, check_hooks, user_hook
from tuner.train.plan import cadence
from tuner.train.setup import Assembly
from tuner.train.trackers.choose import check_trackers, tracker_hooks


def check_observers(hooks: Sequence[HookSection], logging: LoggingSection) -> None:
    """Check user code and trackers' libraries. Raises PluginError, MachineError; calls no user code but its import."""
    check_hooks(hooks)
    check_trackers(logging.trackers)


def build_hooks(
    hooks: Sequence[HookSection], logging: LoggingSection, assembly: Assembly, facts: RunFacts, console: Console
) -> Hooks:
    """Trackers first, then the user's hooks in their order; none on ranks other than 0. Raises PluginError."""
    if not assembly.launch.is_main:
        return Hooks((), facts)
    plan, tokens = assembly.timetable.plan, assembly.prepared.train.tokens_per_row
    users = [user_hook(section, cadence(section.every, plan, tokens)) for section in hooks]
    return Hooks([*tracker_hooks(logging, console.say, console.warn), *users], facts)
