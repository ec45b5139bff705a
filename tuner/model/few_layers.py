"""The decoder layers that stand for all others, and running a model and its plain twin with these alone.

Two layers are of a kind where everything that is no value of a weight is alike in them: the classes of their parts, the
numbers, words and functions that these hold, shapes and types of their tensors, the contents of their buffers, hooks,
what the config says of each layer in a list, and what the decoder calls them with. What is another one in every layer,
such as its number, tells none apart. The first and the last of each kind run; the others hand on what they are given.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from tuner.errors import RecipeError
from tuner.model.build import decoder_blocks, decoder_of
from tuner.model.freeze import content_of
from tuner.model.wrap import Wrapper, wrapped

_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks"})
_MODULE_OWN = frozenset(vars(nn.Module())) - {"training"} - _HOOKS
"""What torch itself keeps in every module."""
_DEPTH = 4
"""Containers and objects inside each other that are looked into."""
_ABSENT = "absent"
_NUMBER_OF_LAYER = ("idx", "index", "layer_id", "layer_number")
"""How arguments end that say a layer's number."""


class FewLayers:
    """The decoder layers that stand for all, first of all by what they are made of.

    Layers that are alike may still be called otherwise, with another mask or rotation than those of their kind that
    ran: :meth:`grow` adds them after a forward.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._blocks = model, layers_of(model)
        of = {module: name for name, module in model.named_modules()}
        self._names = [of[block] for block in self._blocks]
        self._passes: tuple[list[_Pass], ...] = ()
        """The forwards of either model."""
        self._kinds = self._kinds_by_stack()
        self.chosen = representatives(self._kinds)

    def _kinds_by_stack(self) -> list[Hashable]:
        """The kind of each layer among those of its list: a model may have several, each numbered from 0 on."""
        stacks: dict[str, list[int]] = {}
        for place, name in enumerate(self._names):
            stacks.setdefault(re.sub(r"\.\d+(?=\.|$)", "", name), []).append(place)
        found: dict[int, Hashable] = {}
        for stack, places in stacks.items():
            kinds = kinds_of([self._blocks[place] for place in places], self._model.config)
            found |= {place: (stack, kind) for place, kind in zip(places, kinds, strict=True)}
        return [found[place] for place in range(len(self._names))]

    @property
    def total(self) -> int:
        """How many layers there are; 0 where the decoder has none in a list: then there is nothing to leave out."""
        return len(self._kinds)

    @property
    def is_whole(self) -> bool:
        """Whether all layers run."""
        return len(self.chosen) == self.total

    def left_out(self, model: nn.Module) -> set[nn.Module]:
        """The layers of the model, or of its plain twin, that do not run."""
        names = (name for place, name in enumerate(self._names) if place not in self.chosen)
        return {model.get_submodule(name) for name in names}

    @contextmanager
    def running(self, plain: PreTrainedModel) -> Iterator[None]:
        """Within, the chosen layers alone run in both models; RuntimeError where a layer gives what nothing else could
        give in its place."""
        self._passes = [], []
        beside = [plain.get_submodule(name) for name in self._names]
        with ExitStack() as sides:
            if not self.is_whole:
                sides.enter_context(_skipping(self._model, self._blocks, self.chosen, self._passes[0]))
                sides.enter_context(_skipping(plain, beside, self.chosen, self._passes[1]))
            yield

    def grow(self) -> bool:
        """Choose layers too that were called as no chosen one of their kind was; whether there were any."""
        calls = [one.kinds(self.total) for passes in self._passes for one in passes]
        found = representatives(list(zip(self._kinds, *calls, strict=True))) | self.chosen
        grew, self.chosen = found > self.chosen, found
        return grew

    def runs(self, name: str) -> bool:
        """Whether a module of the model, by its name, is part of what runs."""
        skipped = (self._names[place] for place in range(self.total) if place not in self.chosen)
        return not any(name == one or name.startswith(f"{one}.") for one in skipped)


@contextmanager
def _skipping(
    model: PreTrainedModel, blocks: Sequence[nn.Module], chosen: set[int], passes: list[_Pass]
) -> Iterator[None]:
    """Within, the chosen ones of a model's layers alone run, and its forwards are noted."""
    begin = decoder_of(model).register_forward_pre_hook(lambda *_: passes.append(_Pass()))
    with ExitStack() as restored:
        restored.callback(begin.remove)
        for place, block in enumerate(blocks):
            instead = _noted(place, block, passes, runs=place in chosen)
            restored.enter_context(wrapped(block, Wrapper.LEFT_OUT, instead))
        yield


def _noted(place: int, block: nn.Module, passes: list[_Pass], runs: bool) -> Callable[..., Any]:
    """The forward of a layer, of which is noted how it is called, or where it does not run what stands for it."""
    forward = block.forward
    names = list(inspect.signature(forward).parameters)

    @functools.wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden = given[names[0]]
        if not passes:  # a layer that is called outside of the decoder
            passes.append(_Pass())
        noted = passes[-1]
        noted.note(place, hidden, {key: value for key, value in given.items() if key != names[0]})
        if not runs:
            return noted.in_place_of(type(block), hidden)
        output = forward(*args, **kwargs)
        noted.ran(type(block), hidden, output)
        return output

    return called


