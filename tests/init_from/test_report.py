"""The report of what a model was given, as people read it."""

from pathlib import Path

from tests.init_from.built import planned_for, recipe_of, rewrite, write_family, write_peft
from tests.init_from.test_given import FOREIGN, foreign
from tuner.init_from.give import report, summary

REPORT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
SUMMARY = """\
model directory /models/theirs: 18 of 21 weights, 20 renamed, 1 grown, 2 replaced by a later entry, \
1 without a place, 1 missing there
model directory /models/base: 2 of 21 weights
adapter /models/adapter: 2 of 21 weights, 2 merged
1 weight stays as it was"""


def test_the_report_says_where_every_weight_comes_from(tmp_path: Path) -> None:
    base = write_family(tmp_path / "base", vocabulary=101)
    small = write_family(tmp_path / "small", seed=2)
    theirs = rewrite(small, tmp_path / "theirs", lambda name: foreign(name).replace("lm_head", "extra_head"))
    adapter, _ = write_peft(base, tmp_path / "adapter")
    recipe = recipe_of(
        base,
        {"path": str(theirs), "rename": FOREIGN, "grow": True, "strict": False},
        {"path": str(base), "load": ["layers.1.mlp"], "exclude": ["up_proj"]},
        {"path": str(adapter), "load": ["layers.0"]},
    )
    plan = planned_for(recipe)
    assert report(plan).replace(str(tmp_path), "/models") == REPORT
    assert summary(plan).replace(str(tmp_path), "/models") == SUMMARY
