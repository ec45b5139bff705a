"""AdamW, its parameter groups and its state as plain tensors."""

import torch
from torch import nn


def build_adamw(
    parameters: dict[str, nn.Parameter], betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov & Hutter 2019) with its state allocated at once, so that it can be loaded and counted.

    Decay applies to parameters of two or more dimensions only: never to norms and biases. The learning rate is set by
    the schedule before each step.
    """
    decayed = [p for p in parameters.values() if p.ndim >= 2]
    others = [p for p in parameters.values() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, eps=eps, fused=True)
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def state_tensors(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The two moments of every parameter by ``optimizer/<moment>/<parameter>``; the step count is the run's."""
    return {
        f"optimizer/{moment}/{name}": optimizer.state[parameter][moment]
        for moment in ("exp_avg", "exp_avg_sq")
        for name, parameter in parameters.items()
    }


def set_step_count(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Tell the optimizer how many updates its loaded moments have seen (AdamW's bias correction needs it)."""
    for state in optimizer.state.values():
        state["step"].fill_(float(steps))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
