"""Curves through points by Huber's loss, from many starts at once: Levenberg and Marquardt's method on batches.

A curve is given by its values and derivatives; each member of a batch is a start, or a data set of a bootstrap. Huber's
loss is minimised by quadratics that lie above it and touch it at the newest parameters (iterated weights), so that no
step makes it larger: Huber and Ronchetti, Robust Statistics, 2009, section 7.8.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CHUNK = 1 << 17
"""Values (members times points) that are computed at once: what a cache holds."""
CONVERGED = 1e-8
"""A relative gain of a step below which a member is done."""
FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-2, 1e-9, 1e9


@dataclass(frozen=True)
class CurveValues:
    """A curve at the points, for B parameter vectors: values (B, points) and derivatives (B, points, parameters)."""

    values: Floats
    derivatives: Floats


@dataclass(frozen=True)
class CurveFamily(ABC):
    """A family of curves over the points, with the range in which each parameter may lie."""

    low: Floats
    """The least value of each parameter."""
    high: Floats
    """The largest value of each parameter."""

    @abstractmethod
    def at(self, parameters: Floats) -> CurveValues:
        """The values for parameters (B, parameters)."""


@dataclass(frozen=True)
class Fitted:
    """Parameters (B, parameters) and the mean of Huber's loss (B,)."""

    parameters: Floats
    loss: Floats


def huber(residuals: Floats, delta: float) -> Floats:
    """The mean over the last axis of Huber's loss: r^2/2 up to `delta`, linear beyond."""
    size = np.abs(residuals)
    each = np.where(size <= delta, 0.5 * residuals**2, delta * (size - 0.5 * delta))
    return np.asarray(each.mean(axis=-1))


def fit_curves(curve: CurveFamily, targets: Floats, starts: Floats, delta: float, steps: int) -> Fitted:
    """Fit every start (B, parameters) to its target (B, points), or all to one (points,), in at most so many steps."""
    targets = np.broadcast_to(targets, (len(starts), targets.shape[-1]))
    size = max(1, CHUNK // targets.shape[-1])
    parts = [
        _fit_chunk(curve, targets[i : i + size], starts[i : i + size], delta, steps)
        for i in range(0, len(starts), size)
    ]
    return Fitted(np.concatenate([part.parameters for part in parts]), np.concatenate([part.loss for part in parts]))


def _fit_chunk(curve: CurveFamily, targets: Floats, starts: Floats, delta: float, steps: int) -> Fitted:
    parameters = np.clip(starts, curve.low, curve.high)
    loss = huber(curve.at(parameters).values - targets, delta)
    damping = np.full(len(parameters), FIRST_DAMPING)
    active = np.arange(len(parameters))
    for _ in range(steps):
        if not len(active):
            break
        tried = _step(curve, targets[active], parameters[active], damping[active], delta)
        tried_loss = huber(curve.at(tried).values - targets[active], delta)
        gain = loss[active] - tried_loss
        better = gain > 0
        taken = active[better]
        parameters[taken], loss[taken] = tried[better], tried_loss[better]
        damping[active] = np.clip(np.where(better, damping[active] / 4, damping[active] * 6), LEAST_DAMPING, None)
        done = (better & (gain <= CONVERGED * loss[active])) | (damping[active] > MOST_DAMPING)
        active = active[~done]
    return Fitted(parameters, loss)


def _step(curve: CurveFamily, targets: Floats, parameters: Floats, damping: Floats, delta: float) -> Floats:
    """Parameters after one damped step; those at an end of their range stay there where the step leads out."""
    now = curve.at(parameters)
    residuals = now.values - targets
    weights = delta / np.maximum(np.abs(residuals), delta)
    weighted = now.derivatives * weights[:, :, None]
    slope = np.einsum("bnp,bn->bp", weighted, residuals)
    outward = ((parameters <= curve.low) & (slope > 0)) | ((parameters >= curve.high) & (slope < 0))
    weighted = np.where(outward[:, None, :], 0.0, weighted)
    free = np.where(outward[:, None, :], 0.0, now.derivatives)
    bend = weighted.transpose(0, 2, 1) @ free
    diagonal = np.einsum("bpp->bp", bend)
    scale = np.maximum(diagonal, 1e-12 * diagonal.max(axis=1, keepdims=True) + 1e-30)
    each = np.arange(parameters.shape[1])
    bend[:, each, each] += damping[:, None] * scale
    bend[:, each, each] += np.where(outward, 1.0, 0.0)
    move = np.linalg.solve(bend, np.where(outward, 0.0, slope)[:, :, None])[:, :, 0]
    return np.clip(parameters - move, curve.low, curve.high)
