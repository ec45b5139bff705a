"""The fault table applies to the tree as it is, wherever its functions are and however they are written down."""

import ast
import itertools
import json
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import MUTANTS
from tools.mutations import InC, Mutant, find_place, parsed, texts
from tools.tables import beside

CODE: dict[str, str] = beside(__file__)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tuner" / "files").mkdir(parents=True)
    (tmp_path / "tuner" / "files" / "log.py").write_text(CODE["log.py"])
    return tmp_path


def planted(tree: Path, place: str, find: str, put: str) -> str:
    return Mutant("it", place, find, put, ()).planted(tree)[1]


def test_faults_are_many_and_different() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 84


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_fault_applies_and_changes_its_file(mutant: Mutant, root: Path) -> None:
    file, text = mutant.planted(root)  # raises where it does not apply
    assert all((root / test).exists() for test in mutant.tests)
    if isinstance(mutant, InC):
        assert text != file.read_text()
    else:
        assert differ(text, file, root)


def differ(text: str, file: Path, root: Path) -> bool:
    """Whether a text says other things than a file, in any layout; equal beginnings are not compared."""
    lines = zip(text.splitlines(), texts(root)[file].splitlines(), strict=False)
    equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], lines))
    modules = (ast.parse(text), parsed(file, root))
    bodies = [[node for node in module.body if (node.end_lineno or 0) > equal] for module in modules]
    pairs = itertools.zip_longest(*bodies, fillvalue=ast.Pass())
    return any(ast.dump(one) != ast.dump(two) for one, two in pairs)


def test_a_statement_goes_and_the_rest_stays(tree: Path) -> None:
    text = planted(tree, "files.log.Log.close", "os.fsync(...)", "")
    assert "fsync" not in text and "os.close(self.handle)\n        return sum" in text
    alone = planted(tree, "Log.close", "os.fsync(A)\nos.close(A)", "")
    assert "with self.lock:\n            pass" in alone


def test_letters_stand_for_any_expression_and_for_the_same_one(tree: Path) -> None:
    assert "if size < 0" in planted(tree, "Log.close", "A > 0", "A < 0")
    assert "return 1" in planted(tree, "Log.close", "sum(...) + A", "A")
    with pytest.raises(ValueError, match="occurs 0 times"):
        planted(tree, "Log.close", "os.fsync(A)\nos.close(A.name)", "")
    with pytest.raises(ValueError, match="occurs 2 times in Log.close"):
        planted(tree, "Log.close", "self.handle", "0")


def test_a_function_that_moved_is_found_by_its_name(tree: Path) -> None:
    assert find_place("old.module.Log.close", tree)[0].name == "log.py"
    with pytest.raises(ValueError, match=r"nothing is named files.log.Log.clos; near it: .*files.log.Log.close"):
        find_place("files.log.Log.clos", tree)
    (tree / "tuner" / "other.py").write_text("class Log:\n    def close(self): ...\n")
    other = tree.with_name(tree.name + "-other")
    tree.rename(other)
    with pytest.raises(ValueError, match=r"may be any of tuner.files.log.Log.close, tuner.other.Log.close"):
        find_place("old.module.Log.close", other)
    assert find_place("other.Log.close", other)[0].name == "other.py"


def test_a_fault_that_names_what_is_not_there_does_not_apply(tree: Path) -> None:
    assert "missing: not known there" in Mutant("it", "Log.close", "A > 0", "A > missing", ()).problem(tree)
    known = Mutant("it", "Log.close", "A > 0", "A > len(os.name)", ("tests/gone",))
    assert known.problem(tree) == "no tests at tests/gone"


def test_kernels_in_c_are_compared_as_tokens(tree: Path) -> None:
    (tree / "tuner" / "k.c").write_text(CODE["k.c"])
    _, text = InC("it", "two", "a + 1.0f", "a", ()).planted(tree)
    assert "return a+ 1.0f" in text and "return a;" in text
    assert InC("it", "three", "a", "b", ()).problem(tree) == "0 functions in C are named three"


@pytest.mark.parametrize(("survivors", "code"), [(4, 0), (5, 1)])
def test_nine_in_ten_must_be_caught(survivors: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = [mutants.Verdict(str(i), "survived" if i < survivors else "caught", 1.0) for i in range(40)]
    assert mutants.report(verdicts, 1.0) == code
    assert json.loads(capsys.readouterr().out)["caught"] == 40 - survivors
