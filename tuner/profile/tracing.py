"""A step of a recipe, traced: the very step that training takes, on fake tensors, entered in a tracker.

Fakes have shapes and types as in training, for any device, and take no memory. They lie on the CPU, since torch without
CUDA has no backward pass for others; for CUDA, kernels are chosen as there. Those of Triton and those compiled for this
processor do nothing: what they would write to is there already. The one place where a trace changes what it traces.
"""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from tuner.checkpoint.staging import staged_bytes
from tuner.data.batches import Batch, StepBatches
from tuner.errors import RecipeError, TunerError
from tuner.model import offload, output_layer, tiles, triton_attention
from tuner.model.attention import Unsupported, forget_documents
from tuner.model.build import decoder_blocks
from tuner.model.decode import fullest_forwards
from tuner.model.flops import Flops, training_flops
from tuner.model.probe import RouteRefused
from tuner.model.quantize import linear
from tuner.model.root import CausalLM
from tuner.parallel import expert
from tuner.parallel.assemble import assemble
from tuner.parallel.fsdp import is_whole_along, sync_gradients
from tuner.parallel.mesh import DeviceMeshes, Mesh
from tuner.profile.estimate import Sizes
from tuner.profile.prediction import Phase
from tuner.profile.traffic import Traffic, TrafficCounter
from tuner.runtime import host, phase, torch_private
from tuner.runtime.device import HOPPER, traced_for
from tuner.runtime.dist import RankInfo
from tuner.runtime.parts import local
from tuner.setup.build import build_train_state, run_tensors
from tuner.setup.model import teacher_in_memory
from tuner.setup.resolve import Resolved
from tuner.setup.specs import assembly_spec, meta_model_of, step_config_of, teacher_spec
from tuner.setup.teacher import teacher_of
from tuner.train.evaluate import batch_losses
from tuner.train.step import TrainState, microbatch_terms, optimizer_step

if TYPE_CHECKING:
    from tuner.profile.allocations import AllocationTracker, LiveChange, Storage


REASON = 200
"""Letters of an error that are shown."""
_BETWEEN = ("__torch_dispatch__", "__torch_function__")
"""What torch calls of a mode, between an operation and who called it."""


@dataclass(frozen=True)
class StepTrace:
    """What a step allocated and freed, in order, on a kind of device, and what of it is not storages of tensors."""

    target: str
    changes: Sequence[LiveChange]
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
    sizes: Sizes
    traffic: tuple[Traffic, ...]
    """Of each microbatch."""


def trace_step(
    resolved: Resolved, rank_info: RankInfo, batches: StepBatches, held_out: Batch | None = None,
    samples: Sequence[tuple[int, int]] = (), compiled: bool = False,
) -> StepTrace:
    """Build the training state of rank 0 and take one step of these microbatches; then evaluate one of held-out rows.

    ``samples`` are prompts that are answered then: the tokens of each, and the most that its answer may have. Layers
    are never compiled here: with ``compiled`` what they would keep twice as they are is counted once. Raises
    RecipeError where the model's own code does not run so.
    """
    from tuner.profile.allocations import AllocationTracker  # by private names of torch, which training does without

    facts, spec, device = resolved.facts, assembly_spec(resolved), torch.device("cpu")
    step_config = step_config_of(resolved, device, rank_info)
    mesh = step_config.mesh
    model = meta_model_of(resolved)
    blocks = _blocks(model)
    with ExitStack() as stack:
        if facts.kind == "cuda":
            stack.enter_context(cuda_stand_in(facts.total_bytes, generation=facts.generation))
            stack.enter_context(unchanged_modules(model))
        if mesh.axes:
            stack.enter_context(_fake_group(rank_info))
        if mesh.expert > 1:
            stack.enter_context(balanced_experts(mesh.expert))
        meshes = _fake_meshes(mesh)
        root = assemble(spec, model, meshes=meshes)
        teacher = _teacher(resolved, mesh)
        largest = max(parameter.numel() * parameter.element_size() for parameter in root.parameters())
        flops, sizes = training_flops(root.model), Sizes.of(root.model)
        stack.enter_context(_fakes())
        tracker = AllocationTracker(facts.kind, resolved.numerics.deterministic, blocks if compiled else ())
        for each in (root, teacher) if teacher is not None else (root,):
            each.parts.max_forwards = lambda own: own  # nobody is there to ask
            give_storage(each, device)
            tracker.assign([*each.parameters(), *each.buffers()], "parameters")
        stack.enter_context(host.observed(tracker.on_host))
        if spec.on_host:
            enter_shards(parameter for each in (root, teacher) if each for parameter in each.parameters())
            stack.enter_context(shards_copied())
        with tracker:
            train_state = build_train_state(resolved, root, step_config)
            train_state.method.teacher = teacher
            train_state.optimizer.allocate()
        if spec.on_host:
            enter_shards(train_state.optimizer.state_tensors().values(), "optimizer")
            enter_shards(train_state.tensors().values(), "optimizer")  # averages
        tracker.assign_rest("optimizer")
        stack.enter_context(tracker.watching(root))
        counter = TrafficCounter(_shapes(root), rank_info.local_world_size, _exchanging(meshes))
        tracker.observe = counter.count
        stack.enter_context(phase.observed(counter.begin))
        if spec.tiles:
            stack.enter_context(few_tiles(counter.standing_for))
        if spec.quantize is not None:
            stack.enter_context(few_weight_tiles())
        if spec.offload:
            stack.enter_context(inputs_not_copied())
        with refusing(model):
            marks = _step(tracker, train_state, batches)
            traffic = tuple(counter.micro)
            if held_out is not None:
                _evaluate(tracker, train_state, held_out, samples)
        changes = tuple(tracker.changes)
        held = train_state.optimizer.host_names()
        staged = staged_bytes({name: tensor for name, tensor in run_tensors(train_state).items() if name not in held})
    return StepTrace(facts.kind, changes, tracker.storages, marks, blocks, staged, largest, flops, sizes, traffic)


