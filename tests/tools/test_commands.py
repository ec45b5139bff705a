"""What a tool is called with is told by defaults and types."""

from pathlib import Path

import pytest

from tools.commands import asked, one_of, some

PLACES = {"place": Path, "seeds": [int]}
FLAGS = {
    "count": 1, "rate": (0.5, "a share"), "of": [], "sizes": [1, 2], "fast": False, "out": Path,
    "kind": one_of("ab", "b"), "kinds": some("abc"), "need_all": {"type": int, "required": True},
}  # fmt: skip


def test_defaults_say_types_and_types_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    given = vars(asked("about", PLACES, ["x", "3", "4", "--need-all", "7"], **FLAGS))
    assert given == {
        "place": Path("x"), "seeds": [3, 4], "count": 1, "rate": 0.5, "of": [], "sizes": [1, 2], "fast": False,
        "out": None, "kind": "b", "kinds": ["a", "b", "c"], "need_all": 7,
    }  # fmt: skip
    words = "x 3 --need-all 7 --count 2 --of a b --sizes 5 --fast --out o --kind a --kinds c b --rate 1"
    changed = {"count": 2, "of": ["a", "b"], "sizes": [5], "fast": True, "out": Path("o"), "kind": "a", "rate": 1.0}
    assert vars(asked("about", PLACES, words.split(), **FLAGS)) == {
        **given, **changed, "seeds": [3], "kinds": ["c", "b"],
    }  # fmt: skip
    for wrong in ("x 3", "x y --need-all 7", "x 3 --need-all 7 --kind c", "x 3 --need-all 7 --kinds"):
        with pytest.raises(SystemExit):
            asked("about", PLACES, wrong.split(), **FLAGS)
    assert "argument --kind: invalid choice: 'c'" in capsys.readouterr().err
