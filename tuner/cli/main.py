"""The entry point: splits the command line, imports the one command that was asked for, and runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.exceptions import TyperException

from tuner.cli.argv import split
from tuner.errors import ExitCode
from tuner.runtime.openmp import limit_spinning

COMMANDS: dict[str, str] = {
    "init": "Look at your data and write a commented recipe.",
    "prepare-data": "Turn records into packed, encoded, content-addressed data.",
    "data": "List, show, verify or clean up prepared data.",
    "train": "Train the recipe's model, or resume where it stopped.",
    "resume": "Resume a stopped run.",
    "verify-resume": "Prove on this machine that a run resumes exactly.",
    "eval": "Measure the loss on held-out rows.",
    "export-hf": "Write a Hugging Face directory and verify it.",
    "runs": "List, show, compare, plot or remove runs.",
    "generate": "Write text with a run, a checkpoint or a Hugging Face directory.",
    "profile": "Predict memory and time for any device, find what fits, or measure.",
    "config": "Check, show or describe a recipe.",
    "recipes": "List, show or copy the recipes that ship.",
}
"""Every command and its line of help; its file `tuner/cli/<command>.py` is imported only when it runs."""

GROUPS = frozenset({"config", "data", "recipes", "runs"})
TAKES_RECIPE = frozenset({"prepare-data", "train", "resume", "eval", "profile", "config"})
SHOWS_FLAGS = frozenset({"prepare-data", "train", "resume", "eval", "profile"})


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process with its exit code."""
    limit_spinning(os.environ)
    raise SystemExit(run(list(sys.argv[1:] if argv is None else argv)))


def run(args: list[str]) -> int:
    """Run one command line and return its exit code (commands themselves raise SystemExit)."""
    command = next((word for word in args if not word.startswith("-")), "")
    rest, flags = split(args, command in TAKES_RECIPE)
    try:
        if flags and command in COMMANDS and command not in TAKES_RECIPE:
            return _usage(command, args, f"{command} takes no recipe flags: --{flags[0][0]}")
        code = build(command)(args=rest, prog_name="tuner", standalone_mode=False, obj=_invocation(flags))
    except TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return int(ExitCode.USAGE)
        return _usage(command, args, _message(command, error), _help_of(error))
    except (KeyboardInterrupt, typer.Abort):
        print("error: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _close_stdout()
        return 0
    except Exception as error:  # whatever fails outside a command's body
        return _broken(command, args, error)
    if command in SHOWS_FLAGS and "--help" in rest:
        from tuner.cli.flags import print_flags

        print_flags()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _close_stdout()
    return code if isinstance(code, int) else 0


def build(command: str) -> Callable[..., Any]:
    """Return the Typer app in which only `command` is real; the others are their names and lines of help."""
    app = typer.Typer(
        name="tuner",
        help="Fine-tune and pre-train language models from one typed recipe.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_root)
    for name, line in COMMANDS.items():
        if name != command:
            app.command(name, help=line)(_elsewhere)
            continue
        module = import_module(f"tuner.cli.{name.replace('-', '_')}")
        if name in GROUPS:
            app.add_typer(module.app, name=name, help=line)
        else:
            app.command(name, help=line)(getattr(module, name.replace("-", "_")))
    return app


def _root(ctx: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        from tuner import __version__

        print(f"tuner {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        ctx.fail("Missing command.")


def _elsewhere() -> None:
    """Stand for a command that was not asked for."""


def _invocation(flags: list[tuple[str, str | None]]) -> Any:
    if not flags:
        return None
    from tuner.cli.command import Invocation
    from tuner.config.overrides import Override

    return Invocation([Override(key, text) for key, text in flags])


def _message(command: str, error: TyperException) -> str:
    """Say what Typer says; an unknown flag is a misspelt option, or else a key of the recipe or of another tool."""
    name = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
    if type(error).__name__ != "NoSuchOption" or command not in TAKES_RECIPE or getattr(error, "possibilities", None):
        return error.format_message().replace("Value error, ", "")  # a word of the checker below, not of the user's
    from tuner.config.overrides import unknown

    return f"flag --{name}  {unknown(name)}"


def _broken(command: str, args: list[str], error: Exception) -> int:
    from tuner.cli.command import print_failure
    from tuner.errors import as_tuner_error

    if "--debug" in args:
        import traceback

        traceback.print_exception(error, file=sys.stderr)
    return print_failure(command or "tuner", as_tuner_error(error), "--json" in args)


def _help_of(error: TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f"see: {context.command_path if context is not None else 'tuner'} --help"


def _usage(command: str, args: list[str], message: str, hint: str | None = None) -> int:
    from tuner.cli.command import print_failure
    from tuner.errors import RecipeError

    lines = message.split("\n")
    return print_failure(
        command or "tuner", RecipeError(" ".join(line.strip() for line in lines), hint), "--json" in args
    )


def _close_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
