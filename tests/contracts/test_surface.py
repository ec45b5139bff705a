"""The command line is frozen: a command or an option comes, goes or changes its name only together with this table."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from tests.fixtures.tables import cases
from tuner.cli.app import build
from tuner.cli.commands import COMMANDS, GROUPS, PARAMETERS, TAKES_RECIPE
from tuner.config.fields import fields

COMMON = "--json --verbose|-v --debug"
# Arguments in capitals, those that may be left out in parentheses; what must be given as an option ends in `!`.
SURFACE: Any = cases(__file__, "surface")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its full name, as Typer parses it."""
    for name in COMMANDS:
        root: Any = typer.main.get_command(build(name))  # type: ignore[arg-type]
        command = root.commands[name]
        if name in GROUPS:
            yield from ((f"{name} {below}", item) for below, item in command.commands.items())
        else:
            yield name, command


def written(parameter: Any) -> str:
    """One parameter as the table writes it."""
    if parameter.param_type_name == "argument":
        shown = str(parameter.name).upper()
        return shown if parameter.required else f"({shown})"
    return "|".join([*parameter.opts, *parameter.secondary_opts]) + ("!" if parameter.required else "")


def test_every_command_has_the_frozen_options() -> None:
    found = {name: " ".join(map(written, command.params)) for name, command in commands()}
    assert found == {name: f"{own} {COMMON}".strip() for name, own in SURFACE.items()}


def test_no_sentence_is_left_of_a_parameter_that_went() -> None:
    names = {name: {parameter.name for parameter in command.params} for name, command in commands()}
    assert PARAMETERS.keys() <= names.keys() | {""}
    everywhere = set().union(*(names[name] - PARAMETERS.get(name, {}).keys() for name in names))
    assert [(key, name) for key, rows in PARAMETERS.items() for name in rows.keys() - names.get(key, everywhere)] == []


@pytest.mark.parametrize(("name", "command"), list(commands()))
def test_every_parameter_has_a_sentence_that_the_terminal_shows_whole(name: str, command: Any) -> None:
    for parameter in command.params:
        assert parameter.help.endswith("."), (name, parameter.name)
        assert "[" not in parameter.help, f"{name} {parameter.name}: rich takes brackets for markup"


def test_no_option_hides_a_key_of_the_recipe() -> None:
    top = {f"--{key}" for key in fields() if "." not in key}
    for name, command in commands():
        if name.split()[0] in TAKES_RECIPE:
            assert not top & {flag for parameter in command.params for flag in parameter.opts}, name
