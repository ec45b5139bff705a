"""The one order in which a model is put together: for training, for evaluation and for prediction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Literal

import torch
from transformers import PreTrainedModel

from tuner.config.numbers import Duration
from tuner.errors import RecipeError
from tuner.model.build import decoder_blocks
from tuner.model.documents import Padding
from tuner.model.kernels import apply_liger, apply_native
from tuner.model.root import CausalLM
from tuner.model.row_layout import Route
from tuner.model.trainable import TrainableSpec
from tuner.parallel.fsdp import shard
from tuner.parallel.mesh import DeviceMeshes

if TYPE_CHECKING:
    from tuner.model.quantize.layers import QuantizeSpec


Kernels = Literal["torch", "native", "liger"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class AssemblySpec:
    """What is made of a model."""

    trainable: TrainableSpec
    seed: int
    """Of the weights that are drawn here: an adapter's."""
    kernels: Kernels = "torch"
    recompute: Recompute = "none"
    recomputed_layers: Duration = Duration.parse("100%")
    """A share of the decoder layers, or a number of them."""
    recomputed_modules: Sequence[str] = ()
    """Names or globs of what of these layers is recomputed; empty: all of them."""
    offload: bool = False
    """Whether the inputs of recomputed layers are kept in the host's memory."""
    tiles: bool = False
    """Whether the MLPs of decoder layers are computed over tiles of positions."""
    padding: Padding | None = None
    """Where decoder layers are compiled: the size of microbatches that they are compiled for."""
    reshard_after_forward: bool = True
    on_host: bool = False
    """Whether shards lie in the host's memory, and are brought to the device layer by layer."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which FSDP2 reduces gradients; None: their own."""
    param_dtype: torch.dtype | None = None
    """The dtype in which FSDP2 gathers weights that autocast would round to it; None: their own."""
    float8: bool = False
    """Whether the decoder's linear layers multiply in fp8."""
    float8_except: Sequence[str] = ()
    """Names or globs of those that do not, besides those that cannot."""
    tokens: int | None = None
    """The most tokens of a microbatch of training, where that is known."""
    row_wise: Sequence[str] = ()
    """Names or globs of embeddings whose gradients are added up by rows."""
    step_tokens: int | None = None
    """The most tokens of a global batch, where that is known."""
    quantize: "QuantizeSpec | None" = None
    """How the linear layers of a frozen base are quantised, where they are."""
    route: Route = "flat"
    """How documents go through the decoder, as far as it is known before the model is proven."""

    def of_weight_source(self) -> "AssemblySpec":
        """The same for the model on rank 0 that others are filled from and that never trains: nothing is wrapped."""
        kernels: Kernels = "native" if self.kernels == "native" else "torch"
        return replace(self, kernels=kernels, recompute="none", offload=False, padding=None, row_wise=())


def assemble(
    spec: AssemblySpec, model: PreTrainedModel, *,
    inspect: Callable[[CausalLM], None] = lambda root: None,
    meshes: DeviceMeshes = DeviceMeshes(),  # noqa: B008 - frozen
    give_values: Callable[[CausalLM], None] = lambda root: None,
) -> CausalLM:
    """Make a transformers model what training calls, in place. Collective with ``meshes``.

    The model comes with its weights, on the CPU, or from the meta device. ``inspect`` is called while it is whole and
    computes on the CPU as it will be trained, and may find another route for it; ``give_values`` brings the finished
    model to its device, with its values. Of several processes rank 0 calls this twice (``setup/model``): on the model
    with all weights, which is proven (:meth:`AssemblySpec.of_weight_source`), and then, like all ranks, on one from the
    meta device, whose shards are filled from the first.
    Raises RecipeError for parameters or layers that the model does not have.
    """
    # Before anything else goes around a layer: routes exchange attention, and what layers know of documents.
    root = CausalLM(model)
    root.layout.set_route(spec.route)
    if spec.quantize is not None:  # weights are quantised as they are read; a meta model gets empty layers
        from tuner.model.quantize.layers import quantize_

        quantize_(root.model, spec.quantize)
    if spec.float8:  # before adapters, which stand around the layers that multiply
        from tuner.model.float8 import apply_float8

        apply_float8(root.model, spec.float8_except)
    # Before kernels, some of which save for the backward pass only what `requires_grad` asks for.
    spec.trainable.apply(root.model, spec.seed)
    if spec.kernels == "native":
        apply_native(root.model)
    # The proof that documents are isolated: the model is whole here and on the CPU for the last time. Liger's layers
    # need a GPU and come later; their tests hold them against the plain ones.
    inspect(root)
    if spec.tiles:
        from tuner.model.tiles import prove_tiles  # few trainings have any

        prove_tiles(root)
    # Before Liger, tiles and compilation, which take layers by the sizes that they have on this rank.
    _apply_tensor_and_sequence(root, meshes)
    padding, tokens = _sizes(spec, root, meshes)
    if spec.kernels == "liger" and padding is None:  # the compiler makes kernels of its own
        apply_liger(root.model)
    _apply_expert(root, spec, meshes)  # around whatever kernels compute for experts
    if spec.tiles:  # around whatever kernels compute
        from tuner.model.tiles import apply_tiles

        apply_tiles(root)
    # A layer that compiles in several pieces is compiled first, and checkpointed around them, since autograd recomputes
    # what lies between them; one that compiles whole is checkpointed first, and the graph has both.
    compiles_inside = padding is not None and (spec.tiles or (spec.recompute == "full" and _is_in_parts(root)))
    if padding is not None and compiles_inside:
        _compile(root, padding, tiled=spec.tiles)
    n_layers = _recompute(root, spec, compiled=padding is not None)
    if padding is not None and not compiles_inside:
        _compile(root, padding)
    if spec.offload:
        from tuner.model.blocks import apply_offload

        apply_offload(root, n_layers)
    if spec.row_wise:
        _add_up_by_rows(root, spec, meshes)
    if meshes.weights is not None:  # last: FSDP2's hooks gather what everything inside them computes with
        shard(root, meshes, spec.reshard_after_forward, spec.param_dtype, tokens, spec.on_host, spec.reduce_dtype)
    give_values(root)
    return root


