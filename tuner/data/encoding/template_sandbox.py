"""The sandbox in which chat templates render: jinja2's, in which no single operation takes much time or memory either.

Whatever a template can ask of C is bounded before it is done: operators, comparisons, texts and the methods of texts,
lists and numbers, filters and tests, by what they would make. A name that is on none of the lists is refused, so that
what a newer Python or jinja2 brings is looked at first. The bounds are put into a template's syntax tree as filters
with names that no template can write; those of other nodes cost nothing.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

from jinja2 import TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS as DEFAULT_FILTERS
from jinja2.filters import make_attrgetter
from jinja2.lexer import Token, TokenStream
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS as DEFAULT_TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from tuner.data.encoding import template_limits as limits
from tuner.data.encoding.template_limits import KNOWN, MAX_CHARS, MAX_DEPTH, MAX_POWER, Meter, names, refuse
from tuner.data.encoding.template_spy import TemplateSpy

_SHORT_TEXT = 1024
_STREAMED = names("streamed")
"""What these give is counted one by one, so that a chat of any length passes."""
_TEXTS = names("texts")


def _bounded_filter(name: str, function: Callable[..., Any], meter: Meter) -> Callable[..., Any]:
    """A filter that is run where its bound is within limits; what it gives one by one is counted."""
    at = int(hasattr(function, "jinja_pass_arg"))
    is_text = name in _TEXTS

    @wraps(function)
    def bounded(*given: Any, **named: Any) -> Any:
        value, args = given[at], given[at + 1 :]
        if is_text and type(value) is str and len(value) < _SHORT_TEXT and not args and not named:
            return function(*given)
        if name in _STREAMED:
            meter.weigh((*args, *named.values()))
        else:
            value = _measured(meter, value, is_text)
            if name == "format":
                meter.formatted(value if isinstance(value, str) else str(value), "%", (*args, *named.values()))
            else:
                meter.bound(name, value, args, named)
        made = function(*given[:at], value, *args, **named)
        if isinstance(made, str):
            meter.weigh(made)
        elif isinstance(made, int):
            meter.bits(made.bit_length())
        elif hasattr(type(made), "__next__"):
            return meter.counted(made, 2 + sum(len(each) for each in args if isinstance(each, str)))
        return made

    return bounded


def _measured(meter: Meter, value: Any, is_text: bool) -> Any:
    """A value that is known to be within limits: as it is, or what an iterator gives as a list. LimitError."""
    if not is_text or not isinstance(value, str):
        value = meter.bounded(value)
        meter.charge(meter.weigh(value) >> 2)
    if is_text:
        meter.chars(meter.written(value))
    return value


def _bounded_test(name: str, function: Any, meter: Meter) -> Callable[..., Any]:
    at = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def bounded(*given: Any) -> Any:
        value = _measured(meter, given[at], True)
        meter.weigh(given[at + 1 :])
        if isinstance(value, str) and name in ("divisibleby", "even", "odd"):
            refuse("a remainder of a text")  # of a text `%` fills in its places
        return function(*given[:at], value, *given[at + 1 :])

    return bounded


def _tojson(
    meter: Meter, value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no chat format wants.
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    size, between = meter.weigh(value), 0
    if indent is not None or separators is not None:
        between = meter.weigh([indent, separators]) + (abs(indent) if isinstance(indent, int) else 0)
    if between > MAX_POWER:
        refuse(f"JSON with more than {MAX_POWER:,} characters between its items")
    if size * (12 + between * MAX_DEPTH) <= MAX_CHARS:  # twelve characters may stand for one, as \\ud83d\\ude42
        meter.charge(size >> 6)
        return encoder.encode(value)
    pieces, made = [], 0
    for piece in encoder.iterencode(value):
        meter.charge(4 + (len(piece) >> 6))
        made += len(piece)
        if made > MAX_CHARS:
            refuse(f"JSON of more than {MAX_CHARS:,} characters")
        pieces.append(piece)
    return "".join(pieces)


def _sum(environment: Any, meter: Meter, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    if isinstance(start, str):
        raise TemplateRuntimeError("sum() can't sum strings: use join")
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    for value in meter.bounded(values):
        start = environment.operate("+", start, value)
    return start


OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Marks of a generation block in the rendered text. Noncharacters: no valid text interchange holds them."""
_STEP, _TEXT, _JOIN, _WEIGH, _KEY, _CUT = "+step", "+text", "+join", "+weigh", "+key", "+cut"
_SHORT, _SMALL_INT = 1 << 8, 1 << 62
_ALWAYS_TEXT = _TEXTS - {"safe"} | {"tojson", _JOIN}
"""Filters that give a text whatever they are given."""


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2 with the settings of transformers, within limits: `meter` says what the render at work has taken."""

    intercepted_binops = frozenset({"+", "-", "*", "//", "%", "**"})

    def __init__(self) -> None:
        # A constant is computed when it is needed: folded at compile time it might make the code as large as it is.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, _Tokens, loopcontrols]
        )
        self.meter = meter = Meter()
        self.code_generator_class = _Code
        bounded = _STREAMED | _TEXTS | names("listed")
        self.filters = {name: DEFAULT_FILTERS[name] for name in names("free")}
        self.filters |= {name: _bounded_filter(name, DEFAULT_FILTERS[name], meter) for name in bounded}
        self.filters |= {"tojson": partial(_tojson, meter), "sum": partial(_sum, self, meter)}
        self.tests = {name: DEFAULT_TESTS[name] for name in names("free_tests")}
        self.tests |= {name: _bounded_test(name, DEFAULT_TESTS[name], meter) for name in names("tests")}
        self.filters |= {_STEP: meter.step, _TEXT: self._text, _JOIN: self._join, _CUT: self._cut}
        self.filters |= dict.fromkeys((_WEIGH, _KEY), self._weigh)
        self.globals["dict"], self.globals["namespace"] = _Dict(), _Namespace
        self.globals.pop("lipsum")

    def metered(self, source: str) -> nodes.Template:
        """Parse a source, and let what it does be counted. LimitError, TemplateError."""
        if len(source) > limits.MAX_SOURCE_CHARS:
            refuse(f"more than {limits.MAX_SOURCE_CHARS:,} characters of source")
        tree = _Metered().visit(self.parse(source))
        assert isinstance(tree, nodes.Template)
        return tree

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Let an error of a render be as it is: jinja2 would keep all that the template made, in a cycle."""
        if isinstance(sys.exception(), TemplateSyntaxError):
            super().handle_exception(source)
        raise  # noqa: PLE0704 - jinja2 calls this where it caught the error

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute, where the result is within limits."""
        if operator == "+" and type(left) is str and type(right) is str and len(left) + len(right) < _SHORT_TEXT:
            return left + right  # as most are
        return self.operate(operator, left, right)

    def operate(self, operator: str, left: Any, right: Any) -> Any:
        """The same without a context. LimitError."""
        if operator in ("*", "**") or type(left) is not int or type(right) is not int:
            self._bound(operator, left, right)
        elif not -_SMALL_INT < left < _SMALL_INT or not -_SMALL_INT < right < _SMALL_INT:
            bits = left.bit_length() + right.bit_length()
            self.meter.bits(bits)
            self.meter.charge(bits)
        return self.binop_table[operator](left, right)

    def _bound(self, operator: str, left: Any, right: Any) -> None:
        meter = self.meter
        if operator == "+":
            if isinstance(left, str):
                escapes = 6 if hasattr(left, "__html__") or hasattr(right, "__html__") else 1  # where a text joins HTML
                meter.chars(str.__len__(left) + meter.weigh(right) * escapes)
            elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
                meter.items(len(left) + len(right))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(many, (str, list, tuple)):
                    (meter.chars if isinstance(many, str) else meter.items)(len(many) * max(times, 0))
            if isinstance(left, int) and isinstance(right, int):
                meter.bits(left.bit_length() + right.bit_length())
        elif operator == "**":
            if isinstance(right, (int, float)) and abs(right) > limits.MAX_POWER:
                refuse(f"an exponent of more than {limits.MAX_POWER:,}")
            if isinstance(left, int) and isinstance(right, int):
                meter.bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            meter.formatted(left, "%", (right,))
        elif operator == "-":
            meter.weigh(left)
            meter.weigh(right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's `format` of a text, within limits."""
        inner = super().wrap_str_format(value) if type(value) in (BuiltinMethodType, MethodType) else None
        if inner is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            self.meter.formatted(value.__self__, "{", (*args, *kwargs.values()))
            return inner(*args, **kwargs)

        return limited

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls; a method of a text, list or number where its result is within limits."""
        meter = self.meter
        meter.charge(8)
        owner = getattr(obj, "__self__", None)
        if type(obj) is BuiltinMethodType or (isinstance(owner, (str, type)) and type(owner) is not TemplateSpy):
            for name in ("_loop_vars", "_block_vars"):  # what jinja2 hands to its own functions
                kwargs.pop(name, None)
            name = obj.__name__
            if kwargs or name not in KNOWN or not all(type(o) is str and len(o) < _SHORT for o in (owner, *args)):
                args = tuple(map(meter.listed, args))
                of, given = (args[0], (owner,)) if name in ("join", "escape") and args else (owner, args)
                meter.bound(name, of, given, kwargs)
            return obj(*args, **kwargs)
        if obj is _Namespace or type(obj) is _Dict or isinstance(owner, (_Dict, LoopContext, TemplateSpy)):
            args = tuple(map(meter.listed, args))
            meter.weigh(args)
        return super().call(context, obj, *args, **kwargs)

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a compiled template writes. LimitError."""
        pieces = parts if isinstance(parts, list) else list(parts)
        self.meter.chars(sum(map(str.__len__, pieces)))
        return "".join(pieces)

    def _text(self, value: Any) -> Any:
        """A value that is about to be written."""
        if not isinstance(value, str):
            self.meter.chars(self.meter.written(value))
        return value

    def _join(self, values: list[Any]) -> str:
        self.meter.chars(sum([str.__len__(v) if isinstance(v, str) else self.meter.written(v) for v in values]))
        return "".join(map(str, values))

    def _weigh(self, value: Any) -> Any:
        """A value that is about to be compared, or used as a key."""
        self.meter.weigh(value)
        return value

    def _cut(self, value: Any) -> Any:
        """A slice of something."""
        if isinstance(value, str):
            self.meter.charge(str.__len__(value) >> 6)
        elif isinstance(value, (list, tuple)):
            self.meter.charge(len(value) >> 4)
        return value


