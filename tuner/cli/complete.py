"""What a shell offers to complete: commands, options, runs, recipes, and keys of the recipe with their values.

`main` answers `tuner __complete WORD... INCOMPLETE`, which the scripts of :mod:`tuner.cli.shells` ask.
Nothing needs torch.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from tuner.cli.app import build, split
from tuner.cli.commands import COMMANDS, GROUPS, WITH_FLAGS

ASKED = "__complete"
"""The word with which a shell asks."""

Offer = tuple[str, str]
"""What to type, and what it is."""


def answer(words: Sequence[str]) -> str:
    """The answer to a shell, a line for each offer: what to type, a tab, what it is."""
    lines = {text: f"{text}\t{said}" for text, said in offers(words[:-1], words[-1] if words else "")}
    return "\n".join(lines.values())


def offers(words: Sequence[str], incomplete: str) -> list[Offer]:
    """What may follow the words of a command line, and begins as `incomplete` does."""
    name = next((word for word in words if not word.startswith("-")), "")
    if name not in COMMANDS:
        return _starting([*COMMANDS.items(), *ROOT] if not name else [], incomplete)
    root: Any = typer.main.get_command(build(name))  # type: ignore[arg-type]
    command = root.commands[name]
    given = list(words[list(words).index(name) + 1 :])
    if name in GROUPS:
        below = next((word for word in given if word in command.commands), None)
        if below is None:
            return _starting([(each, item.help or "") for each, item in command.commands.items()], incomplete)
        name, command, given = f"{name} {below}", command.commands[below], given[given.index(below) + 1 :]
    return list(_of_command(name, command, given, incomplete))


def _of_command(name: str, command: Any, given: Sequence[str], incomplete: str) -> Iterator[Offer]:
    """What may follow within a command: a value, an option or key of the recipe, or an argument."""
    rest, flags = split(given, takes_recipe=True) if name in WITH_FLAGS else (list(given), [])
    if flags and flags[-1][1] is None and given[-1].startswith("--"):
        yield from values(flags[-1][0], incomplete)
        return
    options = {text: option for option in command.params for text in option.opts if option.param_type_name == "option"}
    last = options.get(rest[-1]) if rest else None
    if last is not None and not last.is_flag:
        yield from _of_parameter(last, incomplete)
    elif incomplete.startswith("-"):
        free = [(text, str(each.help or "")) for text, each in options.items() if text not in rest or each.multiple]
        yield from _starting([*free, ("--help", "Show this message and exit.")], incomplete)
        yield from keys(incomplete) if name in WITH_FLAGS else ()
    else:
        takes = [text for text, option in options.items() if not option.is_flag]
        pairs = pairwise(["", *rest])
        placed = [word for before, word in pairs if not word.startswith("-") and before not in takes]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        if arguments and (len(placed) < len(arguments) or arguments[-1].nargs != 1):
            yield from _of_parameter(arguments[min(len(placed), len(arguments) - 1)], incomplete)


def _of_parameter(parameter: Any, incomplete: str) -> list[Offer]:
    """What an option or an argument may be."""
    described = parameter.type_descriptor
    if described.is_choice and described.choices is not None:
        return _starting([(str(getattr(choice, "value", choice)), "") for choice in described.choices], incomplete)
    named = KINDS.get(str(parameter.metavar or parameter.name).strip("[].").lower())
    return _paths(incomplete) if named is None else named(incomplete)


def _starting(known: Sequence[Offer], incomplete: str) -> list[Offer]:
    return [(text, said) for text, said in known if text.startswith(incomplete)]


def runs(incomplete: str) -> list[Offer]:
    """The runs under ./runs by name, newest first, and directories that begin as `incomplete` does."""
    return [*_runs(incomplete), *_paths(incomplete, only_directories=True)]


def topics(incomplete: str) -> list[Offer]:
    """What `tuner help` explains."""
    from tuner.cli.help import TOPICS

    sentences = _sentences()
    sections = dict.fromkeys(key.partition(".")[0] for key in sentences)
    found = [*COMMANDS.items(), *((name, "") for name in (*TOPICS, *sections))]
    found += sentences.items() if "." in incomplete else ()
    return _starting(found, incomplete)


def resumes(incomplete: str) -> list[Offer]:
    """How `tuner train --resume` may go about it."""
    return [*_starting([("auto", ""), ("must", ""), ("never", "")], incomplete), *runs(incomplete)]


def resets(incomplete: str) -> list[Offer]:
    """What `--reset` takes."""
    words = ("optimizer", "optimizer.state", "optimizer.arguments", "schedule", "data", "rng")
    before, comma, _ = incomplete.rpartition(",")
    return _starting([(f"{before}{comma}{word}", "") for word in words], incomplete)


def recipes(incomplete: str) -> list[Offer]:
    """Recipes in files, and those that ship."""
    files = [(text, said) for text, said in _paths(incomplete) if text.endswith(("/", ".yaml", ".yml"))]
    return [*files, *shipped(incomplete)]


def shipped(incomplete: str) -> list[Offer]:
    """The recipes that ship."""
    from tuner.config.shipped import shipped_recipes, summary

    return _starting([(name, summary(path)) for name, path in shipped_recipes().items()], incomplete)


def keys(incomplete: str) -> list[Offer]:
    """The recipe's keys as flags."""
    if not incomplete.startswith("--"):
        return []
    return _starting([(f"--{key}", sentence) for key, sentence in _sentences().items() if key != "version"], incomplete)


