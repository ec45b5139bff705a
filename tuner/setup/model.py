"""The model of a resolved recipe with its weights, as a training begins with it: read, proven, and brought to whoever
trains it; and what is known of its weights besides their values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedModel

from tuner.config.methods import DistillMethod
from tuner.errors import RecipeError
from tuner.model.build import build_model, is_part
from tuner.model.probe import Read, RouteRefused, are_there, prove_route, require_isolation
from tuner.model.root import CausalLM
from tuner.model.row_layout import Route
from tuner.model.vetting import vet_weights
from tuner.parallel.assemble import AssemblySpec, assemble
from tuner.parallel.mesh import DeviceMeshes, Mesh
from tuner.runtime import startup
from tuner.runtime.device import DeviceFacts
from tuner.runtime.dist import RankInfo
from tuner.runtime.memory import keep_freed_memory
from tuner.runtime.process import Collective, device_index, gloo_group
from tuner.runtime.warned import pass_on
from tuner.setup import proven
from tuner.setup.hashes import FrozenHash, known_weights_hash
from tuner.setup.resolve import Resolved, model_spec, reference_of, takes_several
from tuner.setup.specs import DTYPES, assembly_spec, meta_model_of, step_config_of, teacher_spec
from tuner.stages import cache_root
from tuner.train.step import StepConfig

if TYPE_CHECKING:
    from tuner.model.unread import UnreadWeights
    from tuner.setup.initial import Initial


@dataclass(frozen=True)
class WeightFacts:
    """What was found when a model was built: facts of its weights, as checkpoints note them, not parts of it."""

    frozen_hash: Callable[[], str | None]
    """Gives the SHA-256 of what is not trained (:class:`~tuner.setup.hashes.FrozenHash`), which checkpoints do not
    hold, once it is known; of a model that several processes hold, on rank 0."""
    weights_hash: str | None = None
    """SHA-256 of all weights as they were built (:func:`~tuner.setup.hashes.known_weights_hash`), where a reference is
    computed with them."""
    untouched: Mapping[str, Any] | None = None
    """Of the language model of a multimodal checkpoint: what its files hold besides (numbers, bytes, SHA-256)."""
    given: Mapping[str, Any] | None = None
    """What `model.init_from` gave it, as checkpoints note it, and the report of that."""
    why_apart: str | None = None
    """Why documents do not lie end to end, where that was found when the model was proven."""

    def agreed_frozen_hash(self) -> str | None:
        """The hash of the frozen weights, which rank 0 takes, on every rank. Collective."""
        return Collective(gloo_group()).on_rank0(self.frozen_hash)


class LoadedModel(NamedTuple):
    """A model as a training begins with it, and what is known of its weights."""

    root: CausalLM
    facts: WeightFacts


_HALF = {"BF16": torch.bfloat16, "F16": torch.float16}
"""By the names of safetensors: what float32 holds exactly."""


def load_training_model(resolved: Resolved, rank_info: RankInfo) -> tuple[LoadedModel, StepConfig]:
    """The model as a training starts with it, and how it computes. Collective where there are several processes."""
    device = _device(resolved.facts, rank_info)
    if device.type == "cpu":
        keep_freed_memory(resolved.facts.free_bytes // 2)
    else:
        from tuner.model.fastest import use_flash_version  # with the kernels of GPUs

        cache = resolved.recipe.data.cache_dir
        place = cache_root() if cache is None else Path(cache)
        use_flash_version(resolved.config, device, place, resolved.settled.get("attention"))
    step_config = step_config_of(resolved, device, rank_info)
    return load_model(resolved, assembly_spec(resolved), step_config.mesh, device), step_config


def load_model(resolved: Resolved, spec: AssemblySpec, mesh: Mesh, device: torch.device) -> LoadedModel:
    """The model of a resolved recipe, made as the spec says. Collective where there are several processes."""
    if mesh.axes or device.type != "cpu":
        return _load_for_devices(resolved, spec, mesh, device)
    initial = _initial(resolved, spec)
    inspected = _Inspected(resolved, initial)
    return LoadedModel(assemble(spec, _whole_model(resolved, initial), inspect=inspected.note), inspected.facts)


def teacher_in_memory(resolved: Resolved) -> DistillMethod | None:
    """The method of a recipe where it learns from a model that is there in training."""
    method = resolved.recipe.method
    return method if isinstance(method, DistillMethod) and method.top_k is None else None


def load_teacher(resolved: Resolved, method: DistillMethod, step_config: StepConfig) -> LoadedModel:
    """The teacher of a resolved recipe, in evaluation mode. Collective where there are several processes."""
    from tuner.setup.teacher import blaming_teacher, teacher_of

    with blaming_teacher():
        taught = teacher_of(resolved, method)
        built = load_model(taught, teacher_spec(taught), step_config.mesh, step_config.device)
    built.root.eval()
    return built


def _whole_model(
    resolved: Resolved, initial: "Initial | None", dtype: torch.dtype | None = None,
    unread: "UnreadWeights | None" = None,
) -> PreTrainedModel:
    """The model with its values, but for those that it takes note of as ``unread`` where such are asked for."""
    recipe = resolved.recipe
    spec = replace(model_spec(recipe, resolved.new_ids), unread=unread)
    model = build_model(spec, dtype or DTYPES[recipe.model.dtype], recipe.seed)
    if initial is not None:
        initial.giver.give_weights(model)
    return model


def _initial(resolved: Resolved, spec: AssemblySpec) -> "Initial | None":
    """What gives the model weights from elsewhere; None where none is left to give, such as on resuming."""
    given = resolved.given
    if not resolved.recipe.model.init_from or (given is not None and not given["frozen"]):
        return None
    from tuner.setup.initial import Initial  # few trainings have any

    return Initial(resolved, spec.trainable)


def _transfer_dtype(resolved: Resolved, spec: AssemblySpec) -> torch.dtype | None:
    """The dtype of the files, where weights that move on to a device or to other ranks can keep it until then.

    float32 holds those of a half type exactly, and they stay in the files until they are read: cast, they would all be
    in the host's memory. None where anything is made of the weights themselves: a hash of what is not
    trained, columns of a reference, rows of new tokens, what `model.init_from` gives.
    """
    recipe = resolved.recipe
    is_made_of = recipe.model.init_from or resolved.new_ids or reference_of(recipe.method) == "columns"
    if recipe.model.dtype != "fp32" or not spec.trainable.is_all or is_made_of or recipe.model.init == "random":
        return None
    stored = vet_weights(recipe.model.name_or_path, recipe.model.revision)
    return _HALF.get(stored.pop()) if len(stored) == 1 else None


def _load_for_devices(resolved: Resolved, spec: AssemblySpec, mesh: Mesh, device: torch.device) -> LoadedModel:
    """The model of a resolved recipe on a device other than the host's, or sharded over several processes.

    Fused weights stay in the files until then, unless more is made of them: tiles are proven with all layers, and what
    `model.init_from` gives is put into the weights that are there.
    """
    from tuner.model.unread import UnreadWeights
    from tuner.parallel.values import bring, materialise  # one process on a CPU has the model where it was read to

    unread = None if spec.tiles or resolved.recipe.model.init_from else UnreadWeights()
    if mesh.axes:
        values = partial(materialise, device=device, unread=unread, on_host=spec.on_host)
        return _load_sharded(resolved, spec, mesh.device_meshes(device.type), unread, values)
    return _load_on_device(resolved, spec, unread, partial(bring, device=device, unread=unread))


def _load_on_device(
    resolved: Resolved, spec: AssemblySpec, unread: "UnreadWeights | None", bring: Callable[..., None]
) -> LoadedModel:
    """The model of a single process, moved to its device."""
    initial = _initial(resolved, spec)
    stored = None if spec.tiles else _transfer_dtype(resolved, spec)  # tiles are proven in the type that trains
    model = _whole_model(resolved, initial, stored, unread)
    types = {} if stored is None else _types_there(model, meta_model_of(resolved))
    inspected = _Inspected(resolved, initial, unread)
    root = assemble(spec, model, inspect=inspected.note, give_values=partial(bring, types=types))
    return LoadedModel(root, inspected.facts)


def _types_there(model: PreTrainedModel, meta: PreTrainedModel) -> dict[torch.Tensor, torch.dtype]:
    """The parameters and buffers of a model that have another type in the one that trains, with that type."""
    wanted = {name: one.dtype for name, one in [*meta.named_parameters(), *meta.named_buffers()]}
    own = [*model.named_parameters(), *model.named_buffers()]
    return {tensor: wanted[name] for name, tensor in own if tensor.dtype != wanted[name]}


def _load_sharded(
    resolved: Resolved, spec: AssemblySpec, meshes: DeviceMeshes, unread: "UnreadWeights | None",
    materialise: Callable[..., None],
) -> LoadedModel:
    """The model on several processes: shards or a copy, filled from rank 0's model or its files. Collective."""
    # On rank 0 alone; a failure there is raised on every rank, so that none waits for it.
    source: list[LoadedModel] = []

    def build_source() -> tuple[WeightFacts, Route]:
        initial = _initial(resolved, spec)
        inspected = _Inspected(resolved, initial, unread)
        model = _whole_model(resolved, initial, _transfer_dtype(resolved, spec), unread)
        root = assemble(spec.of_weight_source(), model, inspect=inspected.note)
        source.append(LoadedModel(root, inspected.facts))
        return replace(inspected.facts, frozen_hash=_on_rank_0), root.layout.route

    facts, route = Collective(gloo_group()).on_rank0(build_source)
    root = assemble(
        replace(spec, route=route), meta_model_of(resolved), meshes=meshes,
        give_values=lambda root: materialise(root, source[0].root if source else None),
    )
    return LoadedModel(root, source[0].facts if source else facts)


