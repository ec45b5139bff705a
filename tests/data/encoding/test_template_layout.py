"""What is learned of a template from probes, and which templates are read row by row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data import tiny
from tuner.data.encoding.template_layout import Shape, TemplateLayout, TemplateLayouts
from tuner.data.encoding.turns import Planner

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = HEAD + "{{ m.content }}" + TAIL
TRIMS = HEAD + "{{ m['content'] | trim }}" + TAIL
ASKS = HEAD + "{% if '<t>' in m.content %}{{ m.content.split('<t>')[-1] }}{% else %}{{ m.content }}{% endif %}" + TAIL
BEGINS = HEAD + "{% if not m.content.startswith('#') %}{{ m.content }}{% endif %}" + TAIL
SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set pre = messages[0].content + '\n\n' %}{% set ms = messages[1:] %}"
    "{% else %}{% set pre = '' %}{% set ms = messages %}{% endif %}{% for m in ms %}<|im_start|>{{ m.role }}\n"
    "{% if loop.first %}{{ pre }}{% endif %}{{ m.content }}" + TAIL
)
MARKED = (
    HEAD + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
READABLE = {"plain": PLAIN, "trims": TRIMS, "asks": ASKS, "begins": BEGINS, "system": SYSTEM, "marked": MARKED}
OPAQUE = {
    "length": HEAD + "{% if m.content | length > 9 %}long{% endif %}{{ m.content }}" + TAIL,
    "slice": HEAD + "{{ m.content[:20] }}" + TAIL,
    "character": HEAD + "{{ m.content[0] }}{{ m.content }}" + TAIL,
    "upper": HEAD + "{{ m.content | upper }}" + TAIL,
    "method": HEAD + "{{ m.content.lower() }}" + TAIL,
    "loop": HEAD + "{% for c in m.content %}{{ c }}{% endfor %}" + TAIL,
    "order": HEAD + "{% if m.content < 'm' %}x{% endif %}{{ m.content }}" + TAIL,
    "needle": HEAD + "{% if m.content in 'abcdef' %}x{% endif %}{{ m.content }}" + TAIL,
    "json": HEAD + "{{ m.content | tojson }}" + TAIL,
    "twice": HEAD + "{{ m.content }}{{ m.content }}" + TAIL,
    "dropped": HEAD + "{% if loop.last %}{{ m.content }}{% endif %}" + TAIL,
    "joined": HEAD + "{% set c = 'a' ~ m.content %}{% if 'b' in c %}x{% endif %}{{ c }}" + TAIL,
    "added": HEAD + "{% set c = 'ab' + m.content %}{% if 'ab' in c %}x{% endif %}{{ c }}" + TAIL,
    "macro": "{% macro w(c) %}{{ c }}{% endmacro %}"
    + HEAD
    + "{% set c = w(m.content) %}{% if 'b' in c %}x{% endif %}{{ c }}" + TAIL,
    "block": HEAD + "{% set c %}{{ m.content }}{% endset %}{% if 'b' in c %}x{% endif %}{{ c }}" + TAIL,
    "format": HEAD + "{{ '%s' % m.content }}" + TAIL,
    "others": HEAD + "{% if m.content == messages[0].content and not loop.first %}x{% endif %}{{ m.content }}" + TAIL,
    "by content": "{% set n = messages | selectattr('content', 'in', 'abc') | list | length %}{{ n }}" + PLAIN,
    "text of all": HEAD + "{% if 'search' in messages | string %}x{% endif %}{{ m.content }}" + TAIL,
    "length of all": HEAD + "{% if messages | tojson | length > 99 %}x{% endif %}{{ m.content }}" + TAIL,
    "joined by a constant": HEAD + "{% set c = ''.join(['', m.content]) %}{{ c.split('b')[-1] }}" + TAIL,
    "formatted": HEAD + "{{ '{:<24}'.format(m.content) }}" + TAIL,
    "sought in a constant": HEAD + "{% if 'yes no'.find(m.content) >= 0 %}x{% endif %}{{ m.content }}" + TAIL,
    "a block": HEAD + "{% block c scoped %}{{ m.content }}{% endblock %}" + TAIL,
    "key": HEAD + "{% set d = {'x': 1} %}{% if m.content in d %}x{% endif %}{{ m.content }}" + TAIL,
    "blank split": HEAD + "{{ m.content.split()[0] }} {{ m.content }}" + TAIL,
}  # fmt: skip
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
    asks = skeletons(ASKS).find(shape(ROLES))
    assert asks is not None and asks.literals == ("<t>",)
    assert asks.fits(["a", "b", "c", "d"]) and not asks.fits(["a", "<t>b", "c", "d"])
    trims = skeletons(TRIMS).find(shape(ROLES))
    assert trims is not None and trims.strips == (("strip", None),)
    assert not trims.fits(["a", "b ", "c", "d"]) and not trims.fits(["a", "", "c", "d"])
    plain = skeletons(PLAIN).find(shape(ROLES))
    assert plain is not None and plain.fits([" a", "b\n", "<t>", "d"]) and plain.specials == 8


def test_turns_lie_between_the_contents() -> None:
    skeleton = skeletons(PLAIN).find(Shape(("user", "assistant", "user", "assistant"), (None, False, None, None)))
    assert skeleton is not None
    (mark,) = skeleton.marks
    assert (mark.start_part, mark.stop_part, mark.trained, mark.is_answer) == (3, 4, True, True)
    assert skeleton.parts[3][: mark.start].endswith("<|im_start|>assistant\n")
    assert skeleton.parts[4][: mark.stop] == "<|im_end|>"
    assert mark.prompt == "<|im_start|>assistant\n"


def test_long_conversations_and_many_shapes_are_left_alone() -> None:
    learned = skeletons(PLAIN)
    assert learned.find(shape(("user", "assistant") * 33)) is None
