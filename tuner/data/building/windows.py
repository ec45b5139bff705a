"""Every window of a recipe that is there by now, prepared one after the other."""

from collections.abc import Iterator
from dataclasses import replace

from tuner.data.building.prepare import PreparedInfo, prepare
from tuner.data.building.spec import PrepareSpec
from tuner.data.windows import Window, next_window
from tuner.errors import DataError, NoRowsError
from tuner.runtime.console import Console


def prepare_windows(spec: PrepareSpec, console: Console) -> Iterator[tuple[Window, PreparedInfo | None]]:
    """Yield each window with what was prepared, None for one without rows, until one is not there.

    Raises DataError naming a window that cannot be prepared, MachineError.
    """
    done: list[Window] = []
    while isinstance(window := next_window(spec.data, done), Window):
        done.append(window)
        try:
            yield window, prepare(replace(spec, window=window), console)
        except NoRowsError:
            yield window, None
        except DataError as error:
            raise DataError(f"window {window.name}: {error.message}", hint=error.hint) from error
