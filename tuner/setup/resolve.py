"""A recipe resolved for a machine: every `auto` replaced by a value, with the reason."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from tuner.config.load import recipe_dict
from tuner.config.methods import Method, head_of
from tuner.config.optimizers import MuonOptimizer, keeps_states_on_host, rounds_stochastically
from tuner.config.recipe import LowRankAdapter, ParallelSection, PeftAdapter, Recipe
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.prepared import PreparedData
from tuner.errors import MachineError, RecipeError
from tuner.model import build
from tuner.model.build import ModelSpec
from tuner.model.kernels import has_liger
from tuner.model.native.library import native_problem
from tuner.model.own_class import code_facts, register
from tuner.model.row_layout import Route, route_of
from tuner.model.transformers_private import commit_of
from tuner.model.vetting import asks_router_logits, licence_of
from tuner.runtime.device import TO_COMPILE, DeviceFacts, compiler_problem, device_facts, triton_problem
from tuner.runtime.dist import RankInfo
from tuner.runtime.memory import host_memory
from tuner.runtime.process import device_index
from tuner.setup import settled
from tuner.setup.precision import Numerics, fp8_reason, frozen_dtype, kernels_problem, precision_for, require_precision

if TYPE_CHECKING:
    from tuner.model.quantize.layers import QuantizeSpec


SMALL_MODEL_PARAMETERS = 500_000_000


@dataclass(frozen=True)
class Resolved:
    """A recipe without `auto`, the facts that decided, and the reason for each decision by key path.

    `data.packing` may stay open: what it means is proven on the model itself.

    On CUDA there is one more reason, that of the kernel of `attention`.
    """

    recipe: Recipe
    facts: DeviceFacts
    config: PretrainedConfig
    generation: GenerationConfig
    n_parameters: int
    reasons: Mapping[str, str]
    new_ids: range = range(0)
    """Of the tokens that the recipe adds."""
    settled: Mapping[str, Any] = field(default_factory=dict)
    """Values that were settled for the whole launch before it was resolved, by key path."""
    route: Route = "flat"
    """How the documents of a micro-batch go through the model."""
    given: Mapping[str, Any] | None = None
    """What `model.init_from` gave the run that is resumed, by its checkpoint; None where a run begins."""
    versions: Mapping[int, str] = field(default_factory=dict)
    """The paths of what a run that begins is given by those of its entries that newer versions are looked for of."""
    teacher: str | None = None
    """The directory of the teacher's current version, where `method.teacher_every` looks for newer ones."""

    @property
    def model_name(self) -> str:
        """The model's directory, or its name on the hub, as it is written."""
        return self.recipe.model.name_or_path

    @property
    def max_length(self) -> int:
        """Tokens of a full row."""
        return int(self.recipe.data.max_length)

    @property
    def compiles(self) -> bool:
        """Whether decoder layers are compiled."""
        return self.recipe.train.compile is True

    @property
    def numerics(self) -> Numerics:
        """How exactly is computed."""
        train = self.recipe.train
        return Numerics(train.precision, train.tf32, train.deterministic)


