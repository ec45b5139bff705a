"""Forwards are replaced in one order, and put back."""

import pytest
import torch
from torch import nn

from tuner.model.wrap import Wrapper, unwrap, wrap, wrapped, wrappers_of


def around(module: nn.Module, kind: Wrapper, factor: float) -> None:
    inner = module.forward
    wrap(module, kind, lambda x: inner(x) * factor)


def test_the_last_is_the_outermost_and_all_can_be_taken_off() -> None:
    layer, ones = nn.Identity(), torch.ones(2)
    around(layer, Wrapper.KERNEL, 2.0)
    around(layer, Wrapper.KERNEL, 3.0)  # of one kind there may be several
    around(layer, Wrapper.COMPILED, 5.0)
    assert wrappers_of(layer) == (Wrapper.KERNEL, Wrapper.KERNEL, Wrapper.COMPILED)
    assert torch.equal(layer(ones), ones * 30)
    unwrap(layer)
    assert torch.equal(layer(ones), ones) and wrappers_of(layer) == () and "forward" not in vars(layer)


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (Wrapper.RECOMPUTED, Wrapper.TILED), (Wrapper.COMPILED, Wrapper.RECOMPUTED),
        (Wrapper.OFFLOADED, Wrapper.COMPILED), (Wrapper.EXPERTS, Wrapper.KERNEL),
        (Wrapper.RECOMPUTED, Wrapper.ROUTERS),
    ],
)
def test_another_order_is_a_bug(inner: Wrapper, outer: Wrapper) -> None:
    layer = nn.Identity()
    around(layer, inner, 2.0)
    with pytest.raises(RuntimeError, match=f"{outer.name} goes inside of {inner.name}"):
        around(layer, outer, 3.0)
    assert wrappers_of(layer) == (inner,)


def test_for_a_while() -> None:
    layer, plain, ones = nn.Identity(), nn.Identity(), torch.ones(2)
    around(layer, Wrapper.TILED, 2.0)
    left_out = (wrapped(module, Wrapper.LEFT_OUT, lambda x: x - 1) for module in (layer, plain))
    with pytest.raises(KeyError), next(left_out), next(left_out):
        assert not layer(ones).any() and not plain(ones).any()
        raise KeyError
    assert torch.equal(layer(ones), ones * 2) and wrappers_of(layer) == (Wrapper.TILED,)
    assert torch.equal(plain(ones), ones) and "forward" not in vars(plain)


def test_a_forward_that_is_a_module_is_no_part_of_the_model() -> None:
    layer = nn.Linear(2, 2)
    wrap(layer, Wrapper.SPLIT, nn.Linear(2, 2))
    assert set(layer.state_dict()) == {"weight", "bias"}
