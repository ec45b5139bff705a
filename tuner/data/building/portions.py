"""Every portion of a recipe's data that is there by now, prepared one after the other."""

from collections.abc import Iterator
from dataclasses import replace

from tuner.config.portions import Portion
from tuner.data.building.prepare import PreparedInfo, prepare
from tuner.data.building.spec import PrepareSpec
from tuner.data.portions import next_portion
from tuner.errors import DataError, NoRowsError
from tuner.runtime.console import Console


def prepare_portions(spec: PrepareSpec, console: Console) -> Iterator[tuple[Portion, PreparedInfo | None]]:
    """Yield each portion with what was prepared, None for one without rows, until one is not there.

    Raises DataError naming a portion that cannot be prepared, MachineError.
    """
    done: list[Portion] = []
    while isinstance(portion := next_portion(spec.data, done), Portion):
        done.append(portion)
        try:
            yield portion, prepare(replace(spec, portion=portion), console)
        except NoRowsError:
            yield portion, None
        except DataError as error:
            raise DataError(f"{spec.called(portion)}: {error.message}", hint=error.hint) from error
