"""Chat templates: jinja2 in the sandbox and with the helpers that transformers gives a template.

The rendered text, hence the token ids, equal those of `apply_chat_template`; transformers itself would import torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tuner.errors import DataError

Message = Mapping[str, Any]
"""A chat message: `role`, `content` and whatever else the template reads."""

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Marks of a generation block in the rendered text. Noncharacters: no valid text interchange holds them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


class _Generation(Extension):
    """The `{% generation %}` tag: puts marks around what the assistant wrote, when asked to."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


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
        """Compile; `now` is the time that the template is told, whenever it asks. DataError."""
        self.source = source
        self._has_marks = "endgeneration" in source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment(now or datetime.now()).from_string(source)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            place = f" line {line}" if line else ""
            raise DataError(f"chat template{place}: {error}") from error
        probe = self._probe() if self._has_marks else ""
        self.has_generation_marks = self._has_marks and (probe is None or _OPEN in probe)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render `messages` to the text whose token ids a model sees; DataError where the template refuses."""
        text = self._render(messages, add_generation_prompt, tools)
        return text.replace(_OPEN, "").replace(_CLOSE, "") if self._has_marks else text

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render and return the character spans [start, stop) of the template's generation blocks, in order."""
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        length = opened = 0
        text = self._render(messages, False, tools)
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

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        try:
            return self._template.render(
                **self._special_tokens,
                messages=[_with_reasoning(message) for message in messages],
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise DataError(f"the chat template refuses these messages: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise DataError("the chat template does not end within its limits") from error

    def _probe(self) -> str | None:
        """A plain exchange as the template writes it; None where it refuses one."""
        try:
            return self._render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], False, None)
        except DataError:
            return None


def parse_template(source: str) -> nodes.Template:
    """Return the syntax tree of a template's source; DataError where it does not compile."""
    try:
        return _environment(datetime.now()).parse(source)
    except TemplateError as error:
        raise DataError(f"chat template: {error}") from error


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
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


def _with_reasoning(message: Message) -> Message:
    # The three names under which data sets keep reasoning are one field to the template, as in transformers.
    reasoning = next((message[key] for key in _REASONING_FIELDS if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
