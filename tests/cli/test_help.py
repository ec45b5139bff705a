"""Help fits on a screen, names what there is, and says what was meant.

Flags are split off before Typer reads the line, whatever their order, and are named and explained. A shell is offered
what goes by the words before the cursor; bash is asked as it asks.
"""

import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.contracts.test_surface import commands
from tests.fixtures import forked
from tests.fixtures.tables import cases
from tests.rundir import made
from tuner.cli import main
from tuner.cli.app import help_text, split
from tuner.cli.commands import COMMANDS, EXAMPLES, GROUPED, GROUPS, MEANT, RECIPE_KEYS, TAKES_RECIPE, WITH_FLAGS
from tuner.cli.complete import offers
from tuner.cli.flags import flags_app, print_flags
from tuner.cli.help import EXIT_CODES, explained
from tuner.cli.recipes import listed
from tuner.cli.shells import SHELLS, install, script_of, shell_of
from tuner.config.fields import fields, find
from tuner.config.shipped import shipped_recipes, summary
from tuner.errors import ExitCode, RecipeError

KNOWN: dict[str, Any] = dict(commands())
EVERY = ["", *COMMANDS, *(name for name in KNOWN if " " in name)]


def test_the_recipes_keys_in_help_are_those_of_its_model() -> None:
    """Help has them by heart: it would load the model for these two lines."""
    sections = dict.fromkeys(key.partition(".")[0] for key in fields() if "." in key)
    others = [key for key in fields() if "." not in key and key not in {*sections, "version"}]
    assert [", ".join(sections), ", ".join(others)] == RECIPE_KEYS


@pytest.mark.parametrize("name", EVERY)
def test_help_is_at_most_60_lines_of_80_columns(name: str) -> None:
    lines = help_text(name.split()).splitlines()
    assert len(lines) <= 60
    assert [line for line in lines if len(line) > 79] == []
    assert lines[0].startswith(f"Usage: tuner {name}".rstrip())
    assert re.search(r"<\w+>", "".join(lines)) is None, "types are words that people know"
    assert "Examples:" in lines
    said = ("a section's keys: --optimizer.lr 3e-4", "one key", "every key")
    places = [line.rindex(each) for each in said for line in lines if line.endswith(f"  {each}")]
    assert (len(places), len(set(places))) == ((3, 1) if name in WITH_FLAGS else (0, 0))


@pytest.mark.parametrize("name", EVERY)
def test_examples_are_command_lines_that_the_command_takes(name: str) -> None:
    assert EXAMPLES[name], name
    for line in EXAMPLES[name]:
        words = shlex.split(line.split("  #")[0].split(" > ")[0].split(" < ")[0])
        assert words[0] == "tuner"
        command = words[1]
        rest, flags = split(words[2:], command in TAKES_RECIPE)
        full = f"{command} {rest.pop(0)}" if command in GROUPS else command
        assert not name or full == name or full.startswith(f"{name} ")
        assert all(find(key) is not None and text for key, text in flags), line
        known = {option for parameter in KNOWN[full].params for option in parameter.opts}
        assert {word for word in rest if word.startswith("-")} <= known, line


