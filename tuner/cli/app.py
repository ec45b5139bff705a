"""The command line: split before Typer reads it, and the app, of which the command that was asked for is imported.

Its help is laid out here: usage, arguments, options, examples and where the rest is, in at most 60 lines of 80
columns.
"""

import os
import re
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from tuner import __version__
from tuner.cli.commands import BODIES, COMMANDS, EXAMPLES, GROUPED, GROUPS, RECIPE_KEYS, WITH_FLAGS
from tuner.errors import RecipeError

MODULES = {"import": "import_config", "resume": "train"}
"""Commands whose file has another name: that of a word of Python, or of the command that it is the rest of."""
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


_OVERRIDE = re.compile(r"--([A-Za-z][\w-]*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
_ALONE = "--fit"
"""Takes a value or none, which Typer does not know."""
_NO_SIZE = re.compile(r"-.*|.*\.ya?ml")
_TOP = re.compile(r"--(version|name|seed|output_dir|output-dir|hooks)(?:=(.*))?", re.DOTALL)


def split(args: Sequence[str], takes_recipe: bool) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Return what is left for Typer, and the `--section.key value` flags, which it would take for the argument.

    A flag takes the text after `=`, or the next argument unless that is a flag (then its value is None).
    With `takes_recipe` the keys at the recipe's top (`--name`, `--seed`, `--output_dir`, `--hooks`, ...) are taken too.
    Nothing after `--` is parsed. A `--fit` without a size gets an empty one.
    """
    rest: list[str] = []
    flags: list[tuple[str, str | None]] = []
    left = deque(args)
    while left:
        token = left.popleft()
        match = _OVERRIDE.fullmatch(token) or (_TOP.fullmatch(token) if takes_recipe else None)
        if token == "--":
            return [*rest, token, *left], flags
        if match is not None:
            has_value = match[2] is not None or not left or left[0].startswith("--")
            flags.append((match[1], match[2] if has_value else left.popleft()))
        else:
            is_alone = token == _ALONE and (not left or _NO_SIZE.fullmatch(left[0]))
            rest += [token, ""] if is_alone else [token]
    return rest, flags


def build(command: str) -> Callable[..., Any]:
    """Return the Typer app in which only `command` is real; the others are their names and lines of help."""
    app = typer.Typer(
        name="tuner", help="Fine-tune and pre-train language models from one typed recipe.", cls=HelpfulGroup,
        context_settings=HELP_OPTIONS, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True)(_root)
    for name, line in COMMANDS.items():
        if name != command:
            app.command(name, help=line)(_elsewhere)
            continue
        import_module(f"tuner.cli.{MODULES.get(name, name.replace('-', '_'))}")
        if name in GROUPS:
            group = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
            for full, body in BODIES.items():
                if full.startswith(f"{name} "):
                    group.command(full.partition(" ")[2], cls=HelpfulCommand)(body)
            app.add_typer(group, name=name, help=line, cls=HelpfulGroup)
        else:
            app.command(name, cls=HelpfulCommand)(BODIES[name])
    return app


def help_text(words: Sequence[str]) -> str:
    """The help of a command, such as `runs show`, or of the program. Raises RecipeError for one that is not there."""
    command: Any = typer.main.get_command(build(words[0] if words else ""))  # type: ignore[arg-type]
    context = typer.Context(command, info_name="tuner", help_option_names=HELP_OPTIONS["help_option_names"])
    for word in words:
        known = getattr(command, "commands", {})
        if word not in known:
            raise RecipeError(f"no command {' '.join(words)}", hint=f"there are: {', '.join(known) or words[0]}")
        command = known[word]
        context = typer.Context(command, info_name=word, parent=context)
    return str(command.get_help(context))


def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    install_completion: Annotated[
        bool, typer.Option("--install-completion", help="Install completion for bash, zsh or fish.")
    ] = False,
    show_completion: Annotated[
        bool, typer.Option("--show-completion", help="Print the script that completes in the shell.")
    ] = False,
    shell: Annotated[
        str | None, typer.Option(metavar="bash|zsh|fish", help="Shell to complete for; default that of $SHELL.")
    ] = None,
) -> None:
    if install_completion or show_completion:
        _completion(shell, install_completion)
        raise typer.Exit
    if version:
        print(f"tuner {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        ctx.fail("Missing command.")


def _elsewhere() -> None:
    """Stand for a command that was not asked for."""


def _completion(shell: str | None, is_installed: bool) -> None:
    from tuner.cli.shells import install, script_of, shell_of

    name = shell_of(shell)
    if not is_installed:
        print(script_of(name), end="")
        return
    for path in install(name, Path.home()):
        print(f"written   {path}")
    print(f"{name} completes tuner commands in every new terminal")


COMMON = frozenset({"json", "verbose", "debug", "help"})
"""Options that every command has."""
WORDS: dict[Any, str] = {str: "TEXT", int: "N", float: "NUMBER", Path: "PATH"}
"""What people call the types of values."""
NAME_COLUMNS, WIDTH = 24, 78
_TOGETHER = "\u2060"
"""In place of a space at which no line ends."""

Row = tuple[str, str]


class HelpfulCommand(TyperCommand):
    """A command whose help fits on one screen."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        name = command_name(ctx)
        parameters = [parameter for parameter in self.get_params(ctx) if not getattr(parameter, "hidden", False)]
        arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
        options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
        flags = ["[--KEY VALUE]..."] if name in WITH_FLAGS else []
        usage = [ctx.command_path, *map(_usage_of, arguments), "[OPTIONS]", *flags]
        formatter.write(f"{_bold('Usage:')} {' '.join(usage)}\n")
        _text(formatter, self.help or "")
        _table(formatter, "Arguments", [(_argument(each).strip("[]"), _said(each)) for each in arguments])
        own = [option for option in options if option.name not in COMMON]
        _table(formatter, "Options", [(_option(option), _said(option)) for option in own])
        common = [(_option(option), _said(option)) for option in options if option.name in COMMON]
        _table(formatter, "Common options", common)
        _lines(formatter, "Examples", EXAMPLES.get(name, ()))
        if name in WITH_FLAGS:
            _lines(formatter, "Recipe keys are flags, too, and win over the file", list(recipe_keys(name)))


class HelpfulGroup(TyperGroup):
    """A group of commands whose help fits on one screen."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(f"{_bold('Usage:')} {ctx.command_path} COMMAND [ARGUMENTS] [OPTIONS]\n")
        _text(formatter, self.help or "")
        known = {name: _first(command.help or "") for name, command in self.commands.items()}
        is_root = ctx.parent is None
        for title, names in (GROUPED if is_root else {"Commands": list(known)}).items():
            _table(formatter, title, [(name, known[name]) for name in names if name in known])
        options = [option for option in self.get_params(ctx) if option.param_type_name == "option"]
        _table(formatter, "Options", [(_option(option), _said(option)) for option in options])
        _lines(formatter, "Examples", EXAMPLES.get(command_name(ctx), ()))
        if is_root:
            _lines(formatter, "More", ["tuner help train    tuner help optimizer    tuner help exit-codes"])


def command_name(ctx: typer.Context) -> str:
    """The name of a command as the tables have it: without the program's."""
    return ctx.command_path.partition(" ")[2]


def recipe_keys(command: str) -> Iterator[str]:
    """The sections and top keys of the recipe, and how to see more of them."""
    yield from textwrap.wrap("; ".join(RECIPE_KEYS), WIDTH - 2)
    rows = {
        "tuner help optimizer": "a section's keys: --optimizer.lr 3e-4",
        "tuner help optimizer.lr": "one key",
        f"tuner {command} --help-recipe": "every key",
    }
    width = max(map(len, rows))
    yield from (f"{typed.ljust(width)}  {text}" for typed, text in rows.items())


def metavar(parameter: Any) -> str:
    """What stands for the value of a parameter, in a word that people know."""
    if parameter.metavar is not None:
        return str(parameter.metavar)
    described = parameter.type_descriptor
    if described.is_choice and described.choices is not None:
        return "|".join(str(getattr(choice, "value", choice)) for choice in described.choices)
    annotation = described.annotation
    of = get_args(annotation)[0] if get_origin(annotation) is list else annotation
    return WORDS.get(of, "VALUE")


def _usage_of(argument: Any) -> str:
    name = _argument(argument)
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _argument(argument: Any) -> str:
    if argument.metavar is not None:
        return str(argument.metavar)
    return str(argument.name).upper() + ("..." if argument.nargs != 1 else "")


def _option(option: Any) -> str:
    names = ", ".join(sorted([*option.opts, *option.secondary_opts], key=lambda name: (len(name) > 2, name)))
    return names if option.is_flag or option.count else f"{names} {metavar(option)}"


def _said(parameter: Any) -> str:
    """The sentence of a parameter, with its default where that is one and the sentence does not say it."""
    text, default = str(parameter.help or ""), parameter.default
    if parameter.required and parameter.param_type_name == "option":
        return f"{text} [required]"
    silent = default is None or default is False or callable(default) or "default" in text.lower()
    return text if silent or parameter.required else f"{text} [default:{_TOGETHER}{default}]"


def _table(formatter: Any, title: str, rows: Sequence[Row]) -> None:
    if not rows:
        return
    formatter.write(f"\n{_bold(title + ':')}\n")
    width = min(NAME_COLUMNS, max(len(name) for name, _ in rows))
    for name, text in rows:
        lines = [line.replace(_TOGETHER, " ") for line in textwrap.wrap(text, WIDTH - width - 4)] or [""]
        if len(name) > width:
            formatter.write(f"  {name}\n")
        else:
            formatter.write(f"  {name.ljust(width)}  {lines.pop(0)}\n".replace(" \n", "\n"))
        formatter.write("".join(f"{'':{width + 4}}{line}\n" for line in lines))


def _first(text: str) -> str:
    """The first paragraph."""
    return " ".join(text.strip().split("\n\n", maxsplit=1)[0].split())


def _text(formatter: Any, text: str) -> None:
    formatter.write("\n" + "".join(f"{line}\n" for line in textwrap.wrap(" ".join(text.split()), WIDTH)))


def _lines(formatter: Any, title: str, lines: Iterable[str]) -> None:
    shown = [f"  {line}\n" for line in lines]
    if shown:
        formatter.write(f"\n{_bold(title + ':')}\n" + "".join(shown))


def _bold(text: str) -> str:
    return typer.style(text, bold=True) if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text
