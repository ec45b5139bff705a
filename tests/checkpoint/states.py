"""Small states with every awkward shape: uneven, empty, scalar, transposed, several dtypes."""

from collections.abc import Mapping

import torch


def full_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Plain tensors, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/weight": torch.randn(7, 5, generator=generator),
        "model/short": torch.randn(1, 3, generator=generator).bfloat16(),
        "model/transposed": torch.randn(4, 6, generator=generator).t(),
        "model/empty": torch.zeros(0, 4),
        "optimizer/step/weight": torch.tensor(float(seed + 3)),
        "optimizer/ids": torch.randint(0, 99, (9,), generator=generator),
        "optimizer/mask": torch.randint(0, 2, (3, 2), generator=generator).bool(),
    }


def blank(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same shapes, zeroed."""
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Whether names, dtypes and every bit of the values agree."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )
