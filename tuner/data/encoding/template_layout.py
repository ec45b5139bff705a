"""What a chat template writes around messages, learned once for each sequence of roles.

Most records of a data set have the same few shapes, and most templates put a message's content into the text without
looking into it. Then a record's text is known without rendering: constant parts with the contents between them. That
a template does so is shown, not assumed: the plan of a shape is made from spies, strings that note every question
that the template asks about them. A content for which all answers would be the same gives the same text but for
itself, and the same turns. A template that does with contents what a spy cannot see is read record by record.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.nodes import Node

from tuner.data.encoding.template import parse_template
from tuner.data.encoding.template_limits import names
from tuner.data.encoding.template_spy import Asked, TemplateSpy
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.encoding.turns import Planner
from tuner.data.reading.examples import Conversation
from tuner.data.reading.problems import RecordProblem
from tuner.errors import DataError

MAX_MESSAGES = 64
MAX_SHAPES = 512
_WRITTEN = frozenset({"string", "tojson"})
_OPAQUE = (
    *(nodes.Macro, nodes.Block, nodes.FilterBlock, nodes.AssignBlock, nodes.Include),
    *(nodes.Import, nodes.FromImport, nodes.Extends, nodes.Mod),
)
_FILTERS, _TESTS = names("seen_filters"), names("seen_tests")
_FUNCTIONS, _METHODS = names("seen_functions"), names("seen_methods")


class Shape(NamedTuple):
    """Roles, and whether each message says of itself that it is trained."""

    roles: tuple[str, ...]
    train: tuple[bool | None, ...]


class LayoutMark(NamedTuple):
    """A turn by the constant parts: it starts `start` bytes into part `start_part`, and so its stop."""

    start_part: int
    start: int
    stop_part: int
    stop: int
    trained: bool
    is_answer: bool
    prompt: str
    """The constant text before an answer, from the last control token on."""


class TemplateLayout(NamedTuple):
    """The constant parts of a shape's text (one more than it has contents) and what contents must be like."""

    parts: tuple[str, ...]
    part_bytes: tuple[int, ...]
    marks: tuple[LayoutMark, ...]
    default: bool
    specials: int
    """Control tokens in the parts: one more in a record's ids was written out by a user."""
    literals: tuple[str, ...]
    strips: tuple[tuple[str, str | None], ...]
    notes: tuple[str, ...]

    def fits(self, contents: Sequence[str]) -> bool:
        """Whether the template would treat `contents` as it treated the spies."""
        together = "\0".join(contents)  # a literal that stands over an end of one costs a render alone
        if not all(contents) or any(literal in together for literal in self.literals):
            return False
        return all(getattr(content, method)(chars) == content for method, chars in self.strips for content in contents)

    def part_starts(self, sizes: Sequence[int]) -> list[int]:
        """Return the byte at which each part starts, for contents of `sizes` bytes."""
        return list(accumulate((own + size for own, size in zip(self.part_bytes[:-1], sizes, strict=True)), initial=0))


