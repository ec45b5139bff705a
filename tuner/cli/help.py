"""`tuner help`: commands, the recipe's keys and exit codes, explained."""

import os
import shutil
import sys
import textwrap

from tuner.cli.app import help_text
from tuner.cli.command import Outcome, command
from tuner.cli.commands import COMMANDS
from tuner.cli.output import listed
from tuner.config.fields import Field, fields, find, item_fields
from tuner.config.other_tools import foreign
from tuner.errors import ExitCode, RecipeError

TOPICS = ("recipe", "exit-codes")
EXIT_CODES = {
    ExitCode.OK: "done; train and resume: the run is finished",
    ExitCode.BUG: "a bug in tuner: run the command again with --debug and report what it shows",
    ExitCode.USAGE: "the recipe, a flag, an argument or your own code cannot be used as it is",
    ExitCode.DATA: "rows, prepared data, a checkpoint or an export are wrong or damaged",
    ExitCode.ENVIRONMENT: "the machine lacks something: disk, device, library, permission, network, a free lock",
    ExitCode.MEMORY: "out of memory, predicted or real",
    ExitCode.VERIFICATION: "an artifact was written or read and does not equal what it was made from",
    ExitCode.DIVERGED: "training gave a loss or gradient that is not finite",
    ExitCode.STOPPED: "stopped on purpose with a checkpoint: tuner resume RUN continues",
    ExitCode.INTERRUPTED: "interrupted, with nothing new to resume from",
}
"""What each exit code of a command means."""


@command("help")
def help(  # noqa: A001 - the command's name
    topic: list[str] | None = None
) -> Outcome:
    """Explain a command, a section of the recipe, one of its keys, or the exit codes."""
    words = [word for text in topic or () for word in text.split()]
    return Outcome(explained(words), is_text=True)


def explained(words: list[str]) -> str:
    """The text about a topic. Raises RecipeError for one that is not there."""
    if words and len(words) == 1 and words[0] in COMMANDS and any(key.startswith(f"{words[0]}.") for key in fields()):
        return f"{help_text(words).rstrip()}\n\nKeys of the recipe's section: tuner help {words[0]}."
    if not words or words[0] in COMMANDS:
        return help_text(words)
    name = words[0].lstrip("-").removesuffix(".").removesuffix(".*")
    if name == "exit-codes":
        return "\n".join(f"{int(code):>3}  {text}" for code, text in EXIT_CODES.items())
    if name == "recipe":
        return flags_of(None)
    if any(key.startswith(f"{name}.") for key in fields()):
        return flags_of(name)
    if item_fields(name):
        return _items(name)
    field = find(name)
    if field is None:
        from tuner.config.advice import of_unknown  # with the tables of other tools' keys

        raise RecipeError(f"no help on {' '.join(words)}", hint=of_unknown(name).removeprefix("unknown; "))
    return _one(field)


def flags_of(section: str | None) -> str:
    """The recipe's flags of one section, or of all, as they are printed for this terminal."""
    from tuner.cli.flags import flags_text  # which loads cyclopts: help of a command does without

    return flags_text(section, _width(), sys.stderr.isatty() and not os.environ.get("NO_COLOR"))


def _one(field: Field) -> str:
    """Everything that is known of a key, a line for each thing."""
    default = field.default_text + "".join(f"; {text} for {kind}" for kind, text in field.others)
    rows = [("allowed", field.allowed), ("default", default)]
    if field.kinds:
        rows.append(("only for", f"{field.section}.kind {' or '.join(field.kinds)}"))
    rows += [("in a recipe", _in_yaml(field)), ("as a flag", f"--{field.key} VALUE")]
    if others := foreign().get(field.key):
        rows.append(("elsewhere", ", ".join(others)))
    sentence = textwrap.fill(field.sentence, _width() - 2, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([field.key, sentence, listed({f"  {label:<12}": text for label, text in rows}, _width())])


def _in_yaml(field: Field) -> str:
    section, _, name = field.key.rpartition(".")
    return f"{section}: {{{name}: VALUE}}" if section else f"{name}: VALUE"


def _items(name: str) -> str:
    """The keys of each item of a list, such as those of data.train."""
    keys = {
        f"  {key:<12}": f"{field.sentence} ({field.allowed}; default {field.default_text})"
        for key, field in item_fields(name).items()
    }
    head = f"{name}\n  {fields()[name].sentence}\n\n  Keys of each item, as --{name}.0.KEY VALUE:\n"
    return head + listed(keys, _width())


def _width() -> int:
    return min(100, shutil.get_terminal_size().columns)
