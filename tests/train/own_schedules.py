"""Schedules of a user's own, some of them with mistakes."""

import itertools


def triangle(total_steps, top=0.5):
    peak = top * total_steps
    return lambda index: min(index / peak, (total_steps - index) / (total_steps - peak))


class Steps:
    def __init__(self, total_steps, *, every):
        self.every = every

    def __call__(self, index):
        return 0.5 ** (index // self.every)


def constant(total_steps, value):
    return lambda index: value


def stateful(total_steps):
    seen = itertools.count()
    return lambda index: 1 / (1 + next(seen))


def ends(total_steps):
    return lambda index: [1, 1, 0.5][index]


def nothing(total_steps):
    return None


def broken(total_steps):
    raise KeyError("speed")