class _Pass:
    """One forward: what its layers were given, and what those that ran gave."""

    def __init__(self) -> None:
        self._given: dict[int, dict[str, object]] = {}
        self._outputs: dict[type, Any] = {}
        self._made: list[torch.Tensor] = []

    def note(self, place: int, hidden: torch.Tensor, arguments: dict[str, Any]) -> None:
        """What a layer is given with its hidden states. Others, of layers before it, tell none apart."""
        flat = {path: value for key, argument in arguments.items() for path, value in _leaves(key, argument)}
        made = {id(tensor) for tensor in self._made}
        self._given[place] = {
            path: "of a layer" if id(value) in made or _is_like(hidden, value) else value
            for path, value in flat.items()
            if not path.endswith(_NUMBER_OF_LAYER)
        }

    def ran(self, kind: type, hidden: torch.Tensor, output: Any) -> None:
        whole = output if isinstance(output, tuple | list) else (output,)
        first = whole[0] if whole else None
        if not isinstance(first, torch.Tensor) or first.shape != hidden.shape:
            raise RuntimeError(f"{kind.__name__} does not give hidden states first")
        self._outputs[kind] = output
        self._made += [one for one in whole if isinstance(one, torch.Tensor)]

    def in_place_of(self, kind: type, hidden: torch.Tensor) -> Any:
        """What a skipped layer gives: hidden states as they were given, and all else as the last one that ran."""
        if kind not in self._outputs:
            raise RuntimeError(f"no {kind.__name__} ran before one that is skipped")
        output = self._outputs[kind]
        if hasattr(output, "_fields"):  # streams by name, in another order than they are taken (Reformer's two)
            return output
        return type(output)([hidden, *output[1:]]) if isinstance(output, tuple | list) else hidden

    def kinds(self, count: int) -> list[Hashable]:
        """How each of so many layers was called: objects that several were given, and the contents of all others."""
        given = [self._given.get(place, {}) for place in range(count)]
        facts: list[dict[Hashable, Hashable]] = [{} for _ in given]
        for path in dict.fromkeys(path for one in given for path in one):
            there = [(place, one[path]) for place, one in enumerate(given) if path in one]
            tensors = [value for _, value in there if isinstance(value, torch.Tensor)]
            are_shared = len({id(tensor) for tensor in tensors}) < len(tensors)
            numbers: dict[int, int] = {}
            for place, value in there:
                is_tensor = isinstance(value, torch.Tensor)
                same = numbers.setdefault(id(value), len(numbers)) if is_tensor and are_shared else told(value)
                facts[place][path] = same
        return shared_kinds(facts)


