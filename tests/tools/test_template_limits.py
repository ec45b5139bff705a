"""Templates made to do harm end within their limits, all others render as plain jinja2 would."""

import json
import re
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
from jinja2.filters import FILTERS as DEFAULT_FILTERS
from jinja2.tests import TESTS as DEFAULT_TESTS
from transformers.utils.chat_template_utils import _compile_jinja_template

from tests.data import tiny
from tools.hostile_templates import HOSTILE, HostileTemplate
from tools.tables import beside
from tools.template_campaign import SYSTEM, THOUGHTS, TOOLS, TURNS
from tuner.config.recipe import TokenizerSection
from tuner.data.encoding import template_limits
from tuner.data.encoding.template import ChatTemplate, EndlessTemplateError, GivenUpTemplateError, LoadedTemplates
from tuner.data.encoding.template_limits import LimitError, Meter
from tuner.data.encoding.template_sandbox import Sandbox
from tuner.data.encoding.tokenizer_files import load_tokenizer
from tuner.errors import DataError

ROOT = Path(__file__).parents[2]
CHAT = [{"role": "user", "content": "the question"}, {"role": "assistant", "content": "the answer"}]
PUBLISHED = sorted([*(ROOT / "tools/chat_templates").glob("*.jinja"), *(ROOT / "tuner/data/templates").glob("*.jinja")])
TABLE: dict[str, Any] = beside(__file__)


def refused(one: HostileTemplate) -> str:
    """What is said of a template that is refused when it is compiled, or rendered."""
    with pytest.raises(DataError) as caught:
        template = ChatTemplate(one.source, {}, name="here: the chat template")
        template.render(CHAT)
        template.render(CHAT[:1], True)
    return caught.value.message


@pytest.mark.slow(*TABLE["slow"])
@pytest.mark.parametrize("one", HOSTILE, ids=lambda one: one.name)
def test_a_hostile_template_is_refused_by_name(one: HostileTemplate) -> None:
    said = refused(one)
    assert said.startswith("here: the chat template") and len(said) < 500


def test_one_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock, and at last for good: whoever leaves bad rows out meets it with every row."""
    clock = count()
    monkeypatch.setattr("time.thread_time", lambda: next(clock) * 0.15)
    loop = "{% for i in range(99999) %}{% endfor %}"
    template = ChatTemplate("{% if messages[0].content == 'x' %}" + loop * 15 + "{% endif %}a", {})
    asked = [{"role": "user", "content": "x"}]
    for _ in range(2):  # three looks at the clock each, and one at the end
        with pytest.raises(EndlessTemplateError, match="more than 0.21 s of processor time"):
            template.render(asked)
    assert template.render(CHAT) == "a"
    with pytest.raises(GivenUpTemplateError, match="beyond its limits again and again: more than 0.21 s"):
        template.render(asked)


def test_what_a_template_made_is_not_kept_with_the_errors_of_rows() -> None:
    """Each of a million bad rows would keep it."""
    template = ChatTemplate("{% set a = 'a' * 1000000 %}{{ raise_exception(a) }}", {})
    with pytest.raises(DataError) as caught:
        template.render(CHAT)
    assert caught.value.__context__ is None and caught.value.__cause__ is None


def test_one_that_takes_too_much_memory_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the process holds at each look; a heap that other work left free would take much before it grows."""
    looks = count()
    monkeypatch.setattr(template_limits, "resident_bytes", lambda: next(looks) << 26)
    grow = "{% set n = namespace(x=[]) %}{% for i in range(99) %}{% set n.x = n.x + ['a' * 4000000 ~ i] %}{% endfor %}"
    with pytest.raises(EndlessTemplateError, match="more than 128 MiB of memory"):
        ChatTemplate(grow, {}).render(CHAT)


@pytest.mark.parametrize("given", ["chat_template.jinja", "tokenizer_config.json", "recipe"])
def test_the_error_names_where_the_template_is(tmp_path: Path, given: str) -> None:
    source = "{{ 'a' * 4000000000 }}"
    section = TokenizerSection()
    tiny.write_directory(tmp_path, tiny.CHATML)
    named = str(tmp_path)
    if given == "recipe":
        path = tmp_path / "own.jinja"
        path.write_text(source)
        section, named = TokenizerSection(chat_template=str(path)), f"tokenizer.chat_template: {path}"
    elif given == "chat_template.jinja":
        (tmp_path / given).write_text(source)
    else:
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        config = json.loads((tmp_path / given).read_text())
        (tmp_path / given).write_text(json.dumps({**config, "chat_template": source}))
    tokenizer = load_tokenizer(str(tmp_path), None, section)
    with pytest.raises(EndlessTemplateError, match="a text of more than 16,777,216 characters") as caught:
        tokenizer.render(CHAT)
    assert caught.value.message.startswith(f"{named}: the chat template goes beyond its limits")
    # What the hint says to write makes it usable.
    assert load_tokenizer(str(tmp_path), None, TokenizerSection(chat_template="chatml")).render(CHAT)


