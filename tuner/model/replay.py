"""Routing that is the same where a layer's forward is computed a second time, in the backward pass.

A router sends a token to the experts whose scores are largest. Two scores may be so close that the second forward,
whose sums a device may take in another order, ranks them the other way round: gradients then reach an expert that had
no part in the loss, and where experts are on several processes, these no longer agree on how many tokens they exchange.
So the first forward notes what it ranked (every `topk` of a layer), and the second one ranks the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

_RANKED = frozenset({torch.topk, torch.Tensor.topk})
Result = TypeVar("Result")


Pair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Contexts = Callable[[], Pair]
"""What `torch.utils.checkpoint` calls for each first forward: what that runs in, and what the second one does."""


def replayed(around: Contexts | None = None) -> Pair:
    """Contexts of the forward of a layer and of its repetition, which routes as the first one did.

    They lie inside those of ``around``, where there are such.
    """
    notes: list[Any] = []
    first, second = (nullcontext(), nullcontext()) if around is None else around()
    return _Routing(notes, first, repeats=False), _Routing(notes, second, repeats=True)


def noted(make: Callable[[], Result]) -> Result:
    """What ``make`` gives; in the second forward of a layer, what it gave in the first, without a call.

    For what follows from the routing alone and costs something: a sort, a collective, a wait for the device.
    """
    routing = _current.get()
    return make() if routing is None else routing.next(make)


class _Routing(TorchFunctionMode):
    """Within, ranks are noted in the order in which they are taken, or, where it ``repeats``, given again.

    It lies inside the context ``around`` it, and may be entered several times one after the other.
    """

    def __init__(self, notes: list[Any], around: AbstractContextManager[Any], repeats: bool) -> None:
        super().__init__()
        self._notes, self._around, self._repeats, self._taken = notes, around, repeats, 0
        self._token: Token[_Routing | None] | None = None

    def __enter__(self) -> _Routing:
        self._around.__enter__()
        if not self._repeats:
            self._notes.clear()
        self._taken, self._token = 0, _current.set(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        assert self._token is not None, "it was entered"
        _current.reset(self._token)
        self._around.__exit__(kind, error, trace)

    def next(self, make: Callable[[], Result]) -> Result:
        """What is made now, or was made at this place of the first forward."""
        if not self._repeats:
            self._notes.append(make())
            return self._notes[-1]  # type: ignore[no-any-return]
        self._taken += 1
        return self._notes[self._taken - 1]  # type: ignore[no-any-return]

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if function not in _RANKED or "out" in options:
            return function(*args, **options)
        return self._ranked(partial(function, *args, **options), *args, **options)

    def _ranked(self, rank: Callable[[], Any], input: torch.Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> Any:
        """`topk` by the ranks of the first forward; both forwards save the same for the backward pass."""
        with torch.no_grad():
            indices = self.next(lambda: rank().indices)
        return torch.return_types.topk((input.gather(dim, indices), indices))


_current: ContextVar[_Routing | None] = ContextVar("routing", default=None)