class TemplateLayouts:
    """The layouts of a planner's shapes; a shape that has none is asked for once."""

    def __init__(self, tokenizer: TextTokenizer, planner: Planner) -> None:
        self._tokenizer = tokenizer
        self._planner = planner
        self._known: dict[Shape, TemplateLayout | None] = {}
        self._transparent = tokenizer.has_template and _is_transparent(tokenizer.template.source)

    def find(self, shape: Shape) -> TemplateLayout | None:
        """Return the layout of a shape, or None where its records must be rendered one by one."""
        if shape not in self._known:
            if not self._transparent or len(shape.roles) > MAX_MESSAGES or len(self._known) >= MAX_SHAPES:
                return None
            self._known[shape] = self._learn(shape)
        return self._known[shape]

    def _learn(self, shape: Shape) -> TemplateLayout | None:
        roles, train = shape.roles, shape.train
        asked = Asked()
        # Escaping, another case, shortened white space or a filter would all change these texts.
        texts = (f"Qz{i}\u00dfq\t\"&'\\<>  \n\n {{}} %s \u0130z{i}K" for i in range(len(roles)))
        spies = [TemplateSpy.make(text, asked) for text in texts]
        messages: list[dict[str, Any]] = [{"role": r, "content": c} for r, c in zip(roles, spies, strict=True)]
        try:
            plans = self._planner.conversation(Conversation(messages, list(train), None), messages)
        except (RecordProblem, DataError):
            return None
        if plans.by_answer:
            return None
        plan = plans.plans[0]
        cuts = [(plan.text.find(spy.plain), len(spy.plain)) for spy in spies]
        starts = [start for start, _ in cuts]
        once = all(plan.text.count(spy.plain) == 1 for spy in spies)
        if asked.too_much or not once or starts != sorted(starts):
            return None
        edges = [0, *(edge for start, size in cuts for edge in (start, start + size)), len(plan.text)]
        parts = tuple(plan.text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))
        marks = []
        for turn in plan.turns:
            start, stop = _inside(turn.start, edges), _inside(turn.stop, edges)
            if start is None or stop is None:
                return None
            prompt = self._prompt(plan.text, turn.start, edges) if turn.is_answer else ""
            if prompt is None:
                return None
            first, last = (len(parts[part][:at].encode()) for part, at in (start, stop))
            marks.append(LayoutMark(start[0], first, stop[0], last, turn.trained, turn.is_answer, prompt))
        part_bytes = tuple(len(part.encode()) for part in parts)
        specials = sum(len(self._tokenizer.specials(part)) for part in parts)
        literals, strips = tuple(sorted(asked.literals)), tuple(sorted(asked.strips, key=repr))
        return TemplateLayout(parts, part_bytes, tuple(marks), plan.default, specials, literals, strips, plan.notes)

    def _prompt(self, text: str, start: int, edges: list[int]) -> str | None:
        """The constant text from the last control token before `start`; None where a content is in between."""
        last = self._tokenizer.last_special(text, 0, start)
        inside = None if last is None else _inside(last[0], edges)
        here = _inside(start, edges)
        return text[last[0] : start] if last is not None and inside and here and inside[0] == here[0] else None


def _inside(position: int, edges: list[int]) -> tuple[int, int] | None:
    """(part, characters into it) of a position; None inside a content."""
    for part, (start, stop) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
        if start <= position <= stop:
            return part, position - start
    return None


def _is_transparent(source: str) -> bool:
    """Whether all that a template does with contents would be seen by a spy."""
    try:
        tree = parse_template(source)
    except DataError:
        return False
    return all(_is_seen(node) for node in _walk(tree))


def _walk(node: Node) -> Iterator[Node]:
    for child in node.iter_child_nodes():
        # Made for output alone, a text is written and never asked about again.
        written = isinstance(child, nodes.Concat) or (isinstance(child, nodes.Filter) and child.name in _WRITTEN)
        if not (written and isinstance(node, nodes.Output)):
            yield child
        yield from _walk(child)


def _is_seen(node: Node) -> bool:
    if isinstance(node, (*_OPAQUE, nodes.Concat)):
        return False
    if isinstance(node, nodes.CallBlock):
        return isinstance(node.call.node, nodes.ExtensionAttribute)
    if isinstance(node, nodes.Call):
        return _is_harmless(node)
    if isinstance(node, nodes.Filter):
        by_role = bool(node.args) and isinstance(node.args[0], nodes.Const) and node.args[0].value == "role"
        return node.name in _FILTERS or (node.name in ("selectattr", "rejectattr") and by_role)
    if isinstance(node, nodes.Test):
        return node.name in _TESTS
    if isinstance(node, nodes.Compare):
        return all(operand.op not in ("in", "notin") or _needle(node.expr, operand.expr) for operand in node.ops)
    return True


def _is_harmless(call: nodes.Call) -> bool:
    """Whether a call asks only what a spy notes: a method of it with constants, or a function for templates."""
    if isinstance(call.node, nodes.Name):
        return call.node.name in _FUNCTIONS
    if isinstance(call.node, nodes.ExtensionAttribute):
        return True
    plain = all(isinstance(argument, nodes.Const) for argument in call.args) and not call.kwargs
    own = isinstance(call.node, nodes.Getattr) and not isinstance(call.node.node, nodes.Const)
    return own and plain and isinstance(call.node, nodes.Getattr) and call.node.attr in _METHODS


def _needle(left: Node, right: Node) -> bool:
    """Whether `left in right` asks a spy: a spy as the needle in a plain string would not be."""
    if isinstance(right, (nodes.List, nodes.Tuple)) or isinstance(left, nodes.Const):
        return True
    name = left.attr if isinstance(left, nodes.Getattr) else None
    if isinstance(left, nodes.Getitem) and isinstance(left.arg, nodes.Const):
        name = left.arg.value
    return name == "role"
