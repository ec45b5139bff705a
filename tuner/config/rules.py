"""Rules between fields: each names the keys it looks at and returns what is wrong, if anything."""

from __future__ import annotations

from collections.abc import Set
from difflib import get_close_matches

from tuner.config.duration import Duration
from tuner.config.eval_tasks import task_of
from tuner.config.methods import CustomMethod, head_of
from tuner.config.optimizers import (
    AdafactorOptimizer,
    AdamwOptimizer,
    MuonOptimizer,
    SgdOptimizer,
    keeps_states_on_host,
    rounds_stochastically,
)
from tuner.config.recipe import (
    SECTIONS,
    STEP_FIGURES,
    DoraAdapter,
    HealthSection,
    LengthWarmupSection,
    LowRankAdapter,
    PeftAdapter,
    ProfileSection,
    Recipe,
    RepetitionSection,
)
from tuner.config.rule import Rule
from tuner.config.store_rules import STORE_RULES


def _cadence_needs_rows(recipe: Recipe, given: Set[str]) -> str | None:
    if "eval.every" not in given or recipe.eval.every is None or recipe.data.eval is not None or recipe.eval.tasks:
        return None
    return "an evaluation cadence needs held-out rows; set data.eval, such as 2%, or eval.every: never"


def _best_needs_rows(recipe: Recipe, given: Set[str]) -> str | None:
    metric = recipe.checkpoint.keep_best
    if metric is None:
        return None
    task = task_of(metric, recipe.eval.tasks)
    if task is not None and task.every is not None:
        return None
    if task is None and recipe.data.eval is None and not recipe.eval.tasks:
        return "needs held-out rows; set data.eval, such as 2%, or keep_best: null"
    if recipe.eval.every is None and not recipe.eval.at_end:
        return "needs evaluations; set eval.every, such as 10%, or keep_best: null"
    return None


def _best_is_measured(recipe: Recipe, given: Set[str]) -> str | None:
    metric, figures = recipe.checkpoint.keep_best, recipe.method.figures
    if metric is None or metric.split("/")[1] in {"loss", *figures} or task_of(metric, recipe.eval.tasks) is not None:
        return None
    own = [f"eval/{task.label}/FIGURE" for task in recipe.eval.tasks]
    names = " or ".join([*(f"eval/{name}" for name in ("loss", *figures)), *own])
    return f"is not measured with method.kind: {recipe.method.kind}; write {names}"


