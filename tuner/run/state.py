"""A launch and the state of its run: what its tasks have in common, and what a checkpoint holds of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tuner.checkpoint.load import load_into
from tuner.checkpoint.open import CheckpointInfo
from tuner.run.changes import STATE, pending, resets_of, starts_of, updates_of
from tuner.run.parts.part import LaunchContext
from tuner.rundir.layout import EMA_PREFIX, MODEL_PREFIX
from tuner.setup.build import Assembly, run_tensors


def run_state(context: LaunchContext, finished: bool) -> dict[str, Any]:
    """The JSON state of a checkpoint."""
    state = context.progress.as_state() | {"resets": [reset.as_state() for reset in context.resets]}
    for part in context.parts:
        state |= part.state(context.progress.step)
    return state | {"finished": finished}


def restore(context: LaunchContext, found: CheckpointInfo) -> None:
    """Put the run where a checkpoint says it was: this run's, or the one that it branches off from. Collective."""
    assembly, progress, resets = context.assembly, context.progress, context.resets
    reset_here = pending(resets, found.step)
    if STATE in reset_here:
        load_into(found, _named(assembly, MODEL_PREFIX), MODEL_PREFIX)
    else:
        _make_room(assembly, found.state)
        averages = _named(assembly, EMA_PREFIX)
        others = {name: tensor for name, tensor in run_tensors(assembly.train_state).items() if name not in averages}
        load_into(found, others, without=EMA_PREFIX)
    if averages := _named(assembly, EMA_PREFIX):
        _restore_averages(context, averages, found)
    early = None if progress.early is None else replace(progress.early)
    progress.restore(found.state, None if assembly.keeps is None else assembly.keeps.metric)
    if "schedule" in reset_here:
        progress.early = early  # another course of the learning rate: counted from its first evaluation
    assembly.train_state.guard.restore(found.state["guard"])
    assembly.train_state.optimizer.set_step_count(updates_of(found.state) - starts_of(resets).updates)
    origin = ""
    if found.path.parent != context.run.checkpoints:  # another run's, which this one neither counts nor prunes
        progress.saved_step = progress.best = None
        origin = f", from {found.path}"
    context.console.say("resume", f"step {progress.step} of {progress.plan.total_steps}{origin}")
    if reset_here:
        context.console.say("reset", f"{', '.join(reset_here)}, after step {progress.step}")


def _restore_averages(context: LaunchContext, averages: Mapping[str, Any], found: CheckpointInfo) -> None:
    """Take over the averages of the weights, or begin them here where the checkpoint has none. Collective."""
    if any(name.startswith(EMA_PREFIX) for name in found.index()):
        load_into(found, averages, EMA_PREFIX)
        return
    for part in context.assembly.train_state.parts:
        part.restart()
    context.console.say("average", f"of the weights, from step {found.step} on: the checkpoint has none")


def _named(assembly: Assembly, prefix: str) -> dict[str, Any]:
    """The tensors of a run whose names begin so."""
    return {name: tensor for name, tensor in run_tensors(assembly.train_state).items() if name.startswith(prefix)}


def _make_room(assembly: Assembly, state: Mapping[str, Any]) -> None:
    """Allocate what a checkpoint with this JSON state holds: the optimizer's state, once there was an update of it."""
    if updates_of(state) > starts_of(resets_of(state)).updates:
        assembly.train_state.optimizer.allocate()