def test_every_command_is_in_one_group_of_the_first_page() -> None:
    grouped = [name for names in GROUPED.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert set(COMMANDS) <= set(grouped)


@pytest.mark.parametrize("words", [["-h"], ["train", "-h"], ["runs", "show", "-h"]])
def test_help_is_short_for_all(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(words) == 0
    assert capsys.readouterr().out.startswith("Usage: tuner")


@pytest.mark.parametrize(("word", "meant"), cases(__file__, "an_unknown_command_is_answered"))
def test_an_unknown_command_is_answered(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([word, "--json"]) == 2
    shown = capsys.readouterr().err
    assert f"error: no command '{word}'" in shown
    assert f"hint: {meant}" in shown


def test_what_is_meant_is_there() -> None:
    for command in dict.fromkeys(MEANT.values()):
        assert command in KNOWN or command in COMMANDS or command in ("chat", "push", "doctor"), command


@pytest.mark.parametrize(("words", "said"), cases(__file__, "an_unknown_option_is_answered"))
def test_an_unknown_option_is_answered(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(words) == 2
    assert f"error: {said}\n" in capsys.readouterr().err


def test_topics() -> None:
    assert explained(["runs", "show"]) == help_text(["runs", "show"])
    assert explained(["--optimizer.lr"]).startswith("optimizer.lr\n  Peak learning rate")
    assert "learning_rate" in explained(["optimizer.lr"])
    assert "adapter.kind lora or dora" in explained(["adapter.r"])
    assert "--data.train.0.KEY" in explained(["data.train"]) and "weight" in explained(["data.train"])
    shown = explained(["optimizer"])
    assert [key for key in fields() if key.startswith("optimizer.") and f"--{key} " not in shown] == []
    assert "--schedule.warmup" not in shown
    assert "--schedule.warmup" in explained(["recipe"])
    with pytest.raises(RecipeError, match="no help on optimzer") as refused:
        explained(["optimzer"])
    assert refused.value.hint == "did you mean optimizer?"


@pytest.mark.parametrize("name", ["eval", "train", "profile", "data"])
def test_a_command_with_the_name_of_a_section_leads_to_its_keys(name: str) -> None:
    assert explained([name]).splitlines()[-1] == f"Keys of the recipe's section: tuner help {name}."
    assert f"--{name}." in explained([f"{name}."])
    assert "tuner help init." not in explained(["init"])


def test_recipes_are_listed_in_the_terminals_columns() -> None:
    lines = {name: summary(path) for name, path in shipped_recipes().items()}
    shown = listed(lines, 80).splitlines()
    assert max(map(len, shown)) <= 80 < max(map(len, listed(lines, 10**6).splitlines()))
    assert [line.split()[0] for line in shown if not line.startswith(" ")] == list(lines)


def test_exit_codes_are_explained() -> None:
    assert set(EXIT_CODES) == set(ExitCode)
    assert " 75  stopped" in explained(["exit-codes"])


@pytest.mark.parametrize(("words", "rest", "flags"), cases(__file__, "splitting"))
def test_splitting(words: list[str], rest: list[str], flags: list[list[str | None]]) -> None:
    assert split(words, takes_recipe=True) == (rest, [(key, value) for key, value in flags])


def test_only_commands_with_a_recipe_take_its_top_keys() -> None:
    assert split(["generate", "--seed", "3"], takes_recipe=False) == (["generate", "--seed", "3"], [])


@given(st.lists(st.sampled_from(["train", "r.yaml", "-v", "--json", "--debug"]), max_size=6), st.data())
def test_flags_may_stand_anywhere(words: list[str], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(words)))
    line = [*words[:place], "--optimizer.lr", "1e-5", *words[place:]]
    assert split(line, takes_recipe=True) == (words, [("optimizer.lr", "1e-5")])


def test_every_key_has_a_flag_with_its_sentence_and_default() -> None:
    stream = io.StringIO()
    print_flags(Console(file=stream, width=600, color_system=None))
    text = stream.getvalue()
    for field in fields().values():
        if field.key == "version":
            continue
        line = next(line for line in text.splitlines() if f"--{field.key} " in line)
        assert field.sentence in line, field.key
        assert field.required or f"[default: {field.default_text}]" in line, field.key


def test_every_key_has_a_sentence() -> None:
    for field in fields().values():
        assert field.sentence.endswith("."), field.key
        assert field.allowed, field.key


def test_cyclopts_knows_the_names() -> None:
    names = {name for argument in flags_app().assemble_argument_collection() for name in argument.names}
    assert names == {f"--{key}" for key in fields() if key != "version"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two runs, a recipe, a file and a directory."""
    for name in ("first", "second"):
        made.run(tmp_path / "runs" / name)
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offered(line: str) -> list[str]:
    """What is offered at the end of a line, whose last word is what is typed of it."""
    *words, incomplete = line.split(" ")
    return [text for text, _ in offers(words, incomplete)]


@pytest.mark.parametrize(("line", "expected"), cases(__file__, "offers"))
def test_offers(line: str, expected: list[str], place: Path) -> None:
    assert sorted(offered(line)) == sorted(expected)


def test_all_commands_recipes_and_keys_are_offered(place: Path) -> None:
    assert set(COMMANDS) <= set(offered(""))
    assert set(shipped_recipes()) <= set(offered("train "))
    assert {f"--{key}" for key in fields() if key != "version"} <= set(offered("profile --"))
    assert set(offered("--")) == {"--version", "--help", "--install-completion", "--show-completion"}


def test_a_key_is_completed_without_torch(place: Path) -> None:
    code = (
        "import sys; from tuner.cli.complete import answer; print(answer(['train', '--optimizer.l']));"
        "sys.exit(bool({'torch', 'transformers', 'pyarrow', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={"PYTHONPATH": str(forked.ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--optimizer.lr\tPeak learning rate")


def test_bash_asks_and_offers(place: Path) -> None:
    (place / "bin").mkdir()
    program = place / "bin" / "tuner"
    program.write_text(f"#!/bin/sh\nPYTHONPATH={forked.ROOT} exec {sys.executable} -m tuner \"$@\"\n")
    program.chmod(0o755)
    lines = [
        script_of("bash"), f"PATH={place / 'bin'}:$PATH", "COMP_WORDS=(tuner train --optimizer.wei)", "COMP_CWORD=2",
        "_tuner_completion tuner", 'printf "%s\\n" "${COMPREPLY[@]}"',
        "COMP_WORDS=(tuner resume '')", "_tuner_completion tuner", 'printf "%s\\n" "${COMPREPLY[@]:0:2}" | sort',
    ]  # fmt: skip
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "--norc", "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["--optimizer.weight_decay", "first", "second"]


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_are_shown_and_installed_once(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--show-completion", "--shell", shell]) == 0
    assert capsys.readouterr().out == script_of(shell)
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n"], input=script_of(shell), text=True, check=False).returncode == 0
    (tmp_path / f".{shell}rc").write_text("alias a=b")
    written = install(shell, tmp_path)
    assert written[0].read_text() == script_of(shell)
    if shell != "fish":
        begins = (tmp_path / f".{shell}rc").read_text()
        assert begins.startswith("alias a=b\n") and begins.count("\n") == 2
    assert install(shell, tmp_path) == written[:1]


def test_the_shell_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert shell_of(None) == "zsh"
    assert shell_of("fish") == "fish"
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    with pytest.raises(RecipeError, match="no completion for the shell 'tcsh'"):
        shell_of(None)
