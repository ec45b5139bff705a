"""Whatever a command says as a warning on stderr is in its document, once, whether it succeeds or fails."""

import ast
import functools
import json
import re
import shutil
from collections import Counter
from typing import Any

import pytest

from tests.contracts.syntax import PACKAGE, modules, nodes, trees, walk
from tests.fixtures.damaged import RUN, Place, Said
from tests.fixtures.tables import cases

HOOK = """
import logging, threading, warnings
class Odd:
    def __init__(self, fails=False):
        self.fails = fails
    def __call__(self, report):
        for _ in range(2):
            warnings.warn("a library is odd", UserWarning, stacklevel=1)
        thread = threading.Thread(target=warnings.warn, args=("a thread is odd", RuntimeWarning))
        thread.start()
        thread.join()
        logging.getLogger("somewhere").warning("a logger is odd")
        if self.fails:
            raise ValueError("the hook fails")
"""
ODD = ("UserWarning: a library is odd", "RuntimeWarning: a thread is odd", "a logger is odd")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(tmp_path_factory.mktemp("warned"))
    made.set_up()
    (made.directory / "odd.py").write_text(HOOK)
    return made


def heard(said: Said) -> list[str]:
    """The document's warnings, after holding them against what stderr shows."""
    warnings: list[str] = said.document["warnings"]
    assert max(Counter(warnings).values(), default=0) <= 1
    shown = re.findall(r"^warning:?\s+(.*)$", said.stderr, flags=re.MULTILINE)
    for text in shown:
        assert text in warnings
    for text in warnings:
        assert text in said.stderr
    return warnings


def test_a_run_before_its_end_is_warned_of_by_all_that_take_it(place: Place) -> None:
    place.damage(["directory gone", "record says running"])
    for command in ("export", "eval", "generate"):
        said = place.ask(command)
        (warning,) = [text for text in heard(said) if "cut at the limit" not in text]
        assert (said.code, "of step 6 of 8, before the end" in warning) == (0, True)


def test_resume_warns_of_what_it_passes_over_and_of_what_changed(place: Place) -> None:
    place.damage(["all bits flipped"])
    said = place.ask("resume")
    assert said.code == 3
    assert len(heard(said)) == 3
    place.damage(["file gone", "record gone"])
    said = place.call("resume", str(RUN), "--train.micro_batch_size", "2", "--logging.level", "error")
    assert said.code == 0
    assert "warning" not in said.stderr
    found = said.document["warnings"]
    for words in ("step-8 is not used", "run.json is gone", "train.micro_batch_size"):
        assert sum(words in text for text in found) == 1
    assert len(found) == 3


def test_runs_warns_of_what_is_damaged_and_left_out(place: Place) -> None:
    place.damage(["directory gone"])
    crashed = place.run.parent / "crashed"
    crashed.mkdir(exist_ok=True)
    try:
        assert len(heard(place.call("runs", "list"))) == 1
        assert len(heard(place.call("runs", "show", str(RUN)))) == 1
        for command in ("compare", "plot"):
            (warning,) = heard(place.call("runs", command, str(RUN), str(crashed)))
            assert "never started" in warning
    finally:
        shutil.rmtree(crashed)


@pytest.mark.parametrize("fails", [False, True])
def test_what_libraries_warn_of_while_training_is_heard_too(place: Place, fails: bool) -> None:
    name = f"odd-{fails}".lower()
    hook = json.dumps([{"use": "odd.py:Odd", "stages": ["start"], "options": {"fails": fails}}])
    said = place.call("train", "r.yaml", "--name", name, "--hooks", hook, "--train.stop_after", "1 steps")
    assert said.code == (2 if fails else 75)
    found = heard(said)
    for words in ODD:
        assert sum(words in text for text in found) == 1


def test_preparation_warns_of_rows_that_it_skips(place: Place) -> None:
    rows = place.directory / "rows.jsonl"
    (place.directory / "bad.jsonl").write_text(rows.read_text() + "{\n")
    said = place.call("prepare-data", "r.yaml", "--data.train", "bad.jsonl", "--data.on_bad_row", "skip")
    assert said.code == 0
    assert "1 bad row skipped" in heard(said)[0]


# Where a warning begins: what is called, as it is written. Each is the console's, or a parameter that is given it.
CONSOLES = {"console", "self.console", "self._console"}
PARAMETERS: Any = cases(__file__, "parameters")
GIVEN = {"console.warn", "self.console.warn", "self.warn", "warn", "ignore_warning", "hear"}
"""What is passed on as such a parameter."""


@functools.cache
def calls() -> list[tuple[str, ast.Call]]:
    """Every call in the package, with its file."""
    files = {name: path.relative_to(PACKAGE).as_posix() for name, path in modules().items()}
    return [(files[name], call) for name, tree in trees().items() for call in nodes(tree, ast.Call)]


def last_name(called: ast.expr) -> str:
    """The last word of what is called."""
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def test_every_place_that_warns_does_so_through_the_console_or_the_outcome() -> None:
    places = Counter[str]()
    for name, call in calls():
        called = ast.unparse(call.func) if last_name(call.func) in ("warn", "_warn") else ""
        if called.endswith(".warn") and called.removesuffix(".warn") in CONSOLES:
            places[name] += 1
        elif called:
            assert name in PARAMETERS.get(called, ()), f"{name}:{call.lineno} warns past the console: {called}"
        for keyword in call.keywords:
            if keyword.arg in ("warn", "warned"):
                assert ast.unparse(keyword.value) in GIVEN, f"{name}:{call.lineno} gives {ast.unparse(keyword.value)}"
    assert places.keys() >= set(cases(__file__, "they_warn"))
    assert sum(places.values()) >= 15


def test_nothing_else_writes_a_warning_to_stderr() -> None:
    written = {
        name
        for name, call in calls()
        if last_name(call.func) in ("print", "_say", "say", "line", "write")
        and any(
            isinstance(part, ast.Constant) and str(part.value).startswith("warning")
            for argument in call.args[:1]
            for part in walk(argument)
        )
    }
    assert written == {"cli/command.py", "runtime/console.py", "runtime/warned.py"}