def resolve(
    recipe: Recipe, max_length: int, rank_info: RankInfo, new_ids: range = range(0), facts: DeviceFacts | None = None
) -> Resolved:
    """Replace every `auto` of the recipe by a value, with the reason; looks at the device and the model's config.

    ``new_ids`` are those that the tokenizer gave to the tokens that the recipe adds: the config has room for them. With
    ``facts`` it is resolved for a device that need not be here.
    """
    is_here = facts is None
    facts = facts or device_facts(recipe.train.device, device_index(rank_info))
    spec = model_spec(recipe, new_ids)
    config = build.model_config(spec)
    meta = build.meta_model(config, torch.float32, spec.head)
    require_axes(recipe.parallel, meta)
    n_parameters = sum(p.numel() for p in meta.parameters())
    reasons = _dropout_reason(spec) | _trained_part(spec, meta) | fp8_reason(recipe.train, meta)
    values: dict[str, dict[str, Any]] = {}

    def settle(section: str, key: str, value: object, reason: str) -> None:
        if getattr(getattr(recipe, section), key) == "auto":
            values.setdefault(section, {})[key] = value
            reasons[f"{section}.{key}"] = reason

    settle("train", "device", facts.kind, facts.name)
    for key, value in settled.WITHOUT_PREDICTION.items():
        settle("train", key.removeprefix("train."), value, "cpu" if facts.kind == "cpu" else "not predicted")
    settle("train", "mock_batch", facts.kind == "cuda", facts.kind)
    settle("checkpoint", "async_save", *_async_save(recipe, facts, n_parameters, rank_info))
    precision, why = precision_for(recipe.train.precision, facts)
    settle("train", "precision", precision, why)
    frozen = recipe.adapter.kind != "none"
    dtype = frozen_dtype(precision, facts) if frozen else "fp32"
    settle("model", "dtype", dtype, "frozen weights" if frozen else "trained weights")
    no_triton = kernels_problem(precision, dtype, facts)
    settle("train", "compile", *_compiled(recipe, facts, meta, no_triton))
    if recipe.model.kernels == "auto":
        settle("model", "kernels", *_kernels(config.get_text_config().model_type, facts, is_here, no_triton))
    if facts.kind == "cuda":
        from tuner.model.fastest import kernel_and_reason  # with the kernels of GPUs

        reasons["attention"] = kernel_and_reason(config, facts.generation, precision, is_here)
    settle("optimizer", "lr", *_default_lr(recipe, n_parameters))
    if isinstance(recipe.optimizer, MuonOptimizer):
        settle("optimizer", "adamw_lr", values.get("optimizer", {}).get("lr", recipe.optimizer.lr), "that of lr")
    settle("parallel", "processes", rank_info.world_size, "as started")
    settle("parallel", "shard", *_shard(recipe, rank_info))
    settle("parallel", "accumulate", "sharded", "least memory")  # whole, they take what the unsharded model does
    settle("data", "max_length", max_length, "as prepared")
    if reference_of(recipe.method) is not None:
        settle("method", "reference", *_reference(recipe, new_ids, values))
    if spec.head == "score":
        values.setdefault("eval", {})["samples"] = 0  # it writes no answers
    settle("data", "too_long", recipe.method.examples.too_long, recipe.method.examples.kind)
    done = settled.changed(recipe, {f"{section}.{key}": each[key] for section, each in values.items() for key in each})
    _check_numerics(done, facts)
    _check_tiles(done, config)
    _check_liger(recipe, is_here)
    if done.data.packing == "auto":
        reasons["data.packing"] = "documents end to end"
    resolved = Resolved(done, facts, config, build.generation_config(spec, config), n_parameters, reasons, new_ids)
    route, apart = route_for(done, meta)
    return resolved if apart is None else rerouted(resolved, route, apart)


def _shard(recipe: Recipe, rank_info: RankInfo) -> tuple[str, str]:
    """How weights are sharded where nothing is predicted, and why."""
    if recipe.parallel.replicas is not None:
        return "hybrid", "parallel.replicas"
    several = settled.copy_on_each_machine(recipe, rank_info)
    return ("hybrid", "several machines") if several else ("full", "one machine")


def takes_several(recipe: Recipe) -> bool:
    """Whether a micro-batch may hold several documents."""
    return recipe.data.packs_rows or settled.rows_at_once(recipe.train) > 1


def route_for(recipe: Recipe, model: PreTrainedModel) -> tuple[Route, str | None]:
    """How documents go through the model as far as its structure tells, and why not end to end; None where they do."""
    return route_of(model) if takes_several(recipe) else ("flat", None)


ROUTES: dict[Route, str] = {"batch": "as a padded batch", "calls": "one by one"}
"""How documents go through a model that does not take them end to end, in words."""


