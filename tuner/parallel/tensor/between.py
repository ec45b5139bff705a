"""Whether an MLP makes each number between its projections of the same column alone, so that columns can be split.

A plan says which projections are split, not what lies between them: Gemma 3n lets the largest numbers of a position
through, by the mean and the spread of all of its columns, and is planned as any other MLP. Here the class's own forward
runs on small rows, with projections that only scale: what it gives of some columns must be what it gives them in all.
"""

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from tuner.model.native.layers import Factor

_COLUMNS = 16


@torch.no_grad()
def goes_by_columns(module: nn.Module, projections: Collection[str]) -> bool:
    """Whether a module with these projections, on any device, computes columns one by one between them."""
    bare: Any = copy.copy(module)
    factors = {name: Factor(1.5 - number) for number, name in enumerate(projections)}
    bare._modules = {**module._modules, **factors}
    rows = torch.linspace(-4, 6, 3 * _COLUMNS).reshape(3, _COLUMNS).sin().mul(3)[None]
    try:
        whole = type(module).forward(bare, rows)
        parts = [type(module).forward(bare, part) for part in rows.split([5, _COLUMNS - 5], -1)]
    except Exception:  # noqa: BLE001 - of the model's own code, which wants more than rows
        return False
    return isinstance(whole, torch.Tensor) and torch.allclose(whole, torch.cat(parts, -1), rtol=1e-5, atol=1e-6)
