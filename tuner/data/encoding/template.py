"""Chat templates: jinja2 in the sandbox and with the helpers that transformers gives a template.

The rendered text, hence the token ids, equal those of `apply_chat_template`; transformers itself would import torch.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes

from tuner.data.encoding.template_limits import MAX_TIME_CHARS, LimitError, refuse
from tuner.data.encoding.template_sandbox import CLOSE, OPEN, Sandbox
from tuner.errors import DataError, ExitCode, TunerError

TEMPLATE_FILE, TOOL_TEMPLATE_FILE = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
"""Where a tokenizer's directory has its template, and another for conversations with tools."""
Message = Mapping[str, Any]
"""A chat message: `role`, `content` and whatever else the template reads."""

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
"""What is passed to a template besides the messages, unless somebody asks for more."""
THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables by which templates let their caller choose whether the prompt opens a thought."""

_MARKS = re.compile(f"([{OPEN}{CLOSE}])")
_PROBES = ("the question", "the answer")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_HINT = "set tokenizer.chat_template to a template that you trust; docs/security.md has the limits"
_SHOWN_CHARS = 300
"""Of what a template says itself in an error."""


class EndlessTemplateError(DataError):
    """A template went on for ever, or would have taken all memory."""


class GivenUpTemplateError(TunerError):
    """A template did so again and again, or took long to refuse: no row is tried any more, even to be left out."""

    exit_code = ExitCode.DATA


class ChatTemplate:
    """A compiled chat template; raises DataError where its source does not compile."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: datetime | None = None,
        name: str = "the chat template",
    ) -> None:
        """Compile; `now` is the current time for the template, whenever it asks, `name` where it is. DataError."""
        self.source = source
        self.name = name
        self._has_marks = "endgeneration" in source
        self._special_tokens = dict(special_tokens)
        self._sandbox = _sandbox(now or datetime.now())
        self._template = self._compiled()
        plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        probe = self._written(plain) if self._has_marks else ""
        self.has_generation_marks = self._has_marks and (probe is None or OPEN in probe)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None, variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """Render `messages` to the text whose token ids a model sees; DataError where the template refuses.

        `variables` are what `apply_chat_template` takes as further keyword arguments.
        """
        text = self._render(self._as_read(messages), add_generation_prompt, tools, variables)
        return text.replace(OPEN, "").replace(CLOSE, "") if self._has_marks else text

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render and return the character spans [start, stop) of the template's generation blocks, in order."""
        spans: list[tuple[int, int]] = []
        text, opened = "", 0
        for piece in _MARKS.split(self._render(self._as_read(messages), False, tools)):
            if piece == OPEN:
                opened = len(text)
            elif piece == CLOSE:
                spans.append((opened, len(text)))
            else:
                text += piece
        return text, spans

    @cached_property
    def reads_parts(self) -> bool:
        """Whether contents are written where they are lists of parts alone, as by SmolVLM's: they are given as such."""

        def found(shape: Callable[[str], Any]) -> int:
            roles = ("user", "assistant")
            exchange = [{"role": role, "content": shape(text)} for role, text in zip(roles, _PROBES, strict=True)]
            written = self._written(exchange) or ""
            return sum(probe in written for probe in _PROBES)

        as_text = found(str)
        return as_text < len(_PROBES) and found(_as_parts) > as_text

    @cached_property
    def thinking_variables(self) -> tuple[str, ...]:
        """Those of THINKING_VARIABLES that the template reads."""
        read = meta.find_undeclared_variables(parse_template(self.source))
        return tuple(name for name in THINKING_VARIABLES if name in read)

    @cached_property
    def _call_form(self) -> tuple[bool, bool]:
        """Whether tool calls are written where their arguments are JSON text, and next to a content of null, alone.

        DeepSeek's templates join arguments to a text, and look for calls in messages without a content.
        """
        function = {"name": "the_tool", "arguments": {"key": "the value"}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        for as_text, null in product((False, True), repeat=2):
            messages = [{"role": "user", "content": _PROBES[0]}, _with_calls(call, as_text, null)]
            text = self._written(messages) or ""
            if "the_tool" in text and "the value" in text:
                return as_text, null
        return False, False

    def _as_read(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with each content and tool call as the template reads it."""
        if any(message.get("tool_calls") for message in messages):
            as_text, null = self._call_form
            messages = [_with_calls(m, as_text, null) if m.get("tool_calls") else m for m in messages]
        if not self.reads_parts:
            return messages
        contents = (message.get("content") for message in messages)
        return [
            {**message, "content": _as_parts(content)} if isinstance(content, str) else message
            for message, content in zip(messages, contents, strict=True)
        ]

    def _written(self, messages: Sequence[Message]) -> str | None:
        """The messages as the template writes them; None where it refuses them. EndlessTemplateError."""
        return unless_refused(self._render, messages, False)

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None, variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        self._sandbox.meter.begin(len(messages))
        try:
            return self._template.render(
                **self._special_tokens, **variables, messages=[_with_reasoning(message) for message in messages],
                tools=None if tools is None else list(tools), documents=None,
                add_generation_prompt=add_generation_prompt,
            )  # fmt: skip
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            refused: TunerError = DataError(f"{self.name} refuses these messages: {_said(error)}")
            if self._sandbox.meter.given_up():
                refused = GivenUpTemplateError(refused.message, hint=_HINT)
        except LimitError as error:
            refused = self._beyond(str(error))
        except (RecursionError, MemoryError):
            refused = self._beyond("it calls itself")
        raise refused  # without what the template had made so far, which an error of a row would keep

    def _beyond(self, what: str) -> TunerError:
        given_up = self._sandbox.meter.given_up()
        kind = GivenUpTemplateError if given_up else EndlessTemplateError
        return kind(f"{self.name} goes beyond its limits{' again and again' * given_up}: {what}", hint=_HINT)

    def _compiled(self) -> Template:
        self._sandbox.meter.begin()
        try:
            return self._sandbox.from_string(self._sandbox.metered(self.source))
        except LimitError as error:
            raise EndlessTemplateError(f"{self.name} goes beyond its limits: {error}", hint=_HINT) from None
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            place = f" line {line}" if line else ""
            raise DataError(f"{self.name}{place}: {_said(error)}") from error
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
            what = "its statements or expressions lie too deep in each other, or its numbers are too long"
            raise EndlessTemplateError(f"{self.name} goes beyond its limits: {what}", hint=_HINT) from error


def unless_refused(
    render: Callable[[Sequence[Message], bool], str], messages: Sequence[Message], prompt: bool
) -> str | None:
    """What `render` writes of messages; None where the template refuses them. Raises EndlessTemplateError."""
    try:
        return render(messages, prompt)
    except EndlessTemplateError:
        raise  # no other messages are shorter
    except DataError:
        return None


def named_templates(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """Return a tokenizer's templates by name, `default` and `tool_use` among them, where it has them.

    As for transformers, files go before `chat_template` in `tokenizer_config.json`: a text, or several by name.
    """
    try:
        places = {"default": TEMPLATE_FILE, "tool_use": TOOL_TEMPLATE_FILE}
        found = {name: files[path].decode() for name, path in places.items() if path in files}
    except UnicodeDecodeError as error:
        raise DataError(f"a chat template of the tokenizer: {error}") from error
    value = config.get("chat_template")
    if found or not value:
        return found
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    named = value if isinstance(value, dict) else {"default": value}
    return {str(name): source for name, source in named.items() if isinstance(source, str)}


def parse_template(source: str) -> nodes.Template:
    """Return the syntax tree of a template's source; DataError where it does not compile."""
    try:
        return _sandbox(datetime.now()).parse(source)
    except (TemplateError, LimitError, RecursionError) as error:
        raise DataError(f"chat template: {_said(error)}") from error


def _sandbox(now: datetime) -> Sandbox:
    sandbox = Sandbox()

    def raise_exception(message: Any) -> NoReturn:
        sandbox.meter.written(message)
        raise TemplateError(str(message)[:_SHOWN_CHARS])

    def strftime_now(form: str) -> str:
        if len(form) > MAX_TIME_CHARS:
            refuse(f"a form of the time of more than {MAX_TIME_CHARS:,} characters")
        return now.strftime(form)

    sandbox.globals["raise_exception"], sandbox.globals["strftime_now"] = raise_exception, strftime_now
    return sandbox


def _said(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _with_calls(message: Message, arguments_as_text: bool, null_content: bool) -> Message:
    """A message with its tool calls in one of the forms that templates read."""
    calls = message["tool_calls"]
    if arguments_as_text:
        functions = [{**call["function"], "arguments": _as_text(call["function"]["arguments"])} for call in calls]
        calls = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    content = None if null_content and not message.get("content") else message.get("content")
    return {**message, "content": content, "tool_calls": calls}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def reasoning_of(message: Message) -> Any:
    """The thought of a message, under whichever of the names that data sets keep it; None where it has none."""
    return next((message[key] for key in _REASONING_FIELDS if message.get(key) is not None), None)


def _with_reasoning(message: Message) -> Message:
    # The three names under which data sets keep reasoning are one field to the template, as in transformers.
    found = reasoning_of(message)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def compiled(
    sources: Mapping[str, str], special_tokens: Mapping[str, str], now: datetime | None, where: str
) -> dict[str, ChatTemplate]:
    """The templates that are used, by name; `where` is what errors name. DataError where one does not compile."""
    names = sources.keys() & {"default", "tool_use"}
    return {name: ChatTemplate(sources[name], special_tokens, now, where) for name in sorted(names)}


class LoadedTemplates:
    """A loaded tokenizer's templates, by name; `origin` is what errors name. DataError where one does not compile."""

    def __init__(self, tokenizer: Any, origin: str | None = None) -> None:
        found = tokenizer.chat_template or {}
        sources = found if isinstance(found, dict) else {"default": found}
        tokens = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        where = f"{origin or tokenizer.name_or_path}: the chat template"
        self._templates = compiled(sources, tokens, None, where)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render as `apply_chat_template` does; DataError where there is no template, or it refuses."""
        chosen = self._templates.get("tool_use" if tools else "default") or self._templates.get("default")
        if chosen is None:
            raise DataError("the tokenizer has no chat template of the name default")
        return chosen.render(messages, add_generation_prompt, tools)