def _teacher(resolved: Resolved, mesh: Mesh) -> CausalLM | None:
    """The teacher of a distillation, without storage."""
    if (method := teacher_in_memory(resolved)) is None:
        return None
    taught = teacher_of(resolved, method)
    return assemble(teacher_spec(taught), meta_model_of(taught), meshes=_fake_meshes(mesh)).eval()


def _shapes(root: nn.Module) -> set[torch.Size]:
    """Those of the parameters, and of what this process holds of them."""
    parameters = list(root.parameters())
    return {tensor.shape for tensor in (*parameters, *map(local, parameters))}


@contextmanager
def refusing(model: PreTrainedModel) -> Iterator[None]:
    """Turn what the model's own code raises into a RecipeError.

    It may want masks, which training does not make, or ask tensors for numbers that fakes do not have.

    What this package's code raises, or torch's where this package called it, stays the bug that it is.
    """
    name = type(model).__name__
    try:
        yield
    except Unsupported as error:
        if any(getattr(module, "is_causal", True) is False for module in model.modules()):  # on no route
            raise RecipeError(f"{name} cannot be trained: {error}", hint="choose another model") from error
        raise RouteRefused(name, str(error)) from error
    except Exception as error:
        if isinstance(error, TunerError) or not _is_by_transformers(error):
            raise
        reason = " ".join(str(error).split())[:REASON]
        raise RecipeError(
            f"{name} cannot be predicted: its own code does not run without masks, or on tensors without numbers "
            f"({reason})",
            hint="measure it instead, where it is trained: tuner profile RECIPE --measure 1",
        ) from error


