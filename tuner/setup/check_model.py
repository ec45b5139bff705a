"""What a recipe names of its model, checked on the model without storage; and, with prepared data, the whole set-up."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from tuner.config.load import LoadedRecipe
from tuner.config.methods import head_of
from tuner.config.numbers import Duration
from tuner.config.optimizers import AdamwOptimizer, MuonOptimizer
from tuner.config.recipe import LowRankAdapter, PeftAdapter, Recipe
from tuner.data.building.spec import resolve_max_length
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.prepared import PreparedData
from tuner.errors import DataError
from tuner.model.adapter import linear_layers, refuse_others
from tuner.model.build import decoder_blocks, meta_model, model_config
from tuner.model.freeze import select
from tuner.model.output_layer import LogitTransform
from tuner.model.quantize.layers import quantize_
from tuner.model.root import CausalLM, embedding_parameters, outer_parameters, trained_parameters
from tuner.model.router_loss import router_loss
from tuner.model.stored import index_names
from tuner.model.touched_rows import row_tables
from tuner.model.vetting import holds_codes, require_known_losses
from tuner.parallel.assemble import recomputed_count
from tuner.runtime.dist import RankInfo
from tuner.runtime.safetensors_header import read_header
from tuner.setup import resolve
from tuner.setup.build import held_out_rows
from tuner.setup.findings import Findings
from tuner.setup.initial import check_initial
from tuner.setup.resolve import Resolved
from tuner.setup.specs import mesh_of, meta_model_of, trainable_of
from tuner.train.evaluate import check_metric, require_metric, source_names
from tuner.train.methods.method import check_logits
from tuner.train.optimizer import chosen_groups, coded_matrices, hidden_matrices


def check_model(recipe: Recipe, directory: Path, found: Findings) -> str | None:
    """Check a recipe against its model's config, which is in `directory`; how documents go through it, if apart."""
    here = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name_or_path": str(directory)})})
    apart = None
    found.check("data.max_length", resolve_max_length, here.model, here.data)
    _check_best(recipe, found)
    with found.of("model.name_or_path"):
        config = model_config(resolve.model_spec(here, range(0)))
        model = meta_model(config, torch.float32, head_of(recipe.method))
        route, why = resolve.route_for(recipe, model)
        if why is not None:
            apart = f"documents {resolve.ROUTES[route]}: {why}"
            found.check("data.packing", resolve.require_apart, recipe.data.packing is True, route, why)
        if recipe.model.init == "pretrained" and not holds_codes(str(directory), None):
            _check_shapes(recipe, directory, model, found)
        found.check("parallel.tensor", resolve.require_axes, recipe.parallel, model)
        check_parts(recipe, model, found)
        if recipe.model.init_from and not recipe.tokenizer.add_tokens and not found.problems:
            with found.of("model.init_from"):
                check_initial(here, trainable_of(recipe, range(0)), found)
    return apart


def check_setup(
    loaded: LoadedRecipe, resolved: Resolved, prepared: PreparedData, tokenizer: TextTokenizer, rank_info: RankInfo
) -> None:
    """Check what a launch would find when it builds model and optimizer, without building them.

    Raises RecipeError with every problem.
    """
    recipe, found = resolved.recipe, Findings(loaded)
    found.check("tokenizer.name_or_path", resolve.check_fits, tokenizer, resolved.config, prepared)
    with found.of("method.use"):
        check_logits(recipe.method, LogitTransform.of(resolved.config))
    with found.of("train.global_batch_size"):
        resolve.check_division(recipe, mesh_of(recipe.parallel, rank_info).size)
    with found.of("checkpoint.keep_best"):
        check_metric(recipe.checkpoint.keep_best, held_out_rows(recipe.data, prepared), recipe.method.figures)
    if not found.problems:
        check_parts(recipe, meta_model_of(resolved, torch.float32), found, resolved.new_ids)
    found.raise_any()