def _on_rank_0() -> str | None:
    raise RuntimeError("the hash of frozen weights is rank 0's to give")


class _Inspected:
    """A model as it is looked at while it is whole, and what was found."""

    facts: WeightFacts

    def __init__(self, resolved: Resolved, initial: "Initial | None", unread: "UnreadWeights | None" = None) -> None:
        self._resolved, self._initial, self._unread = resolved, initial, unread

    def note(self, root: CausalLM) -> None:
        """Prove that each document is computed as if alone, and begin to hash what its weights are known by."""
        resolved, recipe, unread = self._resolved, self._resolved.recipe, self._unread
        if self._initial is not None:
            self._initial.giver.give_rest(root.model)
        with startup.phase("checks"):
            why_apart = _prove(resolved, root, are_there if unread is None else partial(unread.read, root.model))
        if recipe.adapter.kind != "none":
            _tell_left_out(root, recipe.model.quantize != "none")
        untouched = weights_hash = None
        if is_part(root.model):
            from tuner.model.multimodal import untouched_facts

            untouched = untouched_facts(meta_model_of(resolved), recipe.model.name_or_path, recipe.model.revision)
        if reference_of(recipe.method) == "columns":
            weights_hash = known_weights_hash(root.model, recipe.data.cache_dir, unread)
        self.facts = WeightFacts(
            FrozenHash(root.model, recipe.data.cache_dir, resolved.facts.kind, unread), weights_hash, untouched,
            resolved.given if self._initial is None else self._initial.noted(), why_apart,
        )


