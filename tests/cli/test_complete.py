"""What a shell is offered, by the words before the cursor; and bash, asked as it asks."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures import forked
from tests.fixtures.tables import cases
from tests.rundir import made
from tuner.cli import main
from tuner.cli.commands import COMMANDS
from tuner.cli.complete import offers
from tuner.cli.shells import SHELLS, install, script_of, shell_of
from tuner.config.fields import fields
from tuner.config.shipped import shipped_recipes
from tuner.errors import RecipeError


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