def _sentences() -> dict[str, str]:
    """What each key of the recipe is for."""
    from tuner.config.fields import fields  # which commands and options do without

    return {key: field.sentence for key, field in fields().items()}


def values(key: str, incomplete: str) -> list[Offer]:
    """What may be written for a key: its words, or files for a path."""
    from tuner.config.fields import find

    field = find(key.replace("-", "_"))
    words = [] if field is None or field.value_type is None else field.value_type.every_word()
    return _starting([(word, "") for word in words], incomplete) or _paths(incomplete)


def _runs(incomplete: str) -> list[Offer]:
    from tuner.rundir.run_json import is_run  # which commands and options do without

    try:
        found = sorted((entry for entry in Path("runs").iterdir() if is_run(entry)), key=_modified, reverse=True)
    except OSError:
        return []
    return [(path.name, "run") for path in found if path.name.startswith(incomplete)]


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _paths(incomplete: str, only_directories: bool = False) -> list[Offer]:
    """Files and directories that begin with a text; hidden ones only where the text asks for them."""
    directory, start = os.path.split(incomplete)
    try:
        entries = sorted(os.scandir(os.path.expanduser(directory) or "."), key=lambda entry: entry.name)
    except OSError:
        return []
    found = []
    for entry in entries:
        if not entry.name.startswith(start) or (entry.name.startswith(".") and not start.startswith(".")):
            continue
        is_directory = entry.is_dir()
        if is_directory or not only_directories:
            found.append((os.path.join(directory, entry.name) + ("/" if is_directory else ""), ""))
    return found


KINDS: dict[str, Callable[[str], list[Offer]]] = {
    "run": runs,
    "model": runs,
    "recipe": recipes,
    "name": lambda start: [offer for offer in recipes(start) if not offer[0].endswith((".yaml", ".yml", "/"))],
    "topic": topics,
    "auto|must|never|path": resumes,
    "part,": resets,
    "text": lambda incomplete: [],
    "n": lambda incomplete: [],
}
"""What completes an argument or option with this metavar or name; files complete the others."""
ROOT: list[Offer] = [
    ("--version", "Print the version."), ("--help", "Show this message and exit."),
    ("--install-completion", "Install completion for the shell."), ("--show-completion", "Print the shell's script."),
]  # fmt: skip