def _is_by_transformers(error: Exception) -> bool:
    """Whether transformers raised an error, or called the operation of torch that did."""
    frames = [(str(frame.f_globals.get("__name__")), frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames[-1][0].startswith("tuner."):
        return False
    callers = (name for name, frame in reversed(frames) if frame.f_code.co_name not in _BETWEEN)
    return next((name for name in callers if not name.startswith("torch")), "").startswith("transformers.")


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
            tracker.assign((tensor for _, tensor in train_state.gradient_tensors()), "gradients")
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
        _losses(train_state, batch)
        for in_place in (one for part in train_state.parts for one in part.other_weights().values()):
            with in_place:
                _losses(train_state, batch)
        if samples:
            prompts, limits = zip(*(([0] * length, limit) for length, limit in samples), strict=True)
            with train_state.step_config.autocast():
                fullest_forwards(train_state.root, prompts, limits, train_state.step_config.device)


def _losses(train_state: TrainState, batch: Batch) -> None:
    if train_state.method.by_terms:
        microbatch_terms(train_state.root, train_state.method, batch, train_state.step_config)
    else:
        batch_losses(train_state.root, train_state.step_config, batch, batch.trained_positions)


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


def _fake_meshes(mesh: Mesh) -> DeviceMeshes:
    """The meshes of a fake group, under names of its own.

    torch keeps one layout for all equal meshes, with the coordinates of whoever made it first: a real mesh of this
    process that equals a predicted one would be taken for rank 0's.
    """
    return mesh.device_meshes("cpu", "predicted_")


def _exchanging(meshes: DeviceMeshes) -> set[str]:
    """Names of the groups that exchange activations, and no weights."""
    axes = (meshes.tensor, meshes.sequence, meshes.expert)
    of_weights = () if meshes.weights is None else meshes.weights.get_all_groups()
    own = {str(mesh.get_group().group_name) for mesh in axes if mesh is not None}
    return own - {str(group.group_name) for group in of_weights}


@contextmanager
def _fake_group(rank_info: RankInfo) -> Iterator[None]:
    store = torch_private.FakeStore()
    dist.init_process_group("fake", store=store, rank=rank_info.rank, world_size=rank_info.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


TILES = 3
"""Tiles that are traced, with the last: the second begins while the first is there, the third finds its memory."""


def give_storage(root: nn.Module, device: torch.device) -> None:
    """Put tensors on ``device`` in the place of those on the meta device; tied ones stay one."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def like(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in made:
            fresh, is_parameter = torch.empty_like(tensor, device=device), isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(fresh, requires_grad=tensor.requires_grad) if is_parameter else fresh
        return made[tensor]

    for module in root.modules():
        for kept in (module._parameters, module._buffers):
            for name, tensor in kept.items():
                if tensor is not None:
                    kept[name] = like(tensor)  # type: ignore[assignment]  # a parameter for a parameter


class _Quiet:
    """The compiled library, whose functions do nothing; those that say how much scratch space they take still do."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name) if name.endswith("_scratch") else lambda *args: 0


@contextmanager
def quiet_kernels() -> Iterator[None]:
    """Within, the kernels that are compiled for this processor do not run: fakes have no memory to work on."""
    users = [module for name, module in sys.modules.items() if name.startswith("tuner.model.native.")]
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        for module in users:
            if callable(plain := getattr(module, "library", None)):
                stack.enter_context(patch.object(module, "library", lambda plain=plain: _Quiet(plain())))
        yield


def balanced_experts(size: int) -> AbstractContextManager[object]:
    """Within, tokens go to the experts of all processes of a group evenly: fakes have no numbers to count."""
    def split_sizes(sent: torch.Tensor, received: torch.Tensor, choices: int) -> tuple[list[int], list[int]]:
        each = [choices // size + (rank < choices % size) for rank in range(size)]
        return each, list(each)

    return patch.object(expert, "split_sizes", split_sizes)


def few_tiles(standing_for: Callable[[int], None]) -> AbstractContextManager[object]:
    """Within, of the tiles of a row the first few and the last are computed: those between are like them.

    ``standing_for`` is called before each of them with the number of tiles in whose place it is traced.
    """
    every = output_layer.spans

    def some(count: int, size: int) -> Iterator[slice]:
        between = max(0, -(-count // size) - TILES - 1)
        try:
            for number, span in enumerate(every(count, size)):
                if TILES <= number < TILES + between:
                    continue
                standing_for(1 + between * (number == TILES - 1))
                yield span
        finally:  # computing a layer again may stop anywhere
            standing_for(1)

    return patch.object(tiles, "spans", some)


def few_weight_tiles() -> AbstractContextManager[object]:
    """Within, of the tiles of a quantised weight the first few, of which one is the largest, and the last are made."""
    every = linear.tiles

    def some(length: int, bytes_each: int, device: str) -> list[tuple[int, int]]:
        found = every(length, bytes_each, device)
        return [*found[:TILES], *found[TILES:][-1:]]

    return patch.object(linear, "tiles", some)


def enter_shards(tensors: Iterable[torch.Tensor], part: host.HostPart = "parameters") -> None:
    """Count to the host's memory what of tensors is a shard of FSDP2's, where these lie there."""
    for tensor in tensors:
        if not is_whole_along(tensor):
            host.entered(tensor, part)


def shards_copied() -> AbstractContextManager[None]:
    """Within, shards on the host are copied to where they are gathered, and their gradients come back to the host."""

    def brought_back(gradient: torch.Tensor) -> torch.Tensor:
        host.entered(back := gradient.clone(), "gradients")
        return back

    return torch_private.moved_shards(torch.clone, brought_back)


def inputs_not_copied() -> AbstractContextManager[object]:
    """Within, inputs on their way to the host and back have their memory at both ends, and no bytes are copied."""
    return patch.object(offload, "block_pairs", lambda place: iter(()))


class Properties:
    """What kernels ask of a device to choose their sizes; the numbers of an H100."""

    name = "stand-in"
    major, minor = 9, 0
    multi_processor_count = 132


@contextmanager
def cuda_stand_in(memory_bytes: int | None = None, *, generation: int = HOPPER) -> Iterator[None]:
    """Within, kernels and their sizes are chosen as on such a GPU of so much memory, and no Triton kernel runs."""
    capability = Properties.major, Properties.minor
    with ExitStack() as stack:
        stack.enter_context(traced_for("cuda", memory_bytes, generation=generation))
        stack.enter_context(patch.object(triton_attention, "launch", lambda *args, **kwargs: None))
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda device=None: capability))
        stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda device=None: Properties))
        stack.enter_context(_no_kernels())
        yield


@contextmanager
def unchanged_modules(root: nn.Module) -> Iterator[None]:
    """Afterwards, the modules that define the model's classes are what they were: liger's patches reach all of them."""
    names = {type(module).__module__ for module in root.modules()}
    before = {name: dict(vars(sys.modules[name])) for name in names if name.startswith("transformers.")}
    try:
        yield
    finally:
        for name, values in before.items():
            vars(sys.modules[name]).update(values)


@contextmanager
def _no_kernels() -> Iterator[None]:
    try:
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    with ExitStack() as stack:
        for kind in (JITFunction, Autotuner):  # the latter tries each of its settings on the device first
            stack.enter_context(patch.object(kind, "run", lambda *args, **kwargs: None))
        yield
