"""What routers say inside compiled layers, handed out as results of the layers.

transformers notes what a module returns by hooks that append to a dictionary of the forward that runs. Inside a
compiled layer such a hook ends the graph, and inside one that is computed again too it may change nothing outside. Here
a layer returns what its routers say besides its own result, and the note is taken outside, where it always was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import nn

from tuner.model import transformers_private
from tuner.model.transformers_private import Recorded, note_recorded, take_recorders
from tuner.model.wrap import Wrapper, wrap

ROUTERS = "router_logits"
_MARK = "router_hooks"


def hand_out(block: nn.Module, decoder: nn.Module) -> bool:
    """Have a layer's forward return ``(result, (what each router said, ...))``, in place; False: it has no router.

    Before whatever computes the layer again or compiles it. Asked twice it is done once.
    """
    forward: Callable[..., Any] = block.forward
    if getattr(forward, _MARK, False):  # of any function around it, too: `wraps` hands it on
        return True
    transformers_private.install_recorders(decoder)
    said: list[Any] = []
    has_router = False
    for module in block.modules():
        if module is block:
            continue  # that hook is called outside of the forward
        for found in take_recorders(module):  # the others note attention's weights, which training has none of
            if found.key == ROUTERS:
                module.register_forward_hook(_noting(said, found))
                has_router = True
    if not has_router:
        return False

    @wraps(forward)
    def heard(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        said.clear()
        made = forward(*args, **kwargs)
        notes = tuple(said)
        said.clear()  # after the forward it is as before, and no tensor leaves what is computed again but as a result
        return made, notes

    setattr(heard, _MARK, True)
    wrap(block, Wrapper.ROUTERS, heard)
    return True


def taken_note_of(result: Any, said: Sequence[Any]) -> Any:
    """A layer's own result; what its routers said is noted, as transformers' hooks would have."""
    for one in said:
        note_recorded(ROUTERS, one)
    return result


def _noting(said: list[Any], found: Recorded) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        said.append(found.of(output))

    return note