def _patience_needs_rows(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.eval.patience is None:
        return None
    if recipe.data.eval is None and task_of(recipe.checkpoint.keep_best, recipe.eval.tasks) is None:
        return "needs held-out rows; set data.eval, such as 2%, or keep_best: eval/TASK/acc, or patience: null"
    return None


def _tasks_have_names_of_their_own(recipe: Recipe, given: Set[str]) -> str | None:
    figures = {"loss", *recipe.method.figures}
    taken = next((task.label for task in recipe.eval.tasks if task.label in figures), None)
    if taken is None:
        return None
    return f"a task called {taken} would be taken for the method's own figure; give it a name: {{task: ..., name: ...}}"


def _tasks_need_text(recipe: Recipe, given: Set[str]) -> str | None:
    if not recipe.eval.tasks or head_of(recipe.method) == "tokens":
        return None
    return f"a reward model (method.kind: {recipe.method.kind}) gives no text a likelihood; remove the tasks"


def _harness_scores_its_tasks(recipe: Recipe, given: Set[str]) -> str | None:
    for task in recipe.eval.tasks:
        if task.is_harness and (task.scorer is not None or task.options):
            return f"{task.task} is scored by lm-evaluation-harness; remove its scorer and options"
        if not task.is_harness and task.num_fewshot is not None:
            return f"num_fewshot is of tasks of lm-evaluation-harness; remove it: {task.label}'s prompts hold them"
        if task.is_file and task.options and task.scorer is None:
            return f"{task.label} has options and neither code nor a scorer that takes them; remove the options"
    return None


def _min_steps_bounds_something(recipe: Recipe, given: Set[str]) -> str | None:
    train = recipe.train
    if train.min_steps is None:
        return None
    if recipe.eval.patience is None:
        return "holds off an early stop, and there is none; set eval.patience, such as 3, or min_steps: null"
    if train.duration.unit == "steps" and train.min_steps > train.duration.count:
        return f"got {train.min_steps}; the run is {train.duration} (train.duration)"
    return None


def _one_rate_of_averaging(recipe: Recipe, given: Set[str]) -> str | None:
    ema = recipe.ema
    if ema.decay is None or ema.half_life is None:
        return None
    return "says the same as ema.half_life; remove one of them"


def _evaluated_averages_are_there(recipe: Recipe, given: Set[str]) -> str | None:
    if not recipe.ema.evaluate:
        return None
    if not recipe.ema.is_on:
        return "there is no average; set ema.decay, such as 0.999, or evaluate: false"
    if recipe.data.eval is None:
        return "needs held-out rows; set data.eval, such as 2%, or evaluate: false"
    return None


def _marks_need_rows(recipe: Recipe, given: Set[str]) -> str | None:
    if not recipe.eval.marks or recipe.data.eval is not None or recipe.eval.tasks:
        return None
    return "needs held-out rows; set data.eval, such as 2%, or remove marks"


def _micro_divides_global(recipe: Recipe, given: Set[str]) -> str | None:
    train = recipe.train
    if train.micro_batch_size == "auto" or train.global_batch_size % train.micro_batch_size == 0:
        return None
    got, whole = train.micro_batch_size, train.global_batch_size
    return f"got {got}; allowed: a divisor of train.global_batch_size, which is {whole}"


def _own_class_has_an_output_layer(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.model.use is None or recipe.method.kind != "reward":
        return None
    return "a class of your own has an output layer, and a score is what method.kind: reward trains; write use: null"


def _config_needs_random(recipe: Recipe, given: Set[str]) -> str | None:
    shape = {
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    }
    changed = sorted(shape & set(recipe.model.config))
    if recipe.model.init == "random" or not changed:
        return None
    return f"{changed[0]} changes the shape of pretrained weights; set model.init: random"


def _pretrain_takes_text(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.method.examples.kind != "pretrain":
        return None
    for source in recipe.data.train:
        if source.format not in {"auto", "text", "tokens"}:
            return f"got format {source.format}; method.kind pretrain reads text; set format: text or method.kind: sft"
    return None


def _pretrain_has_no_turns(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.method.examples.kind == "pretrain" and recipe.tokenizer.chat_template is not None:
        return "method.kind pretrain renders no conversations; remove the template or set method.kind: sft"
    return None


def _cut_rows_are_of_documents_end_to_end(recipe: Recipe, given: Set[str]) -> str | None:
    data = recipe.data
    if data.rows != "cut":
        return None
    if recipe.method.examples.kind != "pretrain":
        return "documents are cut wherever a row is full, answers and all; set method.kind: pretrain, or rows: packed"
    if not data.packs_rows or data.too_long in {"truncate", "drop"}:
        key = "too_long" if data.packs_rows else "packing"
        return f"rows that are cut are filled by documents of any length; remove data.{key}, or set rows: packed"
    return None


def _rows_of_one_source_are_packed(recipe: Recipe, given: Set[str]) -> str | None:
    data = recipe.data
    if data.pack_sources == "together" or (data.packs_rows and data.rows == "packed"):
        return None
    key = "data.rows: packed" if data.packs_rows else "data.packing: auto"
    return f"no documents are packed into rows; write {key}, or data.pack_sources: together"


def _compared_answers_are_chats_or_texts(recipe: Recipe, given: Set[str]) -> str | None:
    examples = recipe.method.examples
    if not examples.compares:
        return None
    sources = (*recipe.data.train, *(recipe.data.eval if isinstance(recipe.data.eval, tuple) else ()))
    for source in sources:
        if source.format in {"text", "tokens"}:
            kind = recipe.method.kind
            return f"got format {source.format}; method.kind {kind} compares answers to prompts; set format: auto"
    return None


def _prompts_of_pairs(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.data.max_prompt_length is None or recipe.method.examples.kind == "preference":
        return None
    return f"method.kind {recipe.method.kind} has no pairs, whose prompts are cut; write data.max_prompt_length: null"


def _pieces_are_of_split_documents(recipe: Recipe, given: Set[str]) -> str | None:
    data, examples = recipe.data, recipe.method.examples
    if data.min_piece_length is None:
        return None
    if (examples.too_long if data.too_long == "auto" else data.too_long) != "split":
        return "no document is split; write data.too_long: split, or data.min_piece_length: null"
    if data.rows == "cut":
        return "with data.rows: cut every row is full; write data.rows: packed, or data.min_piece_length: null"
    if data.max_length != "auto" and data.min_piece_length > data.max_length:
        return f"got {data.min_piece_length}; allowed: up to data.max_length, which is {data.max_length}"
    return None


def _patterns_are_counted(recipe: Recipe, given: Set[str]) -> str | None:
    repetition = recipe.data.repetition
    if repetition.min_period > repetition.max_period:
        return f"got {repetition.min_period}; allowed: up to max_period, which is {repetition.max_period}"
    if repetition.is_on or repetition == RepetitionSection():
        return None
    return "nothing says how often is too often; write data.repetition.max_count: 32"


def _rows_can_be_short_at_first(recipe: Recipe, given: Set[str]) -> str | None:
    warmup, train = recipe.train.length_warmup, recipe.train
    if not warmup.is_on:
        return None if warmup == LengthWarmupSection() else "grow over no steps; write train.length_warmup.steps: 1000"
    if recipe.method.kind != "pretrain":
        return f"cuts rows wherever they are full, answers of {recipe.method.kind}, too; write method.kind: pretrain"
    if recipe.data.portions is not None:
        return f"each {recipe.data.portions.noun} would begin with short rows; write train.length_warmup.steps: null"
    if train.overfit_first_batch:
        return "the first batch would stay as short as it is; write train.overfit_first_batch: false"
    if warmup.truncate and train.duration.unit == "tokens":
        left_out = f"train.duration: {train.duration} would count what is left out of rows"
        return f"{left_out}; write train.length_warmup.truncate: false, or a duration in steps"
    return None


def _compared_answers_are_whole(recipe: Recipe, given: Set[str]) -> str | None:
    if not recipe.method.examples.compares or recipe.data.too_long != "split":
        return None
    return f"method.kind {recipe.method.kind} compares whole answers; set data.too_long: drop or truncate"


def _freeze_needs_full(recipe: Recipe, given: Set[str]) -> str | None:
    if not recipe.model.freeze or recipe.adapter.kind == "none":
        return None
    return "an adapter freezes the whole model; remove freeze, or set adapter.kind: none"


def _quantized_is_frozen(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.model.quantize == "none" or recipe.adapter.kind != "none":
        return None
    return "quantised weights cannot be trained; write adapter.kind: lora or dora, or quantize: none"


def _quantized_products_are_their_own(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.model.quantize == "none" or str(recipe.train.precision) != "fp8":
        return None
    return "fp8: a quantised base has products of its own; write precision: bf16, or model.quantize: none"


def _fp8_layers_are_left_out_of_fp8(recipe: Recipe, given: Set[str]) -> str | None:
    if not recipe.train.fp8_except or recipe.train.precision == "fp8":
        return None
    return "names layers that are not multiplied in fp8, and nothing is; write train.precision: fp8"


def _adapter_is_written_in_one_type(recipe: Recipe, given: Set[str]) -> str | None:
    if not recipe.export.keep_fp32 or recipe.export.adapter == "merge" or recipe.adapter.kind == "none":
        return None
    return "a kept adapter is written in one type; write export.adapter: merge"


def _layers_need_recompute(recipe: Recipe, given: Set[str]) -> str | None:
    train = recipe.train
    if train.gradient_checkpointing in {"selective", "full"} or str(train.gradient_checkpointing_layers) == "100%":
        return None
    return "needs train.gradient_checkpointing: selective or full"


def _recomputed_modules_are_of_layers(recipe: Recipe, given: Set[str]) -> str | None:
    train = recipe.train
    if not train.gradient_checkpointing_modules:
        return None
    if train.gradient_checkpointing != "full":
        return "these modules are recomputed whole; write train.gradient_checkpointing: full"
    if train.compile is True:
        return "compiled layers are recomputed whole; write train.compile: false"
    if train.offload_activations is True:
        return "the inputs of recomputed layers go to the host, not those of modules; write offload_activations: false"
    return None


def _offload_needs_recompute(recipe: Recipe, given: Set[str]) -> str | None:
    train = recipe.train
    if train.offload_activations is not True or train.gradient_checkpointing in {"selective", "full"}:
        return None
    return "moves the inputs of recomputed layers; set train.gradient_checkpointing: full"


def _compiled_rows_are_packed(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.train.compile is not True or recipe.data.packs_rows:
        return None
    return "layers are compiled for rows of one size; set data.packing: auto, or compile: auto"


def _split_fits_cap(recipe: Recipe, given: Set[str]) -> str | None:
    split = recipe.data.eval
    if isinstance(split, Duration) and split.unit == "%" and split.count >= 100:
        return "got 100%; allowed: a share that leaves documents to train on"
    return None


def _lr_of_its_own(recipe: Recipe, given: Set[str]) -> str | None:
    optimizer = recipe.optimizer
    if isinstance(optimizer, MuonOptimizer) and optimizer.adjust_lr == "original":
        if "auto" not in {optimizer.lr, optimizer.adamw_lr}:
            return None
        return "original has no auto; write optimizer.lr, such as 0.02, and optimizer.adamw_lr, such as 3e-4"
    if isinstance(optimizer, AdafactorOptimizer) and optimizer.scale_parameter and optimizer.lr == "auto":
        return "a learning rate relative to the weights has no auto; write optimizer.lr, such as 1e-3"
    return None


def _nesterov_has_momentum(recipe: Recipe, given: Set[str]) -> str | None:
    optimizer = recipe.optimizer
    if not isinstance(optimizer, (SgdOptimizer, MuonOptimizer)) or not optimizer.nesterov or optimizer.momentum > 0:
        return None
    return "nesterov looks ahead along a momentum; set optimizer.momentum above 0 or nesterov: false"


def _stochastic_rounding_needs_bf16(recipe: Recipe, given: Set[str]) -> str | None:
    model = recipe.model
    if not rounds_stochastically(recipe.optimizer):
        return None
    if recipe.adapter.kind != "none":
        return "an adapter's weights are float32, which need no such rounding; write optimizer.rounding: nearest"
    if model.dtype != "bf16":
        return (
            f"rounds weights to bf16, and with model.dtype: {model.dtype} those trained are float32; "
            "write model.dtype: bf16, or optimizer.rounding: nearest"
        )
    return None


def _states_on_host_are_fp32(recipe: Recipe, given: Set[str]) -> str | None:
    optimizer = recipe.optimizer
    if not isinstance(optimizer, AdamwOptimizer) or optimizer.offload == "none":
        return None
    if optimizer.state != "fp32":
        return f"moments on the host are float32; write optimizer.state: fp32, or offload: none with {optimizer.state}"
    if optimizer.rounding != "nearest":
        return "the host updates float32 weights; write optimizer.rounding: nearest and model.dtype: auto"
    return None


def _shards_on_host_are_plain(recipe: Recipe, given: Set[str]) -> str | None:
    optimizer = recipe.optimizer
    if recipe.parallel.offload == "none":
        return None
    if recipe.model.quantize != "none":
        return "a quantised base stays whole on the device; write model.quantize: none, or parallel.offload: none"
    adapter = recipe.adapter
    if isinstance(adapter, PeftAdapter) and adapter.config["peft_type"] == "ADALORA":
        return "AdaLoRA's ranks go by whole weights on the device; write parallel.offload: none"
    if keeps_states_on_host(optimizer):
        return "the moments of such shards are on the host already; write optimizer.offload: none"
    is_plain = getattr(optimizer, "state", "fp32") == "fp32" and not rounds_stochastically(optimizer)
    if optimizer.kind not in {"adamw", "sgd"} or optimizer.rows or not is_plain:
        return "the host updates whole shards by torch's own AdamW or SGD; write parallel.offload: none"
    return None


def _rows_are_trained_in_full(recipe: Recipe, given: Set[str]) -> str | None:
    if not recipe.optimizer.rows or recipe.adapter.kind == "none":
        return None
    return "an adapter leaves the embeddings as they are; leave rows out, or set adapter.kind: none"


def _rows_are_fp32_on_the_device(recipe: Recipe, given: Set[str]) -> str | None:
    optimizer = recipe.optimizer
    if not optimizer.rows:
        return None
    if keeps_states_on_host(optimizer):
        return "rows are updated on the device, where they lie; write optimizer.offload: none, or leave rows out"
    if rounds_stochastically(optimizer):
        return "rows are updated in float32; write optimizer.rounding: nearest and model.dtype: auto, or leave rows out"
    return None


def _rows_are_of_whole_embeddings(recipe: Recipe, given: Set[str]) -> str | None:
    tensor = recipe.parallel.tensor
    if not recipe.optimizer.rows or tensor == 1:
        return None
    return (
        f"parallel.tensor: {tensor} splits embeddings over the processes of a group, each of which looks up rows of "
        "its own; leave rows out, or write parallel.tensor: 1"
    )


def _export_needs_checkpoint(recipe: Recipe, given: Set[str]) -> str | None:
    export = recipe.export
    if recipe.checkpoint.at_end or (export.every is None and not export.at_end):
        return None
    return "the last step is exported from its checkpoint; set checkpoint.at_end: true"


def _adapted_experts_have_plain_lora(recipe: Recipe, given: Set[str]) -> str | None:
    if not isinstance(recipe.adapter, DoraAdapter) or not recipe.adapter.experts:
        return None
    return "DoRA has lengths for the rows of layers, not of experts; set adapter.kind: lora, or experts: false"


def _adapted_experts_are_whole(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.parallel.tensor == 1 or not isinstance(recipe.adapter, LowRankAdapter) or not recipe.adapter.experts:
        return None
    return "parallel.tensor splits no experts with adapters; leave it out for parallel.expert, or set experts: false"


def _layers_of_peft_are_plain(recipe: Recipe, given: Set[str]) -> str | None:
    adapter, precision = recipe.adapter, str(recipe.train.precision)
    if not isinstance(adapter, PeftAdapter):
        return None
    if recipe.model.quantize != "none" or precision == "fp8":
        key = "model.quantize: none" if recipe.model.quantize != "none" else "train.precision: bf16"
        return f"peft's layers compute with weights as they are (lora and dora have others); write {key}"
    if recipe.parallel.tensor > 1 or recipe.parallel.expert > 1:
        axis = "tensor" if recipe.parallel.tensor > 1 else "expert"
        return f"peft's layers are not split (lora's are); write parallel.{axis}: 1"
    if recipe.model.init_from:
        return "weights from elsewhere have no places in an adapter of peft's; remove model.init_from"
    if adapter.moves_base and recipe.model.dtype != "fp32" and precision != "fp32":
        return "a part of the base begins in the adapter, and bf16 would round the rest; write model.dtype: fp32"
    if adapter.config["peft_type"] == "ADALORA" and precision == "fp16":
        return "AdaLoRA ranks by gradients, which fp16 scales from step to step; write train.precision: bf16"
    return None


def _newer_weights_can_be_taken(recipe: Recipe, given: Set[str]) -> str | None:
    is_apart = recipe.tokenizer.add_tokens or getattr(recipe.method, "reference", None) is not None
    if not is_apart or not any(entry.every for entry in recipe.model.init_from):
        return None
    return "neither a reference model nor rows of new tokens follow the newer weights of every; remove every"


def _kept_adapter_is_there(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.export.adapter == "merge" or recipe.adapter.kind != "none":
        return None
    return "keep writes an adapter's directory; set adapter.kind, or export.adapter: merge"


def _base_is_a_choice(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.export.base == "auto":
        return None
    if recipe.model.quantize == "none":
        return "the base is not quantised, so there is one to merge into; set model.quantize, or export.base: auto"
    if recipe.export.adapter == "keep":
        return "a kept adapter is merged into no base; set export.adapter: merge, or export.base: auto"
    return None


def _profile_records_something(recipe: Recipe, given: Set[str]) -> str | None:
    profile = recipe.profile
    if profile.entries != ProfileSection().entries and profile.memory != "all":
        return "entries are those of a whole launch's history; set profile.memory: all"
    if (profile.lines or profile.cuda_sync) and not profile.time:
        return "lines and cuda_sync are of a trace; set profile.time: true"
    if not profile.steps or profile.memory or profile.time:
        return None
    return "nothing is recorded of them; set profile.memory or profile.time: true"


def _slow_rank_is_measured(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.health.slow_rank == HealthSection().slow_rank or recipe.health.times_every is not None:
        return None
    return "no times are measured to compare; set health.times_every, such as 20 steps, or remove slow_rank"


def _probed_modules_are_named(recipe: Recipe, given: Set[str]) -> str | None:
    prober = recipe.prober
    if prober.steps and not prober.modules:
        return "name the modules to look into, such as [embed_tokens, layers.0.mlp]"
    if prober.modules and not prober.steps:
        return "say in which steps to look into them: prober.steps, such as [1]"
    return None


def _probed_layers_are_not_compiled(recipe: Recipe, given: Set[str]) -> str | None:
    if not recipe.prober.steps or recipe.train.compile is not True:
        return None
    return "compiled layers cannot be looked into; write train.compile: false, or remove prober"


def _parts_are_sharded(recipe: Recipe, given: Set[str]) -> str | None:
    parallel = recipe.parallel
    for key, size in (("tensor", parallel.tensor), ("expert", parallel.expert)):
        if size > 1 and parallel.shard == "none":
            return f"parallel.{key}: {size} splits weights over processes; write parallel.shard: full, hybrid or auto"
    return None


def _replicas_are_of_shards(recipe: Recipe, given: Set[str]) -> str | None:
    parallel = recipe.parallel
    if parallel.replicas is None or parallel.shard in {"auto", "hybrid"}:
        return None
    return f"with shard: {parallel.shard} nothing has copies that are split; write parallel.shard: hybrid"


def _shards_are_reduced_in_bf16(recipe: Recipe, given: Set[str]) -> str | None:
    parallel = recipe.parallel
    if parallel.reduce_dtype == "fp32":
        return None
    if parallel.shard == "none":
        return "whole gradients are added up in float32; write fp32, or parallel.shard: full"
    if parallel.accumulate == "whole":
        return "micro-batches would be added up in bf16, too; write parallel.accumulate: sharded"
    return None


def _experts_elsewhere_take_rows_at_once(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.parallel.expert == 1 or recipe.train.tiled_mlp is not True:
        return None
    return "tokens are sent to experts of other processes (parallel.expert) a row at once; write false"


def _experts_are_whole(recipe: Recipe, given: Set[str]) -> str | None:
    parallel = recipe.parallel
    if parallel.expert == 1 or (parallel.tensor == 1 and parallel.sequence == 1):
        return None
    other = "tensor" if parallel.tensor > 1 else "sequence"
    return f"experts are not spread together with parallel.{other}; leave one of the two out"


def _split_layers_are_plain(recipe: Recipe, given: Set[str]) -> str | None:
    tensor, model, train = recipe.parallel.tensor, recipe.model, recipe.train
    if tensor == 1:
        return None
    split = f"parallel.tensor: {tensor} splits the layers, which are"
    if model.quantize != "none":
        return f"{split} not quantised as parts; write model.quantize: none, or parallel.tensor: 1"
    if train.precision == "fp8":
        return f"{split} not multiplied in fp8 as parts; write train.precision: bf16, or parallel.tensor: 1"
    if train.tiled_mlp is True:
        return f"{split} not computed over tiles as parts; write train.tiled_mlp: false"
    return None


def _losses_have_the_whole_vocabulary(recipe: Recipe, given: Set[str]) -> str | None:
    takes = {
        "custom": "a method of your own is given the output layer whole",
        "distill": "a teacher is compared with over all tokens at once",
    }
    tensor, kind = recipe.parallel.tensor, recipe.method.kind
    if tensor == 1 or kind not in takes:
        return None
    return f"{takes[kind]}, and parallel.tensor: {tensor} splits them over processes; write parallel.tensor: 1"


def _changing_batches_have_all_rows(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.train.batch_schedule and recipe.data.portions is not None:
        return "is of data that are all there; write batch_schedule: []"
    return None


def _shown_figures_are_logged(recipe: Recipe, given: Set[str]) -> str | None:
    known = (*STEP_FIGURES, *recipe.method.figures)
    unknown = next((name for name in recipe.logging.console if name not in known), None)
    if unknown is None or isinstance(recipe.method, CustomMethod):  # only its code knows what it measures
        return None
    near = get_close_matches(unknown, known, 1)
    meant = [one for name in recipe.logging.console for one in (near if name == unknown else [name])]
    return f"no step has {unknown} with method.kind: {recipe.method.kind}; write [{', '.join(meant)}]"


def _cancelling_tags_have_a_page(recipe: Recipe, given: Set[str]) -> str | None:
    if recipe.logging.cancel_tags and "wandb" not in recipe.logging.trackers:
        return "are looked for on a page of wandb; set logging.trackers: [wandb], or cancel_tags: []"
    return None


RULES: tuple[Rule, ...] = (
    Rule(("train.batch_schedule", "data.windows"), _changing_batches_have_all_rows),
    Rule(("logging.console", "method.kind"), _shown_figures_are_logged),
    Rule(("logging.cancel_tags", "logging.trackers"), _cancelling_tags_have_a_page),
    Rule(("eval.every", "data.eval", "eval.tasks"), _cadence_needs_rows),
    Rule(("eval.marks", "data.eval", "eval.tasks"), _marks_need_rows),
    Rule(("checkpoint.keep_best", "data.eval", "eval.every", "eval.tasks"), _best_needs_rows),
    Rule(("checkpoint.keep_best", "method.kind", "eval.tasks"), _best_is_measured),
    Rule(("eval.patience", "data.eval", "eval.tasks"), _patience_needs_rows),
    Rule(("train.min_steps", "eval.patience", "train.duration"), _min_steps_bounds_something),
    Rule(("ema.decay", "ema.half_life"), _one_rate_of_averaging),
    Rule(("ema.evaluate", "ema.decay", "ema.half_life", "data.eval"), _evaluated_averages_are_there),
    Rule(("eval.tasks", "method.kind"), _tasks_have_names_of_their_own),
    Rule(("eval.tasks", "method.kind"), _tasks_need_text),
    Rule(("eval.tasks",), _harness_scores_its_tasks),
    Rule(("train.micro_batch_size", "train.global_batch_size"), _micro_divides_global),
    Rule(("model.config", "model.init"), _config_needs_random),
    Rule(("model.use", "method.kind"), _own_class_has_an_output_layer),
    Rule(("model.freeze", "adapter.kind"), _freeze_needs_full),
    Rule(("model.quantize", "adapter.kind"), _quantized_is_frozen),
    Rule(("train.precision", "model.quantize"), _quantized_products_are_their_own),
    Rule(("train.fp8_except", "train.precision"), _fp8_layers_are_left_out_of_fp8),
    Rule(("train.gradient_checkpointing_layers", "train.gradient_checkpointing"), _layers_need_recompute),
    Rule(
        ("train.gradient_checkpointing_modules", "train.gradient_checkpointing", "train.compile"),
        _recomputed_modules_are_of_layers,
    ),
    Rule(("train.offload_activations", "train.gradient_checkpointing"), _offload_needs_recompute),
    Rule(("train.compile", "data.packing"), _compiled_rows_are_packed),
    Rule(("data.train", "method.kind"), _pretrain_takes_text),
    Rule(("tokenizer.chat_template", "method.kind"), _pretrain_has_no_turns),
    Rule(("data.rows", "data.packing", "data.too_long", "method.kind"), _cut_rows_are_of_documents_end_to_end),
    Rule(("data.pack_sources", "data.packing", "data.rows"), _rows_of_one_source_are_packed),
    Rule(("data.train", "data.eval", "method.kind"), _compared_answers_are_chats_or_texts),
    Rule(("data.too_long", "method.kind"), _compared_answers_are_whole),
    Rule(tuple(f"data.repetition.{name}" for name in RepetitionSection.model_fields), _patterns_are_counted),
    Rule(
        (
            *(f"train.length_warmup.{name}" for name in LengthWarmupSection.model_fields),
            *("method.kind", "data.windows", "train.overfit_first_batch", "train.duration"),
        ),
        _rows_can_be_short_at_first,
    ),
    Rule(("data.max_prompt_length", "method.kind"), _prompts_of_pairs),
    Rule(
        ("data.min_piece_length", "data.too_long", "data.rows", "data.max_length", "method.kind"),
        _pieces_are_of_split_documents,
    ),
    Rule(("data.eval",), _split_fits_cap),
    Rule(
        ("optimizer.adjust_lr", "optimizer.scale_parameter", "optimizer.lr", "optimizer.adamw_lr", "optimizer.kind"),
        _lr_of_its_own,
    ),
    Rule(("export.at_end", "export.every", "checkpoint.at_end"), _export_needs_checkpoint),
    Rule(("adapter.experts", "adapter.kind"), _adapted_experts_have_plain_lora),
    Rule(("adapter.experts", "parallel.tensor"), _adapted_experts_are_whole),
    Rule(
        ("adapter.kind", "adapter.config", "model.quantize", "train.precision", "parallel.tensor", "parallel.expert"),
        _layers_of_peft_are_plain,
    ),
    Rule(("model.init_from", "method.kind", "tokenizer.add_tokens"), _newer_weights_can_be_taken),
    Rule(("export.adapter", "adapter.kind"), _kept_adapter_is_there),
    Rule(("export.keep_fp32", "export.adapter", "adapter.kind"), _adapter_is_written_in_one_type),
    Rule(("export.base", "model.quantize", "export.adapter"), _base_is_a_choice),
    Rule(("optimizer.nesterov", "optimizer.momentum", "optimizer.kind"), _nesterov_has_momentum),
    Rule(("optimizer.rounding", "optimizer.kind", "model.dtype", "adapter.kind"), _stochastic_rounding_needs_bf16),
    Rule(("optimizer.offload", "optimizer.state", "optimizer.rounding", "optimizer.kind"), _states_on_host_are_fp32),
    Rule(
        (
            *("parallel.offload", "model.quantize", "adapter.config"),
            *("optimizer.kind", "optimizer.offload", "optimizer.rows"),
        ),
        _shards_on_host_are_plain,
    ),
    Rule(("prober.modules", "prober.steps"), _probed_modules_are_named),
    Rule(("prober.steps", "train.compile"), _probed_layers_are_not_compiled),
    Rule(("optimizer.rows", "adapter.kind"), _rows_are_trained_in_full),
    Rule(("optimizer.rows", "optimizer.offload", "optimizer.rounding", "optimizer.kind"), _rows_are_fp32_on_the_device),
    Rule(("optimizer.rows", "parallel.tensor"), _rows_are_of_whole_embeddings),
    Rule(
        (*(f"profile.{key}" for key in ("steps", "memory", "time", "entries", "lines", "cuda_sync")),),
        _profile_records_something,
    ),
    Rule(("parallel.tensor", "parallel.expert", "parallel.shard"), _parts_are_sharded),
    Rule(("parallel.replicas", "parallel.shard"), _replicas_are_of_shards),
    Rule(("parallel.reduce_dtype", "parallel.shard", "parallel.accumulate"), _shards_are_reduced_in_bf16),
    Rule(("parallel.expert", "parallel.tensor", "parallel.sequence"), _experts_are_whole),
    Rule(
        ("parallel.tensor", "model.quantize", "train.precision", "train.tiled_mlp"),
        _split_layers_are_plain,
    ),
    Rule(("method.kind", "parallel.tensor"), _losses_have_the_whole_vocabulary),
    Rule(("train.tiled_mlp", "parallel.expert"), _experts_elsewhere_take_rows_at_once),
    Rule(("health.slow_rank", "health.times_every"), _slow_rank_is_measured),
    *STORE_RULES,
    *(rule for section in SECTIONS.values() for rule in section.rules),
)
