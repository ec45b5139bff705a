"""A schedule of the user's own: a function of the index, checked before it is used."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tuner.config.schedules import CustomSchedule
from tuner.errors import PluginError
from tuner.runtime.plugins import Plugin, load, naming, require_call, source_file

CHECKED = 1000
"""About so many indices of a run are tried before it begins, twice."""


@dataclass(frozen=True)
class OwnSchedule:
    """The user's function, whose results are looked at each time."""

    function: Callable[[int], float]
    use: str
    file: Path | None

    def factor(self, index: int) -> float:
        """What it returns for an index. Raises PluginError for anything but a number from 0 to 1."""
        with naming(f"schedule.use {self.use} failed at index {index}", self.file):
            found = self.function(index)
            value = float(found)
        if not 0 <= value <= 1:
            raise PluginError(
                f"schedule.use {self.use} gave {found} at index {index}, not a factor from 0 to 1",
                hint="the learning rate is optimizer.lr times the factor; raise that instead",
            )
        return value

    def turns(self) -> list[tuple[int, str]]:
        """None that are known."""
        return []


def own_schedule(section: CustomSchedule, total_steps: int) -> OwnSchedule:
    """Call what ``use`` names with the number of steps and the options, and try the function that it gives.

    Raises PluginError where it is not there or fails, and for a function whose results are no factors, or differ from
    one call to the next.
    """
    factory = factory_of(section)
    file = source_file(factory)
    with naming(f"schedule.use {section.use} could not be built", file):
        function = factory(total_steps, **section.options)
    if not callable(function):
        raise PluginError(f"schedule.use {section.use} gave a {type(function).__name__}, not a function of the index")
    found = OwnSchedule(function, section.use, file)
    indices = range(0, total_steps + 1, max(1, total_steps // CHECKED))
    first = [found.factor(index) for index in indices]
    for index, before in reversed(list(zip(indices, first, strict=True))):
        if (again := found.factor(index)) != before:
            raise PluginError(
                f"schedule.use {section.use} gave {before:g} and then {again:g} at index {index}",
                hint="the factor must depend on the index alone, so that a resumed run continues with it",
            )
    return found


def factory_of(section: CustomSchedule) -> Plugin:
    """What ``use`` names, once it is seen to take the steps and the options. Raises PluginError; nothing is called."""
    factory = load(section.use, "tuner.schedules")
    require_call(factory, section.use, ("total_steps",), section.options)
    return factory
