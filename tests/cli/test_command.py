"""One result on stdout, everything else on stderr; documents, exit codes and `-`.

And real command lines: help, init, config and recipes.
"""

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

from tests.fixtures import commands, forked, trainings
from tests.fixtures.commands import document
from tests.fixtures.tables import cases
from tuner.cli.commands import COMMANDS, GROUPS, WITH_FLAGS
from tuner.cli.output import SCHEMA_PATH, Outcome, failure_document, outcome_document, read_document, write_document
from tuner.cli.recipes import copy_named
from tuner.config.load import ReadRecipe, load_recipe, recipe_dict
from tuner.config.shipped import EXAMPLES, shipped_recipes
from tuner.errors import TunerError
from tuner.setup.check import check_recipe

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


MESSAGES = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n'


def tuner(*words: str, cwd: Path, stdin: str = "", code: int | None = None) -> subprocess.CompletedProcess[str]:
    return commands.tuner(*words, cwd=cwd, stdin=stdin, code=code, COLUMNS="120", NO_COLOR="1")


def test_the_program_names_its_commands(tmp_path: Path) -> None:
    text = tuner("--help", cwd=tmp_path).stdout
    for name, line in COMMANDS.items():
        assert f" {name} " in text
        assert line in text
    assert tuner("--version", cwd=tmp_path).stdout.startswith("tuner ")
    assert tuner(cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - GROUPS))
def test_every_command_explains_itself_and_has_the_common_options(name: str, tmp_path: Path) -> None:
    done = tuner(name, "--help", cwd=tmp_path, code=0)
    for flag in ("--json", "--verbose", "-v", "--debug"):
        assert flag in done.stdout
    assert ("--optimizer.lr" in done.stdout) == (name in WITH_FLAGS)


def test_a_wrong_choice_is_answered_with_the_right_ones(tmp_path: Path) -> None:
    done = tuner("train", "--resume", "sometimes", cwd=tmp_path, code=2)
    assert "error: --resume sometimes: not one of auto, must, never, and there is no such directory" in done.stderr
    assert tuner("generate", "x", "--compare", "y", cwd=tmp_path).returncode == 2


