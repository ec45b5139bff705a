"""The command line: split before Typer reads it, and the app, of which the command that was asked for is imported."""

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from tuner import __version__
from tuner.cli.commands import BODIES, COMMANDS, GROUPS
from tuner.cli.layout import HelpfulCommand, HelpfulGroup
from tuner.errors import RecipeError

MODULES = {"import": "import_config"}
"""Commands whose name is a word of Python: their file."""
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
    Nothing is taken after `--`. A `--fit` without a size gets an empty one.
    """
    rest: list[str] = []
    flags: list[tuple[str, str | None]] = []
    position = 0
    while position < len(args):
        token = args[position]
        position += 1
        if token == "--":
            return [*rest, token, *args[position:]], flags
        if token == _ALONE and (position == len(args) or _NO_SIZE.fullmatch(args[position])):
            rest += [token, ""]
            continue
        match = _OVERRIDE.fullmatch(token) or (_TOP.fullmatch(token) if takes_recipe else None)
        if match is None:
            rest.append(token)
            continue
        value = match[2]
        if value is None and position < len(args) and not args[position].startswith("--"):
            value = args[position]
            position += 1
        flags.append((match[1], value))
    return rest, flags


def build(command: str) -> Callable[..., Any]:
    """Return the Typer app in which only `command` is real; the others are their names and lines of help."""
    app = typer.Typer(
        name="tuner",
        help="Fine-tune and pre-train language models from one typed recipe.",
        cls=HelpfulGroup,
        context_settings=HELP_OPTIONS,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
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