def _apply_tensor_and_sequence(root: CausalLM, meshes: DeviceMeshes) -> None:
    """Split layers over tensor-parallel ranks, and rows over sequence-parallel ones."""
    if meshes.tensor is not None:
        from tuner.parallel.tensor.split import split_layers  # few launches have the axes

        split_layers(root, meshes.tensor)
        root.parts.set_once(data_mesh=meshes.data_mesh)
    if meshes.sequence is not None:
        from tuner.parallel.sequence import cut_rows

        cut_rows(root, meshes.sequence)


def _recompute(root: CausalLM, spec: AssemblySpec, compiled: bool) -> int | None:
    """Have decoder layers computed again; how many, None where none are."""
    if spec.recompute == "none":
        return None
    from tuner.model.blocks import apply_recompute

    n_layers = recomputed_count(spec.recomputed_layers, len(decoder_blocks(root.model, "train.gradient_checkpointing")))
    apply_recompute(root, spec.recompute, n_layers, compiled=compiled, modules=spec.recomputed_modules)
    return n_layers


def _sizes(spec: AssemblySpec, root: CausalLM, meshes: DeviceMeshes) -> tuple[Padding | None, int | None]:
    """What micro-batches are filled up to, and the most tokens that a process has of one; None where nobody knows."""
    if root.layout.route != "flat":
        return None, None
    processes = 1 if meshes.sequence is None else meshes.sequence.size()
    return spec.padding, None if spec.tokens is None else ceil(spec.tokens / processes)


def _apply_expert(root: CausalLM, spec: AssemblySpec, meshes: DeviceMeshes) -> None:
    if meshes.expert is None:
        return
    from tuner.parallel.expert import spread_experts

    if spec.tiles:
        raise RecipeError(
            "train.tiled_mlp: tokens are sent to the experts of other processes (parallel.expert) a row at once",
            hint="write tiled_mlp: false",
        )
    spread_experts(root, meshes.expert)


def _add_up_by_rows(root: CausalLM, spec: AssemblySpec, meshes: DeviceMeshes) -> None:
    from tuner.model.touched_rows import KEY, by_rows

    if meshes.weights is not None and root.layout.route != "flat":
        raise RecipeError(
            f"{KEY}: rows are looked up in shards where documents lie end to end alone, and here they go through the "
            "model apart",
            hint="write parallel.shard: none, or leave optimizer.rows out",
        )
    assert spec.step_tokens is not None, "whoever trains knows its global batch"
    root.parts.set_once(touched_rows=by_rows(root.model, spec.row_wise, spec.step_tokens))


def _compile(root: CausalLM, padding: Padding, tiled: bool = False) -> None:
    from tuner.model.blocks import BACKEND, compile_blocks

    if tiled:
        from tuner.model.tiles import compile_tiles

        compile_tiles(root, BACKEND)
    compile_blocks(root, padding)


def _is_in_parts(root: CausalLM) -> bool:
    from tuner.model.blocks import is_in_parts  # where layers are compiled

    return is_in_parts(root)


def recomputed_count(layers: Duration, there: int) -> int:
    """How many of a model's decoder layers are computed again. Raises RecipeError for more than there are."""
    wanted = ceil(layers.share * there) if layers.unit == "%" else int(layers.count)
    if wanted > there:
        raise RecipeError(f"train.gradient_checkpointing_layers: {layers}, but the model has {there}")
    return wanted