def require_apart(wants_flat: bool, route: Route, why: str) -> None:
    """Raise RecipeError where documents that cannot lie end to end are to."""
    if wants_flat:
        said = f"data.packing: true: documents cannot lie end to end: {why}"
        raise RecipeError(said, hint=f"write data.packing: auto, which takes those of a row {ROUTES[route]}")


def rerouted(resolved: Resolved, route: Route, why: str) -> Resolved:
    """The same with documents that do not lie end to end, for a reason. Raises RecipeError where they are to."""
    recipe = resolved.recipe
    require_apart(recipe.data.packing is True, route, why)
    if recipe.train.compile is True and "train.compile" not in resolved.reasons:
        raise RecipeError(
            f"train.compile: layers are compiled for rows of one size, and documents cannot lie end to end: {why}",
            hint="write compile: auto",
        )
    apart = f"documents {ROUTES[route]}: {why}"
    reasons = {key: reason for key, reason in resolved.reasons.items() if key != "attention"}
    reasons["packing"] = apart
    if recipe.train.compile is True:
        reasons["train.compile"] = apart
    if "data.packing" in reasons:
        reasons["data.packing"] = apart
    return replace(resolved, recipe=settled.changed(recipe, {"train.compile": False}), reasons=reasons, route=route)


def _trained_part(spec: ModelSpec, meta: PreTrainedModel) -> dict[str, str]:
    """What is trained of a multimodal checkpoint."""
    if not build.is_part(meta):
        return {}
    from tuner.model.multimodal import description

    return {"part": description(meta, spec.name_or_path)}


def _dropout_reason(spec: ModelSpec) -> dict[str, str]:
    """Why the model's own dropout is off, where it has some that is."""
    with_them = replace(spec, without_dropout=False)
    dropouts = build.dropouts_of(build.model_config(with_them)) if spec.without_dropout else {}
    was = ", ".join(f"{key} {value:g}" for key, value in dropouts.items())
    return {"dropout": f"the model's own is off ({was}): its reference has none"} if dropouts else {}


def model_spec(recipe: Recipe, new_ids: range) -> ModelSpec:
    """The model section as the model package takes it; transformers knows a class of the user's own from here on."""
    model = recipe.model
    if model.use is not None:
        register(model.use)
    has_reference = reference_of(recipe.method) is not None
    head, random_init = head_of(recipe.method), model.init == "random"
    return ModelSpec(
        model.name_or_path, model.revision, random_init, model.config, new_ids, has_reference, head, quantize_of(recipe)
    )


def quantize_of(recipe: Recipe) -> "QuantizeSpec | None":
    """How the base is quantised; None where it is not. What is trained in full stays as it is."""
    kind, adapter = recipe.model.quantize, recipe.adapter
    if kind == "none":
        return None
    from tuner.model.quantize.layers import QuantizeSpec

    kept = adapter.modules_to_save if isinstance(adapter, LowRankAdapter) else ()
    return QuantizeSpec(kind, kept, recipe.model.kernels == "native")


def quantizer_facts(resolved: Resolved) -> dict[str, Any] | None:
    """What a checkpoint notes of how its base is quantised; None where it is not."""
    spec = quantize_of(resolved.recipe)
    return None if spec is None else spec.facts()


def manifest_facts(resolved: Resolved, with_licence: bool) -> dict[str, Any]:
    """What a checkpoint notes of what it was trained by; the licence is looked for where a model has one."""
    recipe, model = resolved.recipe, resolved.recipe.model
    known, plain = with_licence and model.init != "random", recipe_dict(recipe)
    return {
        "recipe": plain,
        "model": {
            "name_or_path": model.name_or_path,
            "revision": model.revision or commit_of(resolved.config),
            "init": model.init,
            # As transformers writes it: numbers that JSON does not have (infinity) as its own objects for them.
            "config": json.loads(resolved.config.to_json_string(use_diff=False)),
            "n_parameters": resolved.n_parameters,
            "new_ids": [resolved.new_ids.start, resolved.new_ids.stop],
            "licence": licence_of(model.name_or_path, model.revision) if known else None,
            **class_facts(resolved),
        },
        "adapter": None if recipe.adapter.kind == "none" else plain["adapter"],
        **({} if (quantizer := quantizer_facts(resolved)) is None else {"quantizer": quantizer}),
        "precision": recipe.train.precision,
    }


