"""Chat templates: jinja2 in the sandbox and with the helpers that transformers gives a template.

The rendered text, hence the token ids, equal those of `apply_chat_template`; transformers itself would import torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tuner.errors import DataError

TEMPLATE_FILE, TOOL_TEMPLATE_FILE = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
"""Where a tokenizer's directory has its template, and another for conversations with tools."""
Message = Mapping[str, Any]
"""A chat message: `role`, `content` and whatever else the template reads."""

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
"""What is passed to a template besides the messages, unless somebody asks for more."""
THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables by which templates let their caller choose whether the prompt opens a thought."""

_PROBES = ("the question", "the answer")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Marks of a generation block in the rendered text. Noncharacters: no valid text interchange holds them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
MAX_STEPS = 2_000_000
"""Rounds of loops and calls of macros in one render: a template that goes on for ever is stopped, anywhere alike."""
MAX_POWER, MAX_REPEATED = 1000, 64 << 20
"""The largest exponent in a template, and the most characters or items that a product makes."""


class EndlessTemplateError(DataError):
    """A template went on for ever, or would have taken all memory."""


class _Generation(Extension):
    """The `{% generation %}` tag: puts marks around what the assistant wrote, when asked to."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class _StepsExceededError(Exception):
    """A template took more steps than it may."""


class _Steps(Extension):
    """Counts the rounds of loops and the calls of macros."""

    left = MAX_STEPS

    def insert(self, tree: nodes.Template) -> nodes.Template:
        """Let every loop and macro of a template count."""
        counted: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in counted:
            node.body.insert(0, nodes.ExprStmt(self.call_method("_step"), lineno=node.lineno))
        return tree

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _StepsExceededError


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which no single operation takes for ever either."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiply or raise to a power, within limits."""
        if operator == "**" and isinstance(right, (int, float)) and abs(right) > MAX_POWER:
            raise _StepsExceededError
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(many, (str, list, tuple)) and len(many) * times > MAX_REPEATED:
                    raise _StepsExceededError
        return super().call_binop(context, operator, left, right)


class _Namespace(Namespace):
    """jinja2's namespace without underscore names, which could reach CPython's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict` for templates: callable, with `fromkeys`, and no class attributes to climb on."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class ChatTemplate:
    """A compiled chat template; raises DataError where its source does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: datetime | None = None) -> None:
        """Compile; `now` is the current time for the template, whenever it asks. DataError."""
        self.source = source
        self._has_marks = "endgeneration" in source
        self._special_tokens = dict(special_tokens)
        try:
            environment = _environment(now or datetime.now())
            self._steps = cast(_Steps, environment.extensions[_Steps.identifier])
            self._template = environment.from_string(self._steps.insert(environment.parse(source)))
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            place = f" line {line}" if line else ""
            raise DataError(f"chat template{place}: {error}") from error
        plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        probe = self._written(plain) if self._has_marks else ""
        self.has_generation_marks = self._has_marks and (probe is None or _OPEN in probe)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """Render `messages` to the text whose token ids a model sees; DataError where the template refuses.

        `variables` are what `apply_chat_template` takes as further keyword arguments.
        """
        text = self._render(self._as_read(messages), add_generation_prompt, tools, variables)
        return text.replace(_OPEN, "").replace(_CLOSE, "") if self._has_marks else text

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render and return the character spans [start, stop) of the template's generation blocks, in order."""
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        length = opened = 0
        text = self._render(self._as_read(messages), False, tools)
        while text:
            stop = next((i for i, char in enumerate(text) if char in (_OPEN, _CLOSE)), len(text))
            pieces.append(text[:stop])
            length += stop
            if text[stop : stop + 1] == _OPEN:
                opened = length
            elif text[stop : stop + 1] == _CLOSE:
                spans.append((opened, length))
            text = text[stop + 1 :]
        return "".join(pieces), spans

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
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        self._steps.left = MAX_STEPS
        try:
            return self._template.render(
                **self._special_tokens,
                **variables,
                messages=[_with_reasoning(message) for message in messages],
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise DataError(f"the chat template refuses these messages: {error}") from error
        except (RecursionError, MemoryError, _StepsExceededError) as error:
            raise EndlessTemplateError("the chat template does not end within its limits") from error


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
        found = {
            name: files[path].decode()
            for name, path in (("default", TEMPLATE_FILE), ("tool_use", TOOL_TEMPLATE_FILE))
            if path in files
        }
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
        return _environment(datetime.now()).parse(source)
    except TemplateError as error:
        raise DataError(f"chat template: {error}") from error


def _environment(now: datetime) -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, _Steps, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no chat format wants.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute may not start with an underscore: {name!r}")


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