def _is_like(hidden: torch.Tensor, value: object) -> bool:
    """Whether a value may be hidden states, of one layer or several (Inkling 2's are those of all blocks before)."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim < hidden.ndim:
        return False
    return value.shape[:2] == hidden.shape[:2] and value.shape[-1] == hidden.shape[-1]


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Tensors and other values in a nest of tuples, lists and dicts, by where they are."""
    if isinstance(value, tuple | list):
        for place, one in enumerate(value):
            yield from _leaves(f"{key}.{place}", one)
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _leaves(f"{key}.{name}", one)
    else:
        is_plain = isinstance(value, torch.Tensor | bool | int | float | str | None)
        yield key, value if is_plain else type(value).__qualname__


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers; of a class that names none, what its decoder has the most of in a list."""
    try:
        return decoder_blocks(model)
    except RecipeError:
        lists = [part for part in decoder_of(model).modules() if isinstance(part, nn.ModuleList)]
        inside = {part for one in lists for part in one.modules() if part is not one}
        return list(max((one for one in lists if one not in inside), key=len, default=()))


def kinds_of(blocks: Sequence[nn.Module], config: PretrainedConfig) -> list[Hashable]:
    """The kind of each decoder layer, in their order: equal where one stands for the other."""
    facts: list[dict[Hashable, Hashable]] = [dict(_facts(block)) for block in blocks]
    for key, value in vars(config.get_text_config()).items():
        if isinstance(value, list | tuple) and len(value) == len(blocks):
            for fact, own in zip(facts, value, strict=True):
                fact["config", key] = repr(own)
    numbers = _numbers(blocks)
    modules = [module for block in blocks for module in block.modules()]
    if any(_is_counting(kind, numbers) for kind in {type(module) for module in modules}) or any(
        _counts_by(function, numbers) for module in modules for function in _given(module, numbers)
    ):
        return list(range(len(blocks)))
    return shared_kinds(facts)


def shared_kinds(facts: Sequence[Mapping[Any, Hashable]]) -> list[Hashable]:
    """Kinds by what is known of each; what has another value for each of three or more is left out."""
    keys = dict.fromkeys(key for fact in facts for key in fact)
    telling = []
    for key in keys:
        values = [fact.get(key, _ABSENT) for fact in facts]
        there = [value for value in values if value != _ABSENT]
        if len(there) < 3 or len(set(there)) < len(there):
            telling.append(values)
        elif len(there) < len(values):  # which of them have it at all
            telling.append([value != _ABSENT for value in values])
    return list(zip(*telling, strict=True)) if telling else [()] * len(facts)


def representatives(kinds: Sequence[Hashable]) -> set[int]:
    """The first and the last of each kind."""
    places = [(kind, place) for place, kind in enumerate(kinds)]
    return {*dict(places).values(), *dict(reversed(places)).values()}


def _facts(block: nn.Module) -> Iterator[tuple[Hashable, Hashable]]:
    """Of each part of a layer, by its name: what it is, and what it holds besides parameters and parts."""
    for name, module in block.named_modules():
        yield (name, "class"), f"{type(module).__module__}.{type(module).__qualname__}"
        for key, value in vars(module).items():
            if key not in _MODULE_OWN:
                yield (name, key), told(list(value.values()) if key in _HOOKS else value)
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield (name, key), (tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield (name, key), told(buffer)


def told(value: object, depth: int = _DEPTH) -> Hashable:
    """What of a value is compared: numbers and words, tensors by their contents, functions by their names and what
    they enclose, objects by their class and what they hold."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return (type(value).__name__, str(value))
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype), None if value.is_meta else content_of(value.detach()).sha256)
    if isinstance(value, nn.Module | PretrainedConfig | type) or depth == 0:
        kind = value if isinstance(value, type) else type(value)
        return f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, Mapping):
        return tuple((str(key), told(one, depth - 1)) for key, one in value.items())
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, list | tuple):
        return tuple(told(one, depth - 1) for one in value)
    if isinstance(value, functools.partial):
        return ("partial", told(value.func, depth - 1), told(value.args, depth - 1), told(value.keywords, depth - 1))
    if inspect.ismethod(value):
        return ("method", f"{value.__func__.__module__}.{value.__func__.__qualname__}")
    if inspect.isfunction(value):
        cells = tuple(told(cell.cell_contents, depth - 1) for cell in value.__closure__ or () if _is_filled(cell))
        return (value.__module__, value.__qualname__, value.__code__.co_code, cells)
    held = getattr(value, "__dict__", {})
    return (f"{type(value).__module__}.{type(value).__qualname__}", told(dict(held), depth - 1))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty one raises
    except ValueError:
        return False
    return True


def _numbers(blocks: Sequence[nn.Module]) -> frozenset[str]:
    """Attributes in which parts of the layers hold their layer's number."""
    found: dict[tuple[str, str], list[int]] = {}
    for place, block in enumerate(blocks):
        for name, module in block.named_modules():
            for key, value in vars(module).items():
                if type(value) is int:
                    found.setdefault((name, key), []).append(value - place)
    return frozenset(key for (_, key), apart in found.items() if len(apart) > 1 and len(set(apart)) == 1)


def _is_counting(kind: type, numbers: frozenset[str]) -> bool:
    """Whether what a class runs compares its layer's number, or counts it off: the layer then stands for none but
    itself. That of the first layer (``== 0``) may be asked for, as the first of each kind runs."""
    own = (vars(one) for one in kind.__mro__ if not one.__module__.startswith("torch."))
    methods = (method for one in own for name, method in one.items() if name != "__init__")
    return any(_counts_by(method, numbers) for method in filter(inspect.isfunction, methods))


def _given(module: nn.Module, numbers: frozenset[str]) -> list[Callable[..., Any]]:
    """Functions that a module was given in place of its class's, where they name a layer's number."""
    own = [getattr(value, "func", value) for value in vars(module).values() if callable(value)]
    return [one for one in own if inspect.isfunction(one) and numbers.intersection(one.__code__.co_names)]


@functools.lru_cache(maxsize=4096)
def _counts_by(function: Callable[..., Any], numbers: frozenset[str]) -> bool:
    code = inspect.unwrap(function).__code__
    if not numbers.intersection(code.co_names):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # made at run time, or in the midst of a line
        return True
    return any(_is_counted(node, numbers) for node in ast.walk(tree))


def _is_counted(node: ast.AST, numbers: frozenset[str]) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Mod | ast.FloorDiv) and _is_number(node.left, numbers)
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    is_first = any(isinstance(side, ast.Constant) and side.value == 0 for side in sides)
    return not is_first and not any(map(_is_kept, sides)) and any(_is_number(side, numbers) for side in sides)


def _is_kept(node: ast.AST) -> bool:
    """Whether it is how many layers have something in a cache (Reformer's): training has none."""
    return isinstance(node, ast.Call) and "len(past_" in ast.unparse(node)


def _is_number(node: ast.AST, numbers: frozenset[str]) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in numbers
