"""What is learned of a template from probes, and which templates are read row by row."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data import tiny
from tuner.data.encoding.template_layout import Shape, TemplateLayout, TemplateLayouts
from tuner.data.encoding.turns import Planner

TEMPLATES = json.loads(Path(__file__).with_name("layouts.json").read_text(encoding="utf-8"))
READABLE, OPAQUE = TEMPLATES["readable"], TEMPLATES["opaque"]
ROLES = ("user", "assistant", "user", "assistant")


def skeletons(template: str) -> TemplateLayouts:
    tokenizer = tiny.tokenizer(template)
    return TemplateLayouts(tokenizer, Planner(tokenizer, "assistant", "refuse"))


def shape(roles: Sequence[str]) -> Shape:
    return Shape(tuple(roles), (None,) * len(roles))


def written(skeleton: TemplateLayout, contents: Sequence[str]) -> str:
    pairs = zip(skeleton.parts, [*contents, ""], strict=True)
    return "".join(part for pair in pairs for part in pair)


@pytest.mark.parametrize("name", READABLE)
def test_a_row_that_fits_is_written_as_the_template_writes_it(name: str) -> None:
    tokenizer = tiny.tokenizer(READABLE[name])
    learned = TemplateLayouts(tokenizer, Planner(tokenizer, "assistant", "refuse"))
    seen = []

    @given(st.lists(st.text(alphabet=" \n\tab<t>#{}%\u00e9\u0130", max_size=8), min_size=4, max_size=4))
    def check(contents: list[str]) -> None:
        skeleton = learned.find(shape(ROLES))
        assert skeleton is not None
        seen.append(skeleton.fits(contents))
        if skeleton.fits(contents):
            messages = [{"role": role, "content": c} for role, c in zip(ROLES, contents, strict=True)]
            assert written(skeleton, contents) == tokenizer.render(messages)

    check()
    assert any(seen)


@pytest.mark.parametrize("name", OPAQUE)
def test_a_template_that_looks_into_contents_unseen_has_no_skeleton(name: str) -> None:
    assert skeletons(OPAQUE[name]).find(shape(ROLES)) is None


def test_what_a_template_asks_for_decides_what_fits() -> None:
    asks = skeletons(READABLE["asks"]).find(shape(ROLES))
    assert asks is not None and asks.literals == ("<t>",)
    assert asks.fits(["a", "b", "c", "d"]) and not asks.fits(["a", "<t>b", "c", "d"])
    trims = skeletons(READABLE["trims"]).find(shape(ROLES))
    assert trims is not None and trims.strips == (("strip", None),)
    assert not trims.fits(["a", "b ", "c", "d"]) and not trims.fits(["a", "", "c", "d"])
    plain = skeletons(READABLE["plain"]).find(shape(ROLES))
    assert plain is not None and plain.fits([" a", "b\n", "<t>", "d"]) and plain.specials == 8


def test_turns_lie_between_the_contents() -> None:
    skeleton = skeletons(READABLE["plain"]).find(Shape(ROLES, (None, False, None, None)))
    assert skeleton is not None
    (mark,) = skeleton.marks
    assert (mark.start_part, mark.stop_part, mark.trained, mark.is_answer) == (3, 4, True, True)
    assert skeleton.parts[3][: mark.start].endswith("<|im_start|>assistant\n")
    assert skeleton.parts[4][: mark.stop] == "<|im_end|>"
    assert mark.prompt == "<|im_start|>assistant\n"


def test_long_conversations_and_many_shapes_are_left_alone() -> None:
    learned = skeletons(READABLE["plain"])
    assert learned.find(shape(("user", "assistant") * 33)) is None
