"""One command from start to end: stdout carries its result alone, errors become one line and an exit code.

A command's file holds one function that Typer reads; what it returns is the command's result:

    @command("export-hf")
    def export_hf(console: Console, path: str, step: str = "newest") -> Outcome:
        source = input_path(path)            # `-` reads stdin
        ...                                  # heavy imports here
        return Outcome(result=str(report.path), metrics={...}, next="tuner generate ...")

Commands that take a recipe call `load_for_command(recipe, flags)`. `output.real_stdout()` is where the result goes.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from tuner.cli import output
from tuner.cli.commands import BODIES, PARAMETERS
from tuner.cli.output import Outcome
from tuner.errors import ExitCode, MachineError, RecipeError, TunerError, as_tuner_error
from tuner.runtime import stop
from tuner.runtime.activity import LABEL_WIDTH
from tuner.runtime.dist import RankInfo
from tuner.runtime.members import member
from tuner.runtime.warned import Warned, collected
from tuner.stages import local_path

if TYPE_CHECKING:
    from tuner.config.load import LoadedRecipe, Override, ReadRecipe, RecipeText, Source
    from tuner.runtime.console import Console, Level
else:
    Console = object  # which loads rich: help and completion do without

__all__ = [
    "Console", "Flags", "Outcome", "OutputOptions", "command", "console_of", "overrides_in", "input_path",
    "level_of", "load_for_command", "load_one_run", "run_command", "stopped_as",
]  # fmt: skip
Flags = list["Override"]
"""What variables such as `TUNER_SECTION__KEY` say, then the `--section.key value` flags, in order."""


@dataclass(frozen=True)
class OutputOptions:
    """How a command speaks: the options that all commands share."""

    json: bool = False
    verbose: bool = False
    debug: bool = False


class _PassedOn(Exception):
    """The command before failed or stopped: its document is passed on, with its exit code."""

    def __init__(self, document: dict[str, Any]) -> None:
        super().__init__()
        self.document = document


def console_of(level: Level) -> Console:
    """What speaks for a command on stderr: rank 0 alone."""
    from tuner.runtime.console import Console

    return Console(RankInfo.from_environment().is_main, level)


def level_of(loaded: LoadedRecipe | None, verbose: bool) -> Level:
    """How much is said: as the recipe has it, or everything."""
    return "debug" if verbose else "info" if loaded is None else loaded.recipe.logging.level


def input_path(argument: str | Path, in_store: bool = False) -> Path:
    """Return a path argument as an absolute path; `-` reads it from stdin (call it inside a command's body).

    Stdin holds one line: a path, or a `--json` document. A failed or stopped document ends the command: it is passed
    on, with its exit code. With ``in_store`` the URL of a directory in a store is the path of its stage. RecipeError
    when stdin is empty, and for a URL otherwise.
    """
    text = _read_stdin() if str(argument) == "-" else str(argument)
    try:
        return local_path(text, in_store)
    except ValueError as error:
        raise RecipeError(f"{text}: {error}") from None


def load_for_command(argument: str | None, overrides: Sequence[Override] = (), fetches: bool = False) -> LoadedRecipe:
    """Load the recipe that a command was given: a path, a shipped name, `-` or nothing.

    With ``fetches`` what it reads of object stores is fetched to where its paths lead.
    On stdin it is the recipe itself, whose relative paths start from the working directory, or a path or document.

    Without an argument it is `./recipe.yaml`, or the flags alone when they name a model and data.
    Raises RecipeError, with the way out, when there is none, and where its model is a run or an adapter.
    """
    from tuner.rundir.model_path import require_base_model

    loaded = read_for_command(argument, overrides).whole()
    if fetches:
        fetch_inputs(loaded)
    require_base_model(loaded.recipe.model.name_or_path, loaded.origins.get("model.name_or_path", "recipe"))
    return loaded


def fetch_inputs(loaded: LoadedRecipe) -> None:
    """Fetch what a recipe reads of object stores. Raises RecipeError, MachineError."""
    from tuner.config.store_rules import inputs_of  # with the recipe's model, which help does without
    from tuner.rundir.in_store import bring_inputs

    if inputs := inputs_of(loaded.recipe):
        console = console_of(level_of(loaded, verbose=False))
        with console.doing("fetching from the store"):
            bring_inputs(inputs, console.say)


def load_one_run(argument: str | None, overrides: Sequence[Override] = ()) -> LoadedRecipe:
    """The same of one run. Raises RecipeError for a ladder of several."""
    loaded = load_for_command(argument, overrides, fetches=True)
    from tuner.config.ladder import require_one_run

    require_one_run(loaded.recipe.ladder)
    return loaded


def read_for_command(argument: str | None, overrides: Sequence[Override] = ()) -> ReadRecipe:
    """The same as far as it can be read, with its problems, whatever its model is.

    Raises RecipeError where there is no recipe.
    """
    from tuner.config.load import read_recipe

    return read_recipe(_source(argument, overrides), overrides)


def is_recipe_here() -> bool:
    """Whether there is a recipe that a command takes where none is given."""
    return Path("recipe.yaml").is_file()


def _source(argument: str | None, overrides: Sequence[Override]) -> Source:
    if argument == "-":
        return _recipe_on_stdin()
    if argument is not None:
        return argument
    if is_recipe_here():
        return Path("recipe.yaml")
    keys = {override.key for override in overrides}
    if "model.name_or_path" in keys and any(key.startswith("data.train") for key in keys):
        return None
    raise RecipeError(
        "no recipe given and no ./recipe.yaml here",
        hint="write one with: tuner init -m MODEL -d FILE > recipe.yaml   or see: tuner recipes list",
    )


_OVERRIDES = "write one with: tuner profile RECIPE --fit --json > FILE"


def overrides_in(source: str | None, typed: Sequence[Override] = ()) -> list[Override]:
    """The `overrides` of a document that `tuner profile --fit --json` printed, less those that are typed as flags.

    `source` is a file or `-`, as in :func:`input_path`: a failed document ends the command with its exit code.
    """
    from tuner.config.load import Override

    if source is None:
        return []
    document = _document(source)
    values = document["artifacts"].get("overrides")
    if not isinstance(values, dict) or not all(isinstance(value, (str, int, float, bool)) for value in values.values()):
        raise RecipeError(f"the document of {document.get('command')} holds no overrides", hint=_OVERRIDES)
    known = {override.key for override in typed}
    texts = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in values.items()}
    return [Override(key, text) for key, text in texts.items() if key not in known]


def command(name: str) -> Callable[[Callable[..., Outcome]], Callable[..., None]]:
    """Make a function that returns an outcome a command, which `run_command` runs.

    Its options are the function's, then --json, --verbose and --debug. What each is for, its other names and its limits
    are in `commands.json`. Of these three, the recipe's `flags`, which `main` took before Typer saw the command line,
    and a `console`, it is given those that it names itself. Raises KeyError for an option that is not in the table.
    """

    def decorate(body: Callable[..., Outcome]) -> Callable[..., None]:
        declared = inspect.signature(body, eval_str=True).parameters
        shared = {
            key: inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
            for key in ("json", "verbose", "debug")
        }

        @wraps(body)
        def run(ctx: typer.Context, **values: Any) -> None:
            options = OutputOptions(**{key: values.pop(key) for key in shared})

            def called() -> Outcome:
                made = {**vars(options), "flags": ctx.find_root().obj or []}
                if "console" in declared:
                    made["console"] = console_of("debug" if options.verbose else "info")
                return body(**values, **{key: value for key, value in made.items() if key in declared})

            run_command(name, options, called)

        own = [parameter for key, parameter in declared.items() if key not in {*shared, "flags", "console"}]
        context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        parameters = [context, *(_described(name, parameter) for parameter in (*own, *shared.values()))]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        BODIES[name] = run
        return run

    return decorate


def _described(command: str, parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter with what Typer is to know of it. A flag has no opposite: its name is written out."""
    row = PARAMETERS.get(command, {}).get(parameter.name) or PARAMETERS[""][parameter.name]
    facts = {"option": row} if isinstance(row, str) else dict(row)
    if (said := facts.pop("argument", None)) is not None:
        described = typer.Argument(help=said, **facts)
    else:
        names = facts.pop("names", f"--{parameter.name.replace('_', '-')}").split()
        described = typer.Option(*names, help=facts.pop("option"), **facts)
    return parameter.replace(annotation=Annotated[parameter.annotation, described])


def run_command(name: str, options: OutputOptions, body: Callable[[], Outcome]) -> NoReturn:
    """Run a command's body and end the process with its exit code; it never returns.

    File descriptor 1 points to stderr from here on: whatever a library prints goes there. The result alone - the
    path, or with `--json` one document, on failure too - goes to the real stdout, and only from rank 0.
    Whatever is said as a warning on stderr is in the document, once, whether the body succeeds or fails.
    Errors become one line on stderr; a traceback needs `--debug`. A stop signal ends the process wherever the body is
    (`tuner.runtime.stop`), with 130 or as `stopped_as` says, but for the stretch in which training listens itself.
    """
    stdout, warned = _take_stdout(), Warned()

    def answer() -> int:
        return _answer_signal(name, options, stdout, warned)

    try:
        with collected(warned, say), stop.heeded(), stop.answered(answer):
            outcome = body()
    except _PassedOn as passed:
        code = int(passed.document["exit_code"])
        say(f"error: {passed.document.get('command', 'the command before')} {passed.document['status']} (exit {code})")
        _finish(stdout, output.write_document(passed.document) if options.json else None, code)
    except BaseException as error:  # every way to fail ends in one line and an exit code
        if isinstance(error, SystemExit):
            raise
        _fail(name, options, error, stdout, warned)
    for warning in outcome.warnings:
        if warned.add(warning):
            say(f"warning: {warning}")
    outcome.warnings = warned.texts
    if outcome.status == "stopped" and outcome.exit_code == 0:
        outcome.exit_code = int(ExitCode.STOPPED)
    line = output.write_document(output.outcome_document(name, outcome)) if options.json else outcome.result
    _finish(stdout, line, outcome.exit_code)


def stopped_as(found: Callable[[], tuple[str, Outcome] | None]) -> AbstractContextManager[None]:
    """For the length of the block, `found` says what can be resumed after a signal: a line, and the outcome; or None.

    It is called in a signal handler: it imports nothing.
    """
    return member(_stopped, found)


_stopped: list[Callable[[], tuple[str, Outcome] | None]] = []


def _answer_signal(name: str, options: OutputOptions, stdout: int, warned: Warned) -> int:
    """Say that a signal ended the process, from within its handler; returns the exit code."""
    if options.debug:
        faulthandler.dump_traceback(2, all_threads=False)
    left = None
    with suppress(Exception):  # whatever a run's files are like
        left = _stopped[-1]() if _stopped else None
    if left is None:
        error, code = TunerError("interrupted"), int(ExitCode.INTERRUPTED)
        stop.say("error: interrupted" if _rank() == 0 else f"error on rank {_rank()}: interrupted")
        document, line = output.failure_document(name, code, KeyboardInterrupt.__name__, error), ""
    else:
        said, outcome = left
        if _rank() == 0:
            stop.say(f"{'stopped':<{LABEL_WIDTH}}{said}")
        document, line, code = output.outcome_document(name, outcome), outcome.result, outcome.exit_code
    document["warnings"] = warned.texts
    if _rank() == 0 and (options.json or line):
        _write_line(stdout, output.write_document(document) if options.json else line)
    return code


def _fail(name: str, options: OutputOptions, error: BaseException, stdout: int, warned: Warned) -> NoReturn:
    if options.debug:
        traceback.print_exception(error, file=sys.stderr)
    known = as_tuner_error(error)
    code = int(ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else known.exit_code)
    report_error(known, _rank())
    document = output.failure_document(name, code, type(error).__name__, known)
    document["warnings"] = warned.texts
    _finish(stdout, output.write_document(document) if options.json else None, code)


def report_error(error: TunerError, rank: int = 0) -> None:
    """Write an error and its hint to stderr."""
    say(f"error: {error.message}" if rank == 0 else f"error on rank {rank}: {error.message}")
    if error.hint:
        say(f"  hint: {error.hint}")


def print_failure(name: str, error: TunerError, json: bool) -> int:
    """Report an error that came before a command's body, in the command's form; return its exit code."""
    report_error(error)
    if json:
        document = output.failure_document(name, int(error.exit_code), type(error).__name__, error)
        _write_line(1, output.write_document(document))
    return int(error.exit_code)


def _read_stdin() -> str:
    line = _line()
    return _path_in(_sound(line)) if line.startswith("{") else line


def _path_in(document: dict[str, Any]) -> str:
    path = document["artifacts"].get("path")
    if not isinstance(path, str) or not path:
        raise RecipeError(f"the document of {document.get('command')} on stdin names no path")
    return path


def _recipe_on_stdin() -> str | RecipeText:
    """The recipe on stdin, or the path of one: a line alone that is no key with its value."""
    from tuner.config.load import RecipeText

    text = sys.stdin.read((1 << 20) + 1)
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise RecipeError("stdin holds no recipe: the command before printed no path", hint="its error is above")
    if len(lines) == 1 and (document := output.read_document(lines[0])) is not None:
        return _path_in(_ok(document))
    is_path = len(lines) == 1 and ": " not in lines[0] and not lines[0].rstrip().endswith(":")
    return lines[0].strip() if is_path else RecipeText(text)


def _document(source: str) -> dict[str, Any]:
    """The document in a file or on stdin."""
    if source == "-":
        return _sound(_line())
    try:
        with Path(source).expanduser().open(encoding="utf-8") as file:
            document = output.read_document(file.readline(1 << 20).strip())
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{source}: {error}", hint=_OVERRIDES) from None
    if document is None:
        raise RecipeError(f"{source}: holds no document of tuner", hint=_OVERRIDES)
    return _ok(document)


def _line() -> str:
    line = sys.stdin.readline(1 << 20).strip()
    if not line:
        raise RecipeError("the command before printed no path", hint="its error is above")
    return line


def _sound(line: str) -> dict[str, Any]:
    """The document on a line. Raises _PassedOn for one of a command that failed."""
    document = output.read_document(line)
    if document is None:
        raise RecipeError("stdin holds neither a path nor a document of tuner", hint="use --json on the command before")
    return _ok(document)


def _ok(document: dict[str, Any]) -> dict[str, Any]:
    """A document of a command that succeeded. Raises _PassedOn for one of a command that failed."""
    if document["status"] != "ok":
        raise _PassedOn(document)
    return document


def _take_stdout() -> int:
    sys.stdout = sys.stdout or sys.stderr  # there is none when a caller closed it
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:
        saved = os.open(os.devnull, os.O_WRONLY)
    os.set_inheritable(saved, False)
    output.note_stdout(saved)
    os.dup2(2, 1)
    return saved


def _rank() -> int:
    try:
        return RankInfo.from_environment().rank
    except TunerError:
        return 0


def _finish(stdout: int, line: str | None, code: int) -> NoReturn:
    stop.over()
    try:  # what a closed terminal did not take would else fail, and change the exit code, when Python ends
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    if line is not None and _rank() == 0:
        try:
            _write_line(stdout, line)
        except OSError as error:
            report_error(MachineError(f"cannot write the result to stdout: {error.strerror}"))
            code = code or int(ExitCode.ENVIRONMENT)
    os.close(stdout)
    raise SystemExit(code)


def _write_line(descriptor: int, line: str) -> None:
    """Write a line; a reader that has gone away is its own business."""
    data = (line if line.endswith("\n") else line + "\n").encode("utf-8", "surrogateescape")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def say(text: str, indent: int = 2) -> None:
    """Write lines to stderr: on a terminal broken between words, with what follows indented by so much more."""
    text = output.between_words(text, output.terminal_columns(sys.stderr), indent)
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    try:
        print(shown, file=cast(Any, sys.stderr), flush=True)
    except OSError:  # its reader is gone, or its terminal
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
