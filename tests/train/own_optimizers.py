"""Optimizers of a user's own, some of them with mistakes."""

import torch
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, AdamW, NAdam, RMSprop  # noqa: F401 - used by name


class Lion(torch.optim.Optimizer):
    def __init__(self, groups, lr, betas=(0.9, 0.99)):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.betas = betas

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.lerp(p.grad, average, self.betas[0]).sign(), alpha=group["lr"])
                average.lerp_(p.grad, 1 - self.betas[1])


class Plain(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.update(p, group), alpha=group["lr"])

    def update(self, p, group):
        return p.grad


class Counts(Plain):
    def update(self, p, group):
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        return p.grad / state["step"]


class Numbers(Plain):
    def update(self, p, group):
        self.state[p]["norm"] = float(p.grad.norm())
        return p.grad


class GroupCounter(Plain):
    def update(self, p, group):
        group["seen"] = group.get("seen", 0) + 1
        return p.grad / group["seen"]


class Hidden(Plain):
    def __init__(self, groups, lr):
        super().__init__(groups, lr)
        self.seen = 0

    def update(self, p, group):
        self.seen += 1
        return p.grad / self.seen


class Later(Plain):
    def update(self, p, group):
        state = self.state[p]
        if "first" in state:
            state["second"] = torch.zeros_like(p)
        state["first"] = torch.zeros_like(p)
        return p.grad


class Norms(Plain):
    def update(self, p, group):
        return p.grad / p.grad.norm()


class Broken(Plain):
    def update(self, p, group):
        raise ValueError("no update")


def some(groups, lr):
    return torch.optim.SGD(groups[0]["params"][:1], lr=lr)


def nothing(groups, lr):
    return None


def still(groups, lr):
    optimizer = torch.optim.SGD(groups, lr=lr)
    optimizer.step = lambda: None
    return optimizer


def split(groups, lr, share):
    return torch.optim.SGD(
        [
            {"params": [p], "lr": group["lr"] * (share if "norm" in name else 1)}
            for group in groups
            for p, name in zip(group["params"], group["names"], strict=True)
        ],
        lr=lr,
    )


def unbuilt(groups, lr):
    raise RuntimeError("not today")