def class_facts(resolved: Resolved) -> dict[str, Any]:
    """What a checkpoint notes of a model class of the user's own, where there is one: its name, and its code's hash."""
    use = resolved.recipe.model.use
    return {} if use is None else {"code": code_facts(use)}


def method_section(resolved: Resolved) -> Method:
    """The section of the method, which says by now where its reference comes from."""
    return resolved.recipe.method


def takes_mock_batch(resolved: Resolved) -> bool:
    """Whether a launch tries the largest micro-batch there can be before its first step (`train.mock_batch`)."""
    return resolved.recipe.train.mock_batch is True


def recipe_again(resolved: Resolved, values: Mapping[str, Any]) -> Recipe:
    """The recipe with other values, for what resolves it again: a later launch, or the prediction of another run."""
    return settled.changed(resolved.recipe, values)


def notes(resolved: Resolved) -> dict[str, str]:
    """Why each value is what it is that was left open, for whoever reads the recipe; a launch's own with its value."""
    parallel = [key for key in resolved.reasons if key.startswith("parallel.")]
    own = {key: f"{settled.value_of(resolved.recipe, key)} here, " for key in parallel}
    return {key: f"{own.get(key, '')}auto: {reason}" for key, reason in resolved.reasons.items()}


def reference_of(method: Method) -> str | None:
    """Where a method's section has its reference from; None for one without a reference."""
    found: str | None = getattr(method, "reference", None)
    return found


