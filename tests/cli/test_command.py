"""One result on stdout, everything else on stderr; documents, exit codes and `-`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.fixtures import forked
from tests.fixtures.commands import document
from tests.fixtures.tables import cases
from tuner.cli.output import SCHEMA_PATH, Outcome, failure_document, outcome_document, read_document, write_document
from tuner.errors import TunerError

COMMAND = """
import os, sys
from pathlib import Path
from tuner.cli.command import Outcome, OutputOptions, input_path, run_command
from tuner import errors
options = OutputOptions(json="--json" in sys.argv, verbose="-v" in sys.argv, debug="--debug" in sys.argv)
def body():
    print("a library prints")
    os.system("echo a child prints")
    {body}
run_command("test", options, body)
"""


def run(body: str, *words: str, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    code = COMMAND.replace("{body}", body)
    command = [sys.executable, "-c", code, *words]
    return forked.run(command, env=os.environ | (env or {}), input=stdin, capture_output=True, text=True, timeout=60)


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(SCHEMA_PATH.read_text()))


def test_only_the_result_reaches_stdout() -> None:
    done = run("return Outcome('/a/run', warnings=['two rows skipped'])")
    assert (done.returncode, done.stdout) == (0, "/a/run\n")
    for text in ("a library prints", "a child prints", "warning: two rows skipped"):
        assert text in done.stderr


def test_a_document_says_it_all() -> None:
    body = (
        "return Outcome('/a', artifacts={'n': Path('/b')}, metrics={'loss': 1.5, 'bad': float('nan')}, next='tuner x')"
    )
    value = document(run(body, "--json", "-v"))
    assert value == cases(__file__, "a_document")


@pytest.mark.parametrize(("error", "code", "status"), cases(__file__, "errors_have_their_exit_codes"))
def test_errors_have_their_exit_codes(error: str, code: int, status: str) -> None:
    done = run(f"raise {error}", "--json")
    value = document(done, code)
    assert value["status"] == status
    assert "Traceback" not in done.stderr
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1
    if "errors." in error:
        assert value["error"] == {"type": error.split("(", maxsplit=1)[0].split(".")[1], "message": "m", "hint": "h"}
        assert "hint: h" in done.stderr
    if code == 1:
        assert "--debug" in done.stderr


@pytest.mark.parametrize("error", ["errors.DataError('m', 'h')", "ZeroDivisionError('oops')"])
def test_a_failure_leaves_stdout_empty(error: str) -> None:
    done = run(f"raise {error}")
    assert (done.stdout, "error: " in done.stderr) == ("", True)


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in run("raise ZeroDivisionError('oops')", "--debug").stderr


def test_a_stop_that_was_saved_exits_75_with_its_path() -> None:
    done = run("return Outcome('/a/run', status='stopped', next='tuner resume /a/run')", "--json")
    assert document(done, 75)["artifacts"]["path"] == "/a/run"


def test_only_rank_0_speaks() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    done = run("return Outcome('/a/run')", "--json", env=env)
    assert (done.returncode, done.stdout) == (0, "")


READ = "return Outcome(str(input_path('-')))"


def test_a_path_or_a_document_comes_from_stdin() -> None:
    assert run(READ, stdin="/a/run\n").stdout == "/a/run\n"
    line = write_document(outcome_document("train", Outcome("/b/run")))
    assert run(READ, stdin=line + "\n").stdout == "/b/run\n"
    assert run(READ, stdin="here\n").stdout == f"{Path.cwd()}/here\n"


@pytest.mark.parametrize(
    ("stdin", "expected"), [("", "printed no path"), ("\n", "printed no path"), ("{}\n", "neither")]
)
def test_an_unusable_stdin_is_a_usage_error(stdin: str, expected: str) -> None:
    done = run(READ, "--json", stdin=stdin)
    assert document(done, 2)["status"] == "failed"
    assert expected in done.stderr


@pytest.mark.parametrize("code", [5, 7, 75])
def test_a_failed_document_is_passed_on(code: int) -> None:
    line = write_document(failure_document("train", code, "SomeError", TunerError("because")))
    done = run(READ, "--json", stdin=line + "\n")
    assert (done.returncode, done.stdout.strip()) == (code, line)
    quiet = run(READ, stdin=line + "\n")
    assert (quiet.returncode, quiet.stdout) == (code, "")


def test_a_stopped_document_with_a_path_is_passed_on_too() -> None:
    line = write_document(outcome_document("train", Outcome("/a", status="stopped", exit_code=75)))
    assert run(READ, "--json", stdin=line).returncode == 75


@pytest.mark.parametrize(
    "line", ["[]", "{", '{"schema_version": 2}', "[" * 9999, "null", '{"schema_version": 1, "status": "ok"}']
)
def test_what_is_no_document(line: str) -> None:
    assert read_document(line) is None


def test_a_reader_that_has_gone_away_is_no_bug() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = COMMAND.replace("{body}", "return Outcome('x' * 100000)")
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_control_characters_do_not_reach_the_terminal() -> None:
    done = run(r"raise errors.DataError('bad \x1b[31m name')")
    assert "\x1b" not in done.stderr
    assert r"\x1b[31m" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_an_interrupt_ends_with_130(number: signal.Signals) -> None:
    code = COMMAND.replace("{body}", "import time; print('up', flush=True); time.sleep(30)")
    command = [sys.executable, "-c", code, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        while "up" not in child.stderr.readline():
            time.sleep(0.01)
        child.send_signal(number)
        out, _ = child.communicate(timeout=30)
    assert child.returncode == 130
    assert json.loads(out)["exit_code"] == 130


def test_a_full_or_closed_stdout_is_answered() -> None:
    code = COMMAND.replace("{body}", "return Outcome('/a/run')")
    for redirection, expected in ((">/dev/full", 4), (">&-", 0)):
        command = ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, code]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == expected, done.stderr
        assert "Traceback" not in done.stderr


def test_a_failure_outside_a_body_is_one_line_too(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.cli import main

    def broken(command: str) -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(main, "build", broken)
    assert main.run(["train", "r.yaml", "--json"]) == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["error"]["message"] == "ZeroDivisionError: oops"
    assert err.startswith("error: ZeroDivisionError: oops\n")
