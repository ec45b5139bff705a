"""How long the threads of an operation spin while they wait for each other, before the first of them starts."""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_COUNT = "12500"
"""Rounds of GNU OpenMP's waiting loop before a thread sleeps: somewhat less than a millisecond.

Its own default of 300,000 outlasts a scheduler's time slice: where another program takes one of the cores, a thread
that waits burns the core that the thread it waits for needs. Waking a sleeping thread costs tens of microseconds, so
not spinning at all slows down a machine with nothing else to do (tools/bench_busy.py).
"""
_SET_BY_THE_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Bound how long OpenMP's threads spin, in this process and those it starts, unless the user said how they wait.

    libgomp reads its environment when it is loaded: call this before torch is imported. Other OpenMP libraries
    ignore the variable.
    """
    if not any(name in environment for name in _SET_BY_THE_USER):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
