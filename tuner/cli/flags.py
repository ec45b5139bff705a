"""The recipe's flags, generated from its model: cyclopts names and explains them.

Their values are merged into the recipe's tree by `tuner.config.load`, so that a value from a flag is read and
checked by the code that reads the file, once, together with the rest. cyclopts does not split the command line: it
takes no `-` for a value, has no names for items of lists (`--data.train.0.path`), drops `--`, and stops at the first
flag that is wrong; a test holds each of these, so that it is seen when one of them changes.
"""

import inspect
import io
from typing import Annotated, Any

from cyclopts import App, Group, Parameter
from rich.console import Console

from tuner.config.fields import Field, fields


def print_flags(console: Console | None = None, section: str | None = None) -> None:
    """Print the recipe's flags, or those of one section, with what they allow and their defaults (to stdout)."""
    flags_app(section).help_print([], console=console)


def flags_text(section: str | None, width: int, colour: bool) -> str:
    """The same as it is printed on a terminal of so many columns."""
    stream = io.StringIO()
    print_flags(Console(file=stream, width=width, force_terminal=colour), section)
    return stream.getvalue().rstrip("\n")


def flags_app(section: str | None = None) -> App:
    """Return a cyclopts app whose one function has a keyword parameter for each key of the recipe, or of a section."""
    intro = _INTRODUCTION if section is None else _of_section(section)
    app = App(name="flags", usage="", help_flags=[], version_flags=[], help_format="plaintext", help=intro)
    groups: dict[str, Group] = {}
    parameters = []
    for position, field in enumerate(fields().values()):
        if field.key == "version" or (section is not None and not field.key.startswith(f"{section}.")):
            continue
        name = field.section
        group = groups.setdefault(name, Group(f"--{name}.*" if name else "Recipe", sort_key=position))
        parameters.append(_parameter(field, group))

    def flags(**_: Any) -> None: ...

    flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.default(flags)
    return app


_INTRODUCTION = """Recipe flags: every key of the recipe, as --section.key VALUE. They win over the file; \
null goes back to the default, items of lists are --data.train.0.path."""


def _of_section(section: str) -> str:
    first = next(key for key in fields() if key.startswith(f"{section}."))
    return f"Keys of {section}, as flags of every command that takes a recipe. One alone: tuner help {first}"


def _parameter(field: Field, group: Group) -> inspect.Parameter:
    word = "VALUE" if field.value_type is None else field.value_type.metavar
    only = f" Only with kind {' or '.join(field.kinds)}." if field.kinds else ""
    marked = Parameter(
        name=f"--{field.key}", group=group, help=f"{field.sentence}{only} ({field.allowed})",
        show_default=False if field.required else lambda _: field.default_text, negative=(),
        metavar="true|false" if word == "BOOL" else word,
    )
    return inspect.Parameter(
        field.key.replace(".", "__"), inspect.Parameter.KEYWORD_ONLY, default="", annotation=Annotated[str, marked]
    )