def test_init_writes_a_recipe_that_checks(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(MESSAGES * 3)
    done = tuner("init", "-m", "owner/name", "-d", "rows.jsonl", cwd=tmp_path, code=0)
    assert "3 records, messages" in done.stderr
    (tmp_path / "recipe.yaml").write_text(done.stdout)
    checked = tuner("config", "check", cwd=tmp_path)
    assert checked.stdout == f"{tmp_path / 'recipe.yaml'}\n"
    assert load_recipe(tmp_path / "recipe.yaml").recipe.data.train[0].path == str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("name", EXAMPLES)
def test_init_writes_rows_for_who_has_none(name: str, tmp_path: Path) -> None:
    done = tuner("init", "--example", name, cwd=tmp_path)
    assert done.returncode == 0 and f"wrote     {tmp_path / name}.jsonl: {EXAMPLES[name].what}" in done.stderr
    (tmp_path / "recipe.yaml").write_text(done.stdout)
    recipe = load_recipe(tmp_path / "recipe.yaml").recipe
    assert recipe.model.name_or_path == EXAMPLES[name].model
    assert Path(recipe.data.train[0].path) == tmp_path / f"{name}.jsonl"
    assert tuner("init", "--example", name, cwd=tmp_path).returncode == 0, "the same rows are there"
    (tmp_path / f"{name}.jsonl").write_text("{}")
    again = tuner("init", "--example", name, cwd=tmp_path)
    assert again.returncode == 2 and "exists already, with other rows" in again.stderr


@pytest.mark.parametrize(("flags", "said"), cases(__file__, "init_says_what_it_lacks"))
def test_init_says_what_it_lacks(flags: list[str], said: str, tmp_path: Path) -> None:
    done = tuner("init", *flags, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr


@pytest.mark.parametrize(("name", "text", "form"), cases(__file__, "init_knows_the_forms"))
def test_init_knows_the_forms(name: str, text: str, form: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert form in tuner("init", "-m", "owner/name", "-d", name, cwd=tmp_path).stdout


@pytest.mark.parametrize(("text", "expected"), [*cases(__file__, "which_row_is_wrong"), ("[" * 99999, "a.jsonl:1:")])
def test_init_says_which_row_is_wrong(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(text.encode("latin-1"))
    done = tuner("init", "-m", "owner/name", "-d", "a.jsonl", "--json", cwd=tmp_path, code=3)
    assert expected in done.stderr
    assert json.loads(done.stdout)["exit_code"] == 3


def test_init_passes_over_a_bad_row_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"prompt": "a"}\n')
    done = tuner("init", "-m", "owner/name", "-d", "a.jsonl", "--json", cwd=tmp_path)
    (warning,) = json.loads(done.stdout)["warnings"]
    assert done.returncode == 0 and warning in done.stderr
    assert warning.startswith("1 row cannot be read; the first: ") and "a.jsonl:2:1: no messages or" in warning


def test_init_wants_rows_that_are_there(tmp_path: Path) -> None:
    assert tuner("init", "-m", "owner/name", "-d", "nowhere", cwd=tmp_path).returncode == 3


def test_config_show_prints_a_recipe_that_loads_to_the_same(tmp_path: Path) -> None:
    done = tuner("config", "show", "--optimizer.lr", "3e-4", "tiny_pretrain_cpu", cwd=tmp_path)
    (tmp_path / "shown.yaml").write_text(done.stdout)
    shown = load_recipe(tmp_path / "shown.yaml", cwd=tmp_path).recipe
    assert shown.optimizer.lr == 3e-4
    first = recipe_dict(load_recipe("tiny_pretrain_cpu", cwd=tmp_path).recipe)
    assert recipe_dict(shown) == first | {"optimizer": first["optimizer"] | {"lr": 3e-4}}


def test_config_show_says_where_values_come_from(tmp_path: Path) -> None:
    text = tuner("config", "show", "tiny_pretrain_cpu", "--origin", "--seed", "7", cwd=tmp_path).stdout
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["seed"].endswith("# flag --seed 7")
    assert "tiny_pretrain_cpu.yaml:" in lines["duration"]
    assert lines["eps"].endswith("# default")


def test_config_schema_is_json(tmp_path: Path) -> None:
    assert json.loads(tuner("config", "schema", cwd=tmp_path).stdout)["additionalProperties"] is False


def test_a_recipe_may_be_on_stdin_or_named_there(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(MESSAGES)
    text = "model: {name_or_path: a/b}\ndata: {train: x.jsonl}\n"
    (tmp_path / "r.yaml").write_text(text)
    checked = tuner("config", "check", "-", "--schedule.warmup", "100%", cwd=tmp_path, stdin="r.yaml\n")
    assert checked.stdout == f"{tmp_path / 'r.yaml'}\n"
    assert "warning: schedule.warmup: 100% takes all of the run, so that nothing follows it; write" in checked.stderr
    done = tuner("config", "show", "-", "--optimizer.lr", "3e-4", cwd=tmp_path, stdin=text)
    assert f"path: {tmp_path / 'x.jsonl'}" in done.stdout
    refused = tuner("config", "check", "-", "--json", cwd=tmp_path, stdin=f"{text}sed: 1\n", code=2)
    (problem,) = json.loads(refused.stdout)["error"]["problems"]
    assert problem == {"file": "stdin", "line": 3, "column": 1, "key": "sed", "message": "unknown; did you mean seed?"}
    absent = tuner("config", "check", "-", cwd=tmp_path, stdin=text.replace("x.jsonl", "y.jsonl"))
    assert "stdin:2:15  data.train.0.path  " in absent.stderr and "y.jsonl: no such file" in absent.stderr
    assert tuner("config", "check", "-", cwd=tmp_path, stdin="\n").returncode == 2


def test_wrong_keys_do_not_hide_wrong_files_and_names(tmp_path: Path) -> None:
    """What follows from a wrong value is not reported: the rows do not divide only by the default in its place."""
    trainings.prepare(tmp_path, 1)
    (tmp_path / "r.yaml").write_text(
        "model: {name_or_path: ./model, dtype: bf17}\ndata: {train: y.jsonl, eval: 1x}\nsed: 1\n"
        "train: {global_batch_size: many}\nparallel: {processes: 3}\n"
        "tokenizer: {name_or_path: byte, chat_template: ./none.jinja}\n"
        "adapter: {kind: lora, target_modules: [q_prj], rank: 4}\n"
    )
    done = tuner("config", "check", "r.yaml", "--train.duration", "long", "--json", cwd=tmp_path)
    problems = json.loads(done.stdout)["error"]["problems"]
    found = [[problem["line"], problem["key"]] for problem in problems]
    assert found == cases(__file__, "problems_of_all_kinds")


def test_flags_alone_can_be_a_recipe(tmp_path: Path) -> None:
    done = tuner("config", "show", "--model.name_or_path", "a/b", "--data.train", "x.jsonl", cwd=tmp_path)
    assert f"path: {tmp_path / 'x.jsonl'}" in done.stdout


def test_recipes_are_listed_shown_and_copied(tmp_path: Path) -> None:
    assert "tiny_pretrain_cpu" in tuner("recipes", "list", cwd=tmp_path).stdout
    shown = tuner("recipes", "show", "tiny_pretrain_cpu", cwd=tmp_path).stdout
    copied = tuner("recipes", "copy", "tiny_pretrain_cpu", cwd=tmp_path)
    path = tmp_path / "tiny_pretrain_cpu.yaml"
    assert copied.stdout == f"{path}\n"
    assert path.read_text() == shown
    again = tuner("recipes", "copy", "tiny_pretrain_cpu", cwd=tmp_path)
    assert (again.returncode, path.read_text()) == (2, shown)
    assert tuner("recipes", "copy", "tiny_pretrain_cpu", "no/where.yaml", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_copied_recipe_checks_where_it_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = shipped_recipes()[name]
    (tmp_path / source.name).write_text(source.read_text())
    own = tmp_path / "data" / "orders.jsonl"
    own.parent.mkdir()
    own.write_text(MESSAGES)
    files, _ = copy_named(source, tmp_path)
    assert own.read_text() == MESSAGES
    assert all(Path(file).exists() for file in files)
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe(tmp_path / source.name, cwd=tmp_path)
    assert "keys, files" in check_recipe(ReadRecipe(loaded, ()))
    assert all(Path(source.path).parent.is_relative_to(tmp_path) for source in loaded.recipe.data.train)


def test_commands_without_a_recipe_refuse_its_flags(tmp_path: Path) -> None:
    done = tuner("export-hf", "run", "--optimizer.lr", "1", cwd=tmp_path, code=2)
    assert "tuner export-hf takes no recipe keys: --optimizer.lr" in done.stderr
    done = tuner("recipes", "show", "tiny_pretrain_cpu", "--optimizer.lr", "1", cwd=tmp_path)
    assert "tuner recipes show takes no recipe keys: --optimizer.lr" in done.stderr
    done = tuner("export-hf", "run", "--step", "last", cwd=tmp_path, code=2)
    assert "write newest, best or a step" in done.stderr


def test_a_gone_reader_of_help_leaves_no_traceback(tmp_path: Path) -> None:
    line = f"{sys.executable} -m tuner train --help | true"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