def check_parts(recipe: Recipe, model: PreTrainedModel, found: Findings, new_ids: range = range(0)) -> None:
    """Check every name and glob that a recipe has for parts of its model; the model is changed as training would."""
    before = len(found.problems)
    found.check("model.config", require_known_losses, model.config)
    found.check("model.router_aux_loss_coef", router_loss, model, recipe.model.router_aux_loss_coef or 0.0)
    found.check("model.router_z_loss_coef", router_loss, model, 0.0, z_weight=recipe.model.router_z_loss_coef)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    _select_each(recipe.model.freeze, names, "model.freeze", found)
    _select_each(recipe.export.keep_fp32, names, "export.keep_fp32", found)
    if isinstance(recipe.adapter, LowRankAdapter):
        _check_adapter(recipe.adapter, model, found)
    if isinstance(recipe.adapter, PeftAdapter):
        _check_saved(recipe.adapter.modules_to_save, model, "adapter.config.modules_to_save", found)
    if (quantize := resolve.quantize_of(recipe)) is not None and len(found.problems) == before:
        found.check("model.quantize", quantize_, model, quantize)
    train = recipe.train
    if train.gradient_checkpointing in {"selective", "full"}:
        with found.of("train.gradient_checkpointing_layers"):
            layers = decoder_blocks(model, "train.gradient_checkpointing")
            recomputed_count(train.gradient_checkpointing_layers, len(layers))
        modules = [name for name, _ in model.named_modules() if name]
        _select_each(train.gradient_checkpointing_modules, modules, "train.gradient_checkpointing_modules", found)
    if len(found.problems) > before:
        return
    with found.of("adapter.target_modules" if recipe.adapter.kind != "none" else "model.freeze"):
        root = CausalLM(model)
        trainable_of(recipe, new_ids).apply(root.model, recipe.seed)
        parameters = trained_parameters(root)
        found.check("optimizer.groups", chosen_groups, parameters, recipe.optimizer.groups)
        if recipe.optimizer.rows:
            with found.of("optimizer.rows"):
                tables = row_tables(root.model, [pattern for item in recipe.optimizer.rows for pattern in item.match])
                chosen_groups(tables, recipe.optimizer.rows, "optimizer.rows")
        if isinstance(recipe.optimizer, MuonOptimizer):
            found.check("optimizer.kind", hidden_matrices, parameters, outer_parameters(root))
        if isinstance(recipe.optimizer, AdamwOptimizer) and recipe.optimizer.state == "8bit":
            found.check("optimizer.state", coded_matrices, parameters, embedding_parameters(root))


def _check_adapter(adapter: LowRankAdapter, model: PreTrainedModel, found: Findings) -> None:
    if not isinstance(adapter.target_modules, str):
        linear = linear_layers(model)
        for pattern in adapter.target_modules:
            with found.of("adapter.target_modules"):
                refuse_others(model, [pattern], linear)
                select([pattern], linear, "adapter.target_modules")
    _check_saved(adapter.modules_to_save, model, "adapter.modules_to_save", found)


def _check_saved(patterns: Sequence[str], model: PreTrainedModel, key: str, found: Findings) -> None:
    owning = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    _select_each(patterns, owning, key, found)


def _select_each(patterns: Sequence[str], names: Iterable[str], key: str, found: Findings) -> None:
    """Note every pattern that means nothing."""
    known = list(names)
    for pattern in patterns:
        found.check(key, select, [pattern], known, key)


def _check_best(recipe: Recipe, found: Findings) -> None:
    """Check that evaluations measure the figure that the best checkpoint is chosen by."""
    metric, held = recipe.checkpoint.keep_best, recipe.data.eval
    if metric is None or held is None:
        return
    sources = recipe.data.train if isinstance(held, Duration) else held
    with found.of("checkpoint.keep_best"):
        require_metric(metric, source_names([source.name for source in sources]), recipe.method.figures)


def _check_shapes(recipe: Recipe, directory: Path, model: PreTrainedModel, found: Findings) -> None:
    """Compare the shapes in the headers of the weights with the model's, of the names that both have."""
    wanted = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    if (directory / SAFE_WEIGHTS_INDEX_NAME).is_file():
        found.check("model.name_or_path", index_names, directory / SAFE_WEIGHTS_INDEX_NAME)
    for path in sorted(directory.glob("*.safetensors")):
        try:
            read_header(path)
            with safe_open(path, "pt") as file:
                there = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, DataError) as error:
            found.add("model.name_or_path", f"{path}: not a file of weights: {error}", "download the model again")
            continue
        for name, shape in there.items():
            if name in wanted and wanted[name] != shape:
                key = "model.config" if recipe.model.config else "model.name_or_path"
                text = f"{name} is {list(shape)} in {path.name}, and {list(wanted[name])} by the config"
                found.add(key, text, "use the model's own config, or model.init: random")
                return
