"""The entry point: splits the command line, imports the one command that was asked for, and runs it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.exceptions import TyperException

from tuner import IS_PROGRAM
from tuner.cli.app import build, split
from tuner.cli.commands import COMMANDS, GROUPS, MEANT, NOT_HERE, TAKES_RECIPE
from tuner.errors import ExitCode, RecipeError, TunerError, as_tuner_error
from tuner.runtime.before_torch import prepare_environment
from tuner.runtime.stop import heed, over

if TYPE_CHECKING:
    from tuner.config.load import Override


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process with its exit code."""
    if IS_PROGRAM:
        heed()
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["__complete"]:  # as shells ask; what answers them is loaded for nothing else
        _complete(given[1:])
    prepare_environment(os.environ)
    code = run(given)
    over()
    raise SystemExit(code)


def run(args: list[str]) -> int:
    """Run one command line and return its exit code (commands themselves raise SystemExit)."""
    command = next((word for word in args if not word.startswith("-")), "")
    rest, flags = split(args, command in TAKES_RECIPE)
    try:
        if rest[:1] == [command] and command not in COMMANDS:
            return _usage("tuner", args, f"no command {command!r}", _meant(command))
        if flags and command in COMMANDS and command not in TAKES_RECIPE:
            return _usage(command, args, f"tuner {_full_name(command, rest)} takes no recipe keys: --{flags[0][0]}")
        if command in TAKES_RECIPE and "--help-recipe" in rest:
            from tuner.cli.flags import print_flags

            print_flags()
            return 0
        code = build(command)(args=rest, prog_name="tuner", standalone_mode=False, obj=_overrides(command, flags))
        sys.stdout.flush()
    except TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return int(ExitCode.USAGE)
        context = getattr(error, "ctx", None)
        see = f"see: {context.command_path if context is not None else 'tuner'} --help"
        return _usage(command, args, _message(command, error, args), see)
    except (KeyboardInterrupt, typer.Abort):
        print("error: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:  # whatever fails outside a command's body
        if "--debug" in args:
            traceback.print_exception(error, file=sys.stderr)
        return _failed(command, args, as_tuner_error(error))
    return code if isinstance(code, int) else 0


def _full_name(command: str, rest: Sequence[str]) -> str:
    """A command with the one below it, such as `recipes show`, where it is a group."""
    below = [word for word in rest if not word.startswith("-")][1:2] if command in GROUPS else []
    return " ".join([command, *below])


def _complete(words: Sequence[str]) -> NoReturn:
    """Answer a shell. It may ask at any moment: whatever goes wrong, it is offered nothing."""
    from tuner.cli.complete import answer

    try:
        found = answer(words)
        print(found, end="\n" if found else "", flush=True)
    except Exception:  # noqa: BLE001 - a traceback in the middle of a line that is typed
        raise SystemExit(1) from None
    raise SystemExit(0)


def _overrides(command: str, flags: list[tuple[str, str | None]]) -> list[Override]:
    """What the environment and the flags say of the recipe, for a command that takes one."""
    variables = {name: text for name, text in os.environ.items() if name.startswith("TUNER_") and "__" in name}
    if command not in TAKES_RECIPE or not (flags or variables):
        return []
    from tuner.config.load import Override, from_environment

    typed = [Override(key, text) for key, text in flags]
    return [*from_environment(variables, typed), *typed]


def _meant(word: str) -> str:
    """The way on from a command that there is not: another tool's name for one, a misspelt one, or a recipe."""
    name = word.lower().replace("_", "-")
    if name in NOT_HERE:
        return NOT_HERE[name]
    if word.endswith((".yaml", ".yml")):
        return f"did you mean tuner train {word}?"
    near = MEANT.get(name) or next(iter(get_close_matches(name, [*COMMANDS, *MEANT], 1, 0.6)), None)
    near = MEANT.get(near, near) if near is not None else None
    return f"did you mean tuner {near}?" if near is not None else "see: tuner --help"


def _message(command: str, error: TyperException, args: Sequence[str] = ()) -> str:
    """Say what Typer says; an unknown flag is a misspelt option, or else a key of the recipe or of another tool."""
    if type(error).__name__ != "NoSuchOption":
        return error.format_message().replace("Value error, ", "")  # a word of the checker below, not of the user's
    flag = str(getattr(error, "option_name", ""))
    context: Any = getattr(error, "ctx", None)
    known = [] if context is None else [name for each in context.command.get_params(context) for name in each.opts]
    near = get_close_matches(flag, known, 1, 0.75)
    if near or command not in TAKES_RECIPE:
        return f"no option {flag}" + (f"; did you mean {near[0]}?" if near else "")
    from tuner.config.load import unknown

    name = flag.lstrip("-").replace("-", "_")
    return f"flag --{name}  {unknown(name, _value_of(flag, args))}"


def _value_of(flag: str, args: Sequence[str]) -> str | None:
    """What was typed as the value of a flag, if anything: `--lr 3` or `--lr=3`."""
    for word, following in zip(args, [*args[1:], "-"], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else None if following.startswith("-") else following
    return None


def _usage(command: str, args: list[str], message: str, hint: str | None = None) -> int:
    return _failed(command, args, RecipeError(" ".join(line.strip() for line in message.split("\n")), hint))


def _failed(command: str, args: list[str], error: TunerError) -> int:
    from tuner.cli.command import print_failure  # which `tuner --help` does without

    return print_failure(command or "tuner", error, "--json" in args)


if __name__ == "__main__":
    main()
