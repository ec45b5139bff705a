"""The one place where we replace the forward of a module: which wrapper may enclose which is an order, and is checked.
Liger alone patches modules itself (:func:`tuner.model.kernels.apply_liger`), at its place in ``parallel/assemble``.

Each wrapper keeps the forward that it found and is called in its place, so the last one applied is the outermost. A
module may have any of them, in the order of :class:`Wrapper`: another order is another program, which may be wrong and
run all the same (a layer that is compiled around what must be asked anew in each forward, an input kept on the host for
a layer that is not computed again).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum, auto
from typing import Any

from torch import nn

_WRAPPERS = "forward_wrappers"
"""Where a module keeps what its forward is wrapped in."""


class Wrapper(IntEnum):
    """What takes the place of a module's forward, the innermost first."""

    DOCUMENTS = auto()
    """What the class computes, told where documents lie: masks by documents, counts, states, factors by length."""
    FLOAT8 = auto()
    """A product in fp8 in place of the layer's own."""
    ADAPTED = auto()
    """A layer with its adapter in one product: around the base's forward, whatever computes that."""
    KERNEL = auto()
    """A kernel, verified to reproduce the forward as it is wrapped so far."""
    SPLIT = auto()
    """A process's part of a layer that several compute together."""
    EXPERTS = auto()
    """Tokens go to the processes that have their experts: around whatever kernel computes these."""
    ROWS = auto()
    """Rows of an embedding: looked up in shards, or with gradients by rows."""
    TILED = auto()
    """One tile of positions after the other: around whatever computes one."""
    UNCOMPILED = auto()
    """Left to the interpreter, between compiled programs."""
    ROUTERS = auto()
    """What routers say is a result of the layer: inside of what computes the layer again or compiles it."""
    PARTS_COMPILED = auto()
    """Compiled with something that stays outside between its programs: computing the layer again runs these again."""
    RECOMPUTED = auto()
    """Computed again in the backward pass."""
    COMPILED = auto()
    """One program, with what is computed again."""
    OFFLOADED = auto()
    """Its input is kept in the host's memory: around what keeps the input alone."""
    LEFT_OUT = auto()
    """For as long as a proof runs, a layer hands on what it is given."""


def wrap(module: nn.Module, kind: Wrapper, forward: Callable[..., Any]) -> None:
    """Have a module compute ``forward`` in place of its own, which the caller may have kept to call it.

    Into the module's own dictionary: a forward that is a module itself is no part of the model, and a copy of the class
    stays as it is. Raises RuntimeError where a wrapper of a later kind is there already.
    """
    before = wrappers_of(module)
    if before and before[-1] > kind:
        raise RuntimeError(f"{type(module).__name__}: {kind.name} goes inside of {before[-1].name}, not around it")
    vars(module)["forward"] = forward
    vars(module)[_WRAPPERS] = (*before, kind)


def unwrap(module: nn.Module) -> None:
    """Have a module compute its class's own forward again."""
    vars(module).pop("forward", None)
    vars(module).pop(_WRAPPERS, None)


def names_in(function: Any) -> tuple[str, ...]:
    """What a function's own code reads, by name; nothing where it is not one of Python's."""
    return getattr(getattr(function, "__code__", None), "co_names", ())


def wrappers_of(module: nn.Module) -> tuple[Wrapper, ...]:
    """What a module's forward is wrapped in, the innermost first."""
    return tuple(vars(module).get(_WRAPPERS, ()))


@contextmanager
def wrapped(module: nn.Module, kind: Wrapper, forward: Callable[..., Any]) -> Iterator[None]:
    """Within, the same; afterwards the module is as it was."""
    before = {key: vars(module)[key] for key in ("forward", _WRAPPERS) if key in vars(module)}
    wrap(module, kind, forward)
    try:
        yield
    finally:
        unwrap(module)
        vars(module).update(before)
