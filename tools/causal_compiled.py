"""The compiled checks of the campaign of causal types: what trains by the compiler is what trains without it.

A type is trained with `train.compile: true` in packed rows and held to the plain loop. Then it computes other packings,
of one document to six: nothing is compiled for them, their gradients are those of the same weights without the
compiler, and there are no more graphs than kinds of layers, twice, and places that are left to the interpreter.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.fixtures.packed import packed_inputs
from tools.causal_cases import VOCAB
from tools.causal_checks import ALLOWED, SHORT, Outcome, Subject, difference, tried
from tools.causal_training import Mode, Training
from tuner.errors import RecipeError
from tuner.model import blocks as compiling
from tuner.model.build import decoder_blocks

PACKINGS = ((5, 21, 12), (64,), (1, 1, 1, 61), (30, 2, 9), (2, 7), (10, 11, 12, 13, 14, 4))
"""Lengths of documents: full rows, rows that are filled up, a document alone, many."""


def compiled(subject: Subject) -> Outcome:
    """Layers traced and differentiated as every compilation does; their graphs run as they are."""
    with _by("aot_eager"):
        return tried(lambda: _compare(subject))


def again(subject: Subject) -> Outcome:
    """Compiled layers that are computed again in the backward pass."""
    with _by("aot_eager"):
        return tried(lambda: _compare(subject, {"train.gradient_checkpointing": "full"}))


def inductor(subject: Subject) -> Outcome:
    """The same by the compiler of this machine."""
    with _by("inductor"):
        return tried(lambda: _compare(subject))


def _compare(subject: Subject, keys: Mapping[str, Any] = MappingProxyType({})) -> Outcome:
    held, steps = subject.held("packed"), min(SHORT, subject.steps)
    training = Training(subject.directory, Mode("packed", steps, {"train.compile": True, **keys}))
    root = training.state.root
    if root.parts.padding is None:
        raise RecipeError(f"documents do not lie end to end: {training.facts.why_apart}")
    blocks = decoder_blocks(root.model)
    if held:
        _hold(root, blocks)
    outcome = difference(training.train(subject.fault), subject.reference(held))
    graphs = _graphs()
    found = [_gradient(training, lengths) for lengths in PACKINGS]
    more, breaks = _graphs() - graphs, int(counters["graph_break"].total())
    eager = Training(subject.directory, Mode("packed", steps), held)
    eager.state.root.model.load_state_dict(root.model.state_dict())
    eager.state.root.train()
    pairs = zip(found, [_gradient(eager, lengths) for lengths in PACKINGS], strict=True)
    apart = max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)
    kinds = len({_kind(block) for block in blocks})
    outcome.reason = f"{graphs} graphs of {kinds} kinds of layers, {breaks} places outside"
    if more:
        outcome.reason += f", {more} more for other packings"
    if apart > ALLOWED:
        outcome.reason += f", {apart:.1e} from gradients without the compiler"
    if more or apart > ALLOWED or not 0 < graphs <= 2 * kinds + breaks:
        outcome.verdict = "wrong"
    return outcome


@contextmanager
def _by(backend: str) -> Iterator[None]:
    """Within, layers are compiled by this backend, and nothing compiled before is left."""
    before, compiling.BACKEND = compiling.BACKEND, backend
    torch._dynamo.reset()
    counters.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the tracer itself
            yield
    finally:
        compiling.BACKEND = before
        torch._dynamo.reset()


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def _hold(root: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Keep what draws random numbers in evaluation mode, and not the layers themselves, which would not be compiled."""

    def train(mode: bool = True) -> nn.Module:
        nn.Module.train(root, False)
        for module in (root, *blocks):
            module.training = mode
        return root

    root.train = train  # type: ignore[method-assign]


def _gradient(training: Training, lengths: tuple[int, ...]) -> torch.Tensor:
    """The gradients of the loss on documents of these lengths, end to end; the same documents for each call."""
    ids = torch.from_numpy(np.random.default_rng(sum(lengths)).integers(3, VOCAB, sum(lengths), dtype=np.int64))
    root = training.state.root.train()
    parameters = [p for p in root.model.parameters() if p.requires_grad]
    loss = root(document_lengths=lengths, **packed_inputs(ids, lengths))
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten().double() for gradient in found])


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What tells a program of a layer from another's: its modules, their numbers, and shapes."""
    found: list[Any] = []
    for name, module in block.named_modules():
        numbers = {key: value for key, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
        numbers.pop("layer_idx", None)
        shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
        found.append((name, type(module), tuple(sorted(map(repr, numbers.items()))), tuple(shapes)))
    return tuple(found)