class Loaded:
    """What is asked of a tokenizer that transformers loaded."""

    name_or_path = "somebody/model"
    special_tokens_map: ClassVar = {"bos_token": "<s>"}

    def __init__(self, chat_template: Any) -> None:
        self.chat_template = chat_template


def test_templates_of_loaded_tokenizers_render_within_limits() -> None:
    """In generate, chat and exports."""
    named = {"default": "{{ bos_token }}{{ messages[0].content }}", "tool_use": "{{ 'a' * 4000000000 }}", "rag": "{{"}
    templates = LoadedTemplates(Loaded(named))
    assert templates.render(CHAT) == "<s>the question"
    with pytest.raises(EndlessTemplateError, match="^somebody/model: the chat template goes beyond its limits"):
        templates.render(CHAT, tools=TOOLS)
    with pytest.raises(DataError, match="no chat template of the name default"):
        LoadedTemplates(Loaded({"rag": "a"})).render(CHAT)


def plain(source: str, tokens: dict[str, str]) -> Any:
    """What plain jinja2 renders, as transformers sets it up."""
    template = _compile_jinja_template(source)

    def render(messages: Any, prompt: bool, tools: Any) -> str | None:
        given = [
            {"thinking": m["reasoning_content"], **m} if m.get("reasoning_content") is not None else m for m in messages
        ]
        try:
            return template.render(**tokens, messages=given, add_generation_prompt=prompt, tools=tools, documents=None)
        except Exception:  # whatever it refuses
            return None

    return render


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_others_render_as_plain_jinja2_does(path: Path) -> None:
    source = re.sub(r"strftime_now\([^)]*\)", "'2026'", path.read_text(encoding="utf-8"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    ours, theirs = ChatTemplate(source, tokens), plain(source, tokens)
    chats = [TURNS, [SYSTEM, *TURNS], TURNS[:1], THOUGHTS[:2]]
    if "tool" not in source:  # else messages are given in the form that the template reads
        chats.append(TURNS * 8)
    for messages in chats:
        for prompt in (False, True):
            for tools in (None, TOOLS):
                try:
                    rendered: str | None = ours.render(messages, prompt, tools)
                except DataError:
                    rendered = None
                assert rendered == theirs(messages, prompt, tools)


@pytest.mark.parametrize("expression", TABLE["expressions"])
def test_an_expression_within_limits_is_what_plain_jinja2_makes_of_it(expression: str) -> None:
    source = f"{{{{ {expression} }}}}{{% for m in messages if {expression} %}}{{{{ loop.index }}}}{{% endfor %}}"
    expected = plain(source, {})(CHAT, False, None)
    assert expected and ChatTemplate(source, {}).render(CHAT) == expected


def test_every_name_of_python_and_jinja2_is_known() -> None:
    """What a newer version brings is refused until somebody looked at what it takes."""
    sandbox = Sandbox()
    pages = {"filesizeformat", "pprint", "striptags", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr"}
    assert set(DEFAULT_FILTERS) - set(sandbox.filters) == pages and set(sandbox.tests) == set(DEFAULT_TESTS)
    bytes_of = {"encode", "to_bytes", "from_bytes", "hex", "fromhex", "translate", "maketrans"}
    known = template_limits.KNOWN | bytes_of | {"format", "format_map"}  # these are the sandbox's own
    for value in ("", 1, 1.5, True, [], (), {}, range(1), {}.keys(), {}.items(), {}.values()):
        for name in dir(value):
            attribute = getattr(value, name)
            if callable(attribute) and sandbox.is_safe_attribute(value, name, attribute):
                assert name in known, f"{type(value).__name__}.{name}"


def test_an_unknown_method_is_refused() -> None:
    for expression in ("'a'.encode('punycode')", "(1).to_bytes(9, 'big')", "'a'.translate({97: 'b'})"):
        with pytest.raises(DataError, match="(encode|to_bytes|translate) is not known to be safe"):
            ChatTemplate(f"{{{{ {expression} }}}}", {}).render(CHAT)


def test_a_meter_counts_what_is_in_lists_as_often_as_it_is_there() -> None:
    twice = ["ab", "ab"]
    assert Meter().weigh([twice, twice]) > 2 * Meter().weigh(twice) > 4 * len("ab")
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(LimitError, match="more than 200 deep"):
        Meter().weigh(deep)


def test_the_documents_give_the_limits() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    limits = [form.format(getattr(template_limits, name)) for name, form in TABLE["limits"].items()]
    limits += [f"{template_limits.MAX_GROWN_BYTES >> 20} MiB"]
    assert [limit for limit in limits if limit not in text] == []
