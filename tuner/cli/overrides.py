"""The recipe's flags as cyclopts sees them, generated from the model: their names, sentences, choices and defaults.

cyclopts names and explains the flags; their values are merged into the recipe's tree by `tuner.config.overrides`,
so that a value from a flag is checked by the very same code, once, together with the rest of the recipe.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter

from tuner.config.duration_types import Cadence, Span
from tuner.config.fields import Field, fields
from tuner.config.number_types import Real, Whole
from tuner.config.value_types import Choice, Switch, Text

if TYPE_CHECKING:
    from rich.console import Console

TITLES = {"": "Recipe"}


def print_flags(console: Console | None = None) -> None:
    """Print the recipe's flags, grouped by section, with what they allow and their defaults (to stdout)."""
    flags_app().help_print([], console=console)


def flags_app() -> App:
    """Return a cyclopts app whose one function has a keyword parameter for each key of the recipe."""
    app = App(name="flags", usage="", help_flags=[], version_flags=[], help_format="plaintext", help=_INTRODUCTION)
    groups: dict[str, Group] = {}
    parameters = []
    for position, field in enumerate(fields().values()):
        if field.key == "version":
            continue
        name = field.section
        group = groups.setdefault(name, Group(TITLES.get(name, f"--{name}.*"), sort_key=position))
        parameters.append(_parameter(field, group))

    def flags(**_: Any) -> None: ...

    flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.default(flags)
    return app


_INTRODUCTION = """Recipe flags: every key of the recipe, as --section.key VALUE. They win over the file; \
null goes back to the default, items of lists are --data.train.0.path."""


def _parameter(field: Field, group: Group) -> inspect.Parameter:
    only = f" Only with kind {' or '.join(field.kinds)}." if field.kinds else ""
    default = field.default_text

    def show_default(_: Any) -> str:
        return default

    marked = Parameter(
        name=f"--{field.key}",
        group=group,
        help=f"{field.sentence}{only} ({field.allowed})",
        show_default=False if field.required else show_default,
        negative=(),
        metavar=_metavar(field),
    )
    return inspect.Parameter(
        field.key.replace(".", "__"), inspect.Parameter.KEYWORD_ONLY, default="", annotation=Annotated[str, marked]
    )


def _metavar(field: Field) -> str:
    if isinstance(field.value_type, Choice):
        return "WORD"
    names: dict[type, str] = {
        Whole: "COUNT",
        Real: "NUMBER",
        Switch: "BOOL",
        Span: "DURATION",
        Cadence: "DURATION",
        Text: "TEXT",
    }
    return names.get(type(field.value_type), "VALUE")