class _Code(CodeGenerator):
    """Writes a template as Python, and evaluates nothing meanwhile."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, (nodes.TemplateData, nodes.Const)):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Generation(Extension):
    """The `{% generation %}` tag: puts marks around what the assistant wrote, when asked to."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


class _Tokens(Extension):
    """Counts the tokens of a source."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for count, token in enumerate(stream):
            if count >= limits.MAX_TOKENS:
                refuse(f"more than {limits.MAX_TOKENS:,} tokens of source")
            yield token


class _Metered(NodeTransformer):
    """Puts into a tree what counts and bounds."""

    def __init__(self) -> None:
        self._seen = self._depth = 0

    def visit(self, node: Node, *args: Any, **kwargs: Any) -> Any:
        self._seen += 1
        self._depth += 1
        if self._depth > limits.MAX_NESTING:
            refuse(f"statements and expressions more than {limits.MAX_NESTING} deep in each other")
        try:
            return super().visit(node, *args, **kwargs)
        finally:
            self._depth -= 1

    def visit_Output(self, node: nodes.Output) -> Node:
        self.generic_visit(node)
        node.nodes = [each if _is_text(each) else _bounded(each, _TEXT) for each in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> Node:
        self.generic_visit(node)
        return _bounded(nodes.List(node.nodes, lineno=node.lineno), _JOIN)

    def visit_Compare(self, node: nodes.Compare) -> Node:
        self.generic_visit(node)
        left = node.expr
        for operand in node.ops:
            right = operand.expr
            if operand.op in ("in", "notin"):
                if left is node.expr and not _is_fixed(left):
                    node.expr = _bounded(left, _KEY)
                if not _is_fixed(right):
                    operand.expr = _bounded(right, _WEIGH)
            elif not _is_fixed(left) and not _is_fixed(right):
                operand.expr = _bounded(right, _WEIGH)
            left = right
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _bounded(node, _CUT)
        if not isinstance(node.arg, nodes.Const):
            node.arg = _bounded(node.arg, _KEY)
        return node

    def visit_Pair(self, node: nodes.Pair) -> Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _bounded(node.key, _KEY)
        return node

    def visit_Const(self, node: nodes.Const) -> Node:
        if isinstance(node.value, int) and node.value.bit_length() > limits.MAX_BITS:
            refuse(f"a number of more than {limits.MAX_BITS:,} bits")
        return node

    def visit_ScopedEvalContextModifier(self, node: Node) -> Node:
        raise TemplateSyntaxError("a chat template has no HTML to escape: autoescape is not known", node.lineno)

    def visit_For(self, node: nodes.For) -> Node:
        node = self._counted(node)
        if node.test is not None:
            node.test = nodes.And(self._step(1, node), node.test, lineno=node.lineno)
        return node

    def _counted(self, node: Any) -> Any:
        """Let every round of a loop, or call of what has a body, count as much as stands in it."""
        before = self._seen
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._step(self._seen - before, node), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _counted

    @staticmethod
    def _step(cost: int, node: Node) -> nodes.Expr:
        return _bounded(nodes.Const(cost, lineno=node.lineno), _STEP)


def _bounded(node: Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _is_fixed(node: Node) -> bool:
    """Whether what is compared is in the source, and so is short."""
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


def _is_text(node: Node) -> bool:
    """Whether an expression cannot be anything but a text, which is counted where it is made."""
    if isinstance(node, nodes.CondExpr):
        return _is_text(node.expr1) and (node.expr2 is None or _is_text(node.expr2))
    return isinstance(node, (nodes.TemplateData, nodes.Const)) or (
        isinstance(node, nodes.Filter) and node.name in _ALWAYS_TEXT
    )


class _Namespace(Namespace):
    """jinja2's namespace without underscore names, which could reach CPython's internals."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_underscore(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute may not start with an underscore: {name!r}")


class _Dict:
    """`dict` for templates: callable, with `fromkeys`, and no class attributes to climb on."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)
