"""A step of a recipe, traced: the very step that training takes, on fake tensors, entered in a tracker."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from tuner.checkpoint.staging import staged_bytes
from tuner.data.batches import Batch, StepBatches
from tuner.errors import RecipeError
from tuner.model.attention import forget_documents
from tuner.model.build import decoder_blocks
from tuner.model.decode import fullest_forwards
from tuner.model.flops import Flops, training_flops
from tuner.parallel.assemble import assemble
from tuner.parallel.fsdp import sync_gradients
from tuner.parallel.mesh import Mesh
from tuner.profile.fakes import cuda_stand_in, give_storage, quiet_kernels, unchanged_modules
from tuner.profile.prediction import Phase
from tuner.runtime import phase, torch_private
from tuner.runtime.dist import RankInfo
from tuner.setup.build import assembly_spec, build_train_state, mesh_of, meta_model_of, run_tensors, step_config_of
from tuner.setup.resolve import Resolved
from tuner.train.evaluate import batch_losses
from tuner.train.step import TrainState, optimizer_step

if TYPE_CHECKING:
    from tuner.profile.allocations import AllocationTracker, Change, Storage


@dataclass(frozen=True)
class Trace:
    """What a step allocated and freed, in order, on a kind of device, and what of it is not storages of tensors."""

    target: str
    changes: Sequence[Change]
    storages: Sequence[Storage]
    marks: tuple[tuple[str, int], ...]
    """Each mark of the step, from `start` to `done`, and the number of changes before it."""
    blocks: tuple[str, ...]
    """Names of the decoder layers."""
    staged: int
    """Bytes of a copy of the state that a checkpoint holds."""
    largest: int
    """Bytes of the largest tensor of the model, whole."""
    flops: Flops


def trace_step(
    resolved: Resolved,
    rank_info: RankInfo,
    batches: StepBatches,
    held_out: Batch | None = None,
    samples: Sequence[tuple[int, int]] = (),
) -> Trace:
    """Build the training state of rank 0 and take one step of these microbatches; then evaluate one of held-out rows.

    ``samples`` are prompts that are answered then: the tokens of each, and the most that its answer may have.
    """

    from tuner.profile.allocations import AllocationTracker

    device, mesh = torch.device("cpu"), mesh_of(resolved.recipe, rank_info)
    model = meta_model_of(resolved)
    blocks = _blocks(model)
    with ExitStack() as stack:
        if resolved.facts.kind == "cuda":
            facts = resolved.facts
            stack.enter_context(cuda_stand_in(facts.total_bytes, generation=facts.generation))
            stack.enter_context(unchanged_modules(model))
        if rank_info.world_size > 1:
            stack.enter_context(_fake_group(rank_info))
        root = assemble(assembly_spec(resolved), model, device_mesh=_fake_mesh(mesh))
        largest = max(parameter.numel() * parameter.element_size() for parameter in root.parameters())
        flops = training_flops(root.model)
        stack.enter_context(_fakes())
        tracker = AllocationTracker(resolved.facts.kind, resolved.recipe.train.deterministic)
        give_storage(root, device)
        tracker.assign([*root.parameters(), *root.buffers()], "parameters")
        with tracker:
            train_state = build_train_state(resolved.recipe, root, step_config_of(resolved.recipe, device, mesh))
            train_state.optimizer.allocate()
        tracker.assign_rest("optimizer")
        stack.enter_context(tracker.watching(root))
        marks = _step(tracker, train_state, batches)
        if held_out is not None:
            _evaluate(tracker, train_state, held_out, samples)
        changes = tuple(tracker.changes)
        staged = staged_bytes(run_tensors(train_state))
    return Trace(resolved.facts.kind, changes, tracker.storages, marks, blocks, staged, largest, flops)


def _blocks(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the decoder layers in a root module; none where the model does not say which they are."""
    names = {module: f"model.{name}" for name, module in model.named_modules()}
    try:
        return tuple(names[block] for block in decoder_blocks(model))
    except RecipeError:
        return ()


def _step(tracker: AllocationTracker, train_state: TrainState, batches: StepBatches) -> tuple[tuple[str, int], ...]:
    """One step in the tracker; returns its marks."""
    marks: list[tuple[str, int]] = [("start", len(tracker.changes))]
    tracker.phase = "forward"

    def mark(part: str) -> None:
        if tracker.phase == "backward":
            tracker.end_of_backward()
        marks.append((part, len(tracker.changes)))
        if part == "optimizer":
            gradients = (parameter.grad for parameter in train_state.root.parameters())
            tracker.assign((gradient for gradient in gradients if gradient is not None), "gradients")
        if part != "done":
            tracker.phase = cast(Phase, part)

    with tracker, phase.observed(mark):
        optimizer_step(train_state, 0, batches, 1.0)
    mark("done")
    tracker.assign_rest("batch")  # masks of documents and the step's scalars, kept for later steps
    return tuple(marks)


def _evaluate(
    tracker: AllocationTracker, train_state: TrainState, batch: Batch, samples: Sequence[tuple[int, int]]
) -> None:
    train_state.root.eval()
    sync_gradients(train_state.root, True)
    tracker.phase = "evaluation"
    with tracker, torch.no_grad():
        batch_losses(train_state.root, train_state.step_config, batch, batch.trained_positions)
        if samples:
            prompts, limits = zip(*(([0] * length, limit) for length, limit in samples), strict=True)
            with train_state.step_config.autocast():
                fullest_forwards(train_state.root, prompts, limits, train_state.step_config.device)


@contextmanager
def _fakes() -> Iterator[None]:
    """Fake tensors, and no collector of cycles."""
    enabled = gc.isenabled()
    gc.disable()  # as in training, where it hardly ever runs: a cycle holds its tensors
    forget_documents()
    try:
        with quiet_kernels(), torch_private.FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        forget_documents()  # what it kept were fakes
        if enabled:
            gc.enable()


def _fake_mesh(mesh: Mesh) -> DeviceMesh | None:
    """The mesh of a fake group, under names of its own.

    torch keeps one layout for all equal meshes, with the coordinates of whoever made it first: a real mesh of this
    process that equals a predicted one would be taken for rank 0's.
    """
    if not mesh.axes:
        return None
    names = tuple(f"predicted_{name}" for name in mesh.axes)
    return init_device_mesh("cpu", tuple(mesh.axes.values()), mesh_dim_names=names)


@contextmanager
def _fake_group(rank_info: RankInfo) -> Iterator[None]:
    store = torch_private.FakeStore()
    dist.init_process_group("fake", store=store, rank=rank_info.rank, world_size=rank_info.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