def _prove(resolved: Resolved, root: CausalLM, read: Read) -> str | None:
    """Set the root to a route that is proven, now or by an earlier launch; why it left its default, where it did."""
    recipe, packed = resolved.recipe, takes_several(resolved.recipe)
    vocab_size, longest = resolved.config.get_text_config().vocab_size, resolved.max_length
    cache = None if recipe.data.cache_dir is None else Path(recipe.data.cache_dir)
    key = proven.key_of(resolved, root, longest, packed)
    if (verdict := proven.known(key, cache)) is not None:
        root.layout.set_route(verdict.route)
        startup.remark("documents were proven apart before")
        return verdict.why_apart
    why_apart = None
    if recipe.data.packing is True:
        try:
            require_isolation(root, vocab_size, packed, longest, read=read)
        except RouteRefused as error:
            hint = "write data.packing: auto, which takes documents otherwise where they cannot lie end to end"
            raise RecipeError(error.message, hint=hint) from error
    else:
        why_apart = prove_route(root, vocab_size, packed, longest, read)
    proven.keep(key, proven.Verdict(root.layout.route, why_apart), cache)
    return why_apart


def _tell_left_out(root: CausalLM, is_quantized: bool) -> None:
    from tuner.model.adapter import left_out_experts

    if (left_out := left_out_experts(root.model)) is not None:
        pass_on(left_out)
    if is_quantized:
        from tuner.model.quantize.layers import left_whole

        if (whole := left_whole(root.model)) is not None:
            pass_on(whole)


def _device(facts: DeviceFacts, rank_info: RankInfo) -> torch.device:
    return torch.device("cuda", device_index(rank_info)) if facts.kind == "cuda" else torch.device("cpu")