def _reference(recipe: Recipe, new_ids: range, values: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """Where the reference's values come from, and why.

    Without its adapter a model is the one at the start where nothing else is trained, and where the adapter's own
    start adds nothing, to the last bit. Raises RecipeError for one that is to be so, and is not.
    """
    adapter = recipe.adapter
    if not isinstance(adapter, LowRankAdapter):
        reason = f"adapter.kind: {adapter.kind}"
        if isinstance(adapter, PeftAdapter):
            reason += ", whose start is not shown to add nothing, to the last bit"
    elif adapter.modules_to_save:
        reason = f"modules are trained besides the adapter: {', '.join(adapter.modules_to_save)}"
    elif new_ids:
        reason = "rows of new tokens are trained besides the adapter"
    elif recipe.model.init_from:
        reason = "model.init_from may give the adapter weights"
    elif adapter.kind == "dora" and values.get("model", {}).get("dtype", recipe.model.dtype) != "fp32":
        reason = "DoRA on bf16 weights begins with rounding"
    else:
        return "adapter_off", f"adapter.kind: {adapter.kind}"
    if reference_of(recipe.method) == "adapter_off":
        raise RecipeError(
            f"method.reference: without its adapter this model is not the one at the start: {reason}",
            hint="write method.reference: columns, which are computed once before the first step",
        )
    return "columns", reason


def _kernels(model_type: str, facts: DeviceFacts, is_here: bool, no_triton: str | None) -> tuple[str, str]:
    """Whose kernels compute, and why; what this machine lacks to make them counts where the device ``is_here``."""
    if facts.kind == "cuda":
        if not has_liger(model_type):
            return "torch", f"{model_type} on {facts.kind}"
        problem = no_triton or (triton_problem() if is_here else None)
        return ("liger", f"{model_type} on {facts.kind}") if problem is None else ("torch", f"no liger: {problem}")
    problem = native_problem()
    return ("native", "compiled for this CPU") if problem is None else ("torch", problem)


def _async_save(recipe: Recipe, facts: DeviceFacts, n_parameters: int, rank_info: RankInfo) -> tuple[bool, str]:
    """Whether saves are asynchronous, and why. On a CPU they would take the cores that training uses."""
    if facts.kind == "cpu" or recipe.adapter.kind != "none":
        return facts.kind != "cpu", facts.kind
    copied = 1 if keeps_states_on_host(recipe.optimizer) else 3  # weights, and moments where the device has them
    state = copied * 4 * n_parameters * rank_info.local_world_size // rank_info.world_size
    fits = state < host_memory()[1] // 2
    return fits, facts.kind if fits else "too little memory of the host for copies"


def _compiled(recipe: Recipe, facts: DeviceFacts, meta: PreTrainedModel, no_triton: str | None) -> tuple[bool, str]:
    """Whether decoder layers are compiled, and why. Raises MachineError, or RecipeError of the model's own code, where
    they shall be and cannot."""
    wanted, problem = recipe.train.compile, compiler_problem(facts.kind)
    if wanted is False:
        return False, "as written"
    if wanted == "auto":
        if recipe.prober.steps:
            return False, "modules are looked into (prober.steps)"
        if recipe.train.gradient_checkpointing_modules:
            return False, "modules of layers are recomputed (train.gradient_checkpointing_modules)"
        if facts.kind != "cuda" or problem is not None or no_triton is not None:
            return False, problem or no_triton or facts.kind
        if not recipe.data.packs_rows:
            return False, "rows of many lengths"
    elif problem is not None:
        raise MachineError(f"train.compile: {problem}", hint="install what is missing, or write compile: false")
    if (why := _interpreted(recipe, meta)) is None:
        return True, facts.kind if wanted == "auto" else "as written"
    if wanted is True:
        raise RecipeError(f"train.compile: {why}", hint="write train.compile: false")
    return False, why


def _interpreted(recipe: Recipe, meta: PreTrainedModel) -> str | None:
    """Why layers would be left to the interpreter, or compiled in every step; None: neither."""
    from tuner.model.blocks import handing_on_counts  # where something is to be compiled

    if sends_again(recipe):
        return "layers send tokens to their experts (parallel.expert), and are computed again (gradient_checkpointing)"
    asking = handing_on_counts(meta)
    return None if asking is None else f"{asking} reads on the host what each expert gets"


def sends_again(recipe: Recipe) -> bool:
    """Whether tokens are sent to experts in layers that are computed again: what the compiler cannot take in parts."""
    return recipe.parallel.expert > 1 and recipe.train.gradient_checkpointing in ("full", "selective")


def _default_lr(recipe: Recipe, n_parameters: int) -> tuple[float, str]:
    method = recipe.method
    if method.lr is not None:
        frozen = recipe.adapter.kind != "none"
        return (10 * method.lr, f"{method.kind}, adapter") if frozen else (method.lr, method.kind)
    if recipe.adapter.kind != "none":
        return 2e-4, "adapter"
    if recipe.model.init == "random":
        return 3e-4, "random weights"
    if n_parameters < SMALL_MODEL_PARAMETERS:
        return 1e-4, f"full, {n_parameters / 1e6:,.0f} M parameters"
    return 2e-5, f"full, {n_parameters / 1e9:,.1f} B parameters"


def _check_tiles(recipe: Recipe, config: PretrainedConfig) -> None:
    """Raise RecipeError for tiles of layers whose routers are asked what they say: they would say it in pieces."""
    weight = recipe.model.router_aux_loss_coef
    has_loss = bool(weight or recipe.model.router_z_loss_coef) or (weight is None and asks_router_logits(config))
    if recipe.train.tiled_mlp is True and has_loss:
        raise RecipeError(
            "train.tiled_mlp: layers whose routers have a loss (model.router_aux_loss_coef, router_z_loss_coef) cannot "
            "be computed over tiles: transformers notes what routers say once a layer",
            hint="write tiled_mlp: false",
        )


def _check_liger(recipe: Recipe, is_here: bool) -> None:
    """Raise MachineError where liger is written and this machine, which it is for, lacks what makes its kernels."""
    if is_here and recipe.model.kernels == "liger" and (problem := triton_problem()) is not None:
        raise MachineError(f"model.kernels: liger: {problem}", hint=f"{TO_COMPILE}, or write kernels: torch")


def _check_numerics(recipe: Recipe, facts: DeviceFacts) -> None:
    """Raise MachineError or RecipeError where a resolved recipe wants kernels or types that are not available."""
    frozen = recipe.adapter.kind != "none"
    if recipe.model.kernels == "liger" and facts.kind != "cuda":
        raise MachineError("model.kernels: liger needs a CUDA device", hint="write kernels: auto or torch")
    if recipe.train.tf32 and not (facts.kind == "cuda" and facts.bf16_fast):
        said = f"train.tf32: {facts.name} has no TF32 units"
        raise MachineError(said, hint="write tf32: false; GPUs have them from the A100 on")
    if recipe.model.kernels == "native" and facts.kind != "cpu":
        raise MachineError("model.kernels: native kernels are for the CPU", hint="write kernels: auto, liger or torch")
    require_precision(recipe.train.precision, facts)
    if not frozen and recipe.model.dtype != "fp32" and not rounds_stochastically(recipe.optimizer):
        raise RecipeError(
            "model.dtype: trained weights are kept in fp32, unless their updates are rounded stochastically",
            hint="write dtype: auto, train.precision sets the computation; or optimizer.rounding: stochastic",
        )
    if recipe.model.dtype == "bf16" and recipe.train.precision == "fp32":
        said = "model.dtype: bf16 weights cannot be computed with in train.precision: fp32"
        raise RecipeError(said, hint="write dtype: auto, or precision: bf16")


def require_axes(parallel: ParallelSection, model: PreTrainedModel) -> None:
    """Raise RecipeError where a model, which may lie on the meta device, cannot have the axes of a recipe."""
    if parallel.tensor * parallel.sequence * parallel.expert > 1:
        from tuner.setup.axes import check_axes  # few launches have any

        check_axes(model, parallel)


def check_division(recipe: Recipe, processes: int) -> None:
    """Raise RecipeError, listing what would do, where a global batch does not divide into whole micro-batches.

    ``processes`` are all of a launch, in whole groups of those that share rows.
    """
    micro, shared = settled.rows_at_once(recipe.train), settled.sharing(recipe.parallel)
    sizes = (("global_batch_size", recipe.train.global_batch_size),)
    for key, rows in (*sizes, *(("batch_schedule", item.size) for item in recipe.train.batch_schedule)):
        if rows % (micro * (processes // shared)) == 0:
            continue
        numbers = range(1, min(rows, 64) + 1)
        allowed = ", ".join(str(number * shared) for number in numbers if rows % (micro * number) == 0)
        groups = settled.in_groups(recipe.parallel, processes) + (", each" if shared > 1 else "")
        said = f"train.{key}: {rows} rows do not divide into {groups} of {micro} rows"
        raise RecipeError(said, hint=f"numbers of processes (parallel.processes) that divide it: {allowed}")


def check_fits(tokenizer: TextTokenizer, config: PretrainedConfig, prepared: PreparedData) -> None:
    """Check that the model has an embedding for every id and a position for every token. Raises RecipeError."""
    text = config.get_text_config()
    if tokenizer.vocab_size > text.vocab_size:
        beyond = tokenizer.added_tokens_from(text.vocab_size)
        named = f" ({', '.join(beyond[:3])}{', ...' if len(beyond) > 3 else ''})" if beyond else ""
        hint = f"take the model's own tokenizer, or init: random with config: {{vocab_size: {tokenizer.vocab_size}}}"
        if [tokenizer.special_tokens.get("pad_token")] == beyond and tokenizer.vocab_size - text.vocab_size == 1:
            hint = "name a pad_token in tokenizer_config.json that the model has, such as its eos_token"
        raise RecipeError(
            f"tokenizer: its {tokenizer.vocab_size:,} ids are more than the model's {text.vocab_size:,} "
            f"embeddings{named}",
            hint=hint,
        )
    longest = build.position_limit(config)
    if longest is not None and prepared.train.max_length > longest:
        raise RecipeError(f"data.max_length: {prepared.train.max_length} is above the model's {longest:,} positions")
