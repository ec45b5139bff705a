"""A small model of a recipe's architecture, and the recipe that trains it in float32 on this machine's processor.

What decides about a layout stays: which sizes divide the heads, the key heads, the experts and the vocabulary; ties,
norms, biases, windows, kinds of layers. Only sizes change: few layers, one of each kind, and narrow.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from tuner.config.load import load_recipe, recipe_dict
from tuner.config.methods import DistillMethod
from tuner.config.recipe import Recipe
from tuner.errors import RecipeError, counted
from tuner.model.attention import CHUNKS, WINDOWS
from tuner.model.build import dropouts_of, meta_model, model_config
from tuner.model.freeze import select
from tuner.prove.layouts import Layout, laid_out
from tuner.setup.resolve import Resolved, model_spec, resolve
from tuner.setup.settled import changed

LONGEST = 48
"""Tokens of a row."""
ROWS = 16
"""Rows of a global batch: as many for every layout, so that all take the same steps."""
HEAD_DIM, WINDOW, EXPERTS = 16, 16, 8
VOCABULARY = 512
"""So many that rows of the embedding are looked up in shards by micro-batches of few rows."""
MOST_LAYERS = 4
RATE = 1e-3
"""The least learning rate: few steps change weights by more than sums of another order do."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_INNER = (
    "intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size",
    "shared_intermediate_size",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "topk_group")
_LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 16,
    "v_head_dim": 8, "head_dim": 8,
}  # fmt: skip
"""Widths of attention over latent states."""
_POSITIONS = ("n_positions", "n_ctx", "max_position_embeddings")


@dataclass(frozen=True)
class Twin:
    """What is trained in place of the recipe's own model, and what that leaves out."""

    recipe: Recipe
    own: Recipe
    """The recipe that it stands for, whose rules hold for it."""
    new_ids: range
    accumulate: int
    """Micro-batches of a step."""
    assumptions: tuple[str, ...]

    def resolved(self, layout: Layout) -> Resolved:
        """The recipe resolved for a layout on the processor. Raises RecipeError where it is refused."""
        recipe = laid_out(self.recipe, layout)
        rows = max(ROWS // layout.data_size // self.accumulate, 1)
        recipe = changed(recipe, {"train.micro_batch_size": rows})
        return resolve(recipe, LONGEST, layout.rank_info(0), self.new_ids)


def make_twin(recipe: Recipe, directory: Path) -> Twin:
    """The recipe on a small model of its architecture, whose config is written to ``directory``.

    Raises RecipeError where there is no language model of its own to make small.
    """
    whole = model_config(model_spec(recipe, range(0)))
    small = shrunk(whole)
    small.save_pretrained(directory)
    adds = min(len(recipe.tokenizer.add_tokens), 3)
    plain, assumptions = _in_float32(recipe, directory)
    assumptions += _named_here(plain, small)
    layers, heads = counted(small.num_hidden_layers, "layer"), counted(small.num_attention_heads, "head")
    config = f"{layers} of {small.hidden_size}, {heads}"
    rows = f"steps of {ROWS} rows of up to {LONGEST} made-up tokens"
    about = f"a {small.model_type} of {config}, float32, no dropout; {rows}"
    new_ids = range(small.vocab_size, small.vocab_size + adds)
    return Twin(load_recipe(plain).recipe, recipe, new_ids, accumulation(recipe), (about, *assumptions))


def accumulation(recipe: Recipe) -> int:
    """Micro-batches of a step: as many as the recipe's own has, of 1, 2 and 4 the nearest that is not more."""
    train, parallel = recipe.train, recipe.parallel
    processes = 1 if parallel.processes == "auto" else int(parallel.processes)
    shared = parallel.tensor * parallel.sequence
    rows = 1 if train.micro_batch_size == "auto" else int(train.micro_batch_size)
    own = train.global_batch_size // (rows * max(processes // shared, 1))
    return max(number for number in (1, 2, 4) if number <= max(own, 1))


def _in_float32(recipe: Recipe, directory: Path) -> tuple[dict[str, Any], list[str]]:
    """The recipe as plain values, with what a proof in float32 on a processor changes; and what that leaves out."""
    plain, left_out = recipe_dict(recipe), []
    plain["model"] |= {"name_or_path": str(directory), "revision": None, "config": {}, "init": "pretrained"}
    plain["model"] |= {"dtype": "fp32", "kernels": "torch", "init_from": []}
    train = {"precision": "fp32", "tf32": False, "device": "cpu", "compile": False, "micro_batch_size": 1}
    plain["train"] |= {**train, "global_batch_size": ROWS, "skip_spikes": "never"}
    plain["train"] |= {key: value for key in _MEMORY if plain["train"][key] == "auto" for value in (_MEMORY[key],)}
    plain["train"]["gradient_checkpointing_layers"] = "100%"
    plain["data"] |= {"max_length": LONGEST}
    adapter = plain["adapter"].get("config", plain["adapter"])
    adapter |= {key: 0.0 for key in adapter if key.endswith("dropout")}
    lr = plain["optimizer"]["lr"]
    plain["optimizer"]["lr"] = RATE if lr == "auto" else max(lr, RATE)
    for key, value in _ROUNDED.items():
        if plain["optimizer"].get(key, value) != value:
            left_out.append(f"optimizer.{key}: {plain['optimizer'][key]} is left out")
            plain["optimizer"][key] = value
    if isinstance(recipe.method, DistillMethod) and recipe.method.top_k is None:
        plain["method"] = {"kind": "sft"}
        left_out.append("a teacher in memory is left out: method.kind sft in its place")
    plain["prober"] |= {"modules": [], "steps": []}
    return plain, left_out


_MEMORY = {"gradient_checkpointing": "none", "offload_activations": False, "tiled_mlp": False}
_ROUNDED: dict[str, Any] = {"state": "fp32", "rounding": "nearest", "offload": "none", "rows": []}
"""Of optimizers, what rounds or moves their state: the proof is of sums over processes."""


def _named_here(plain: dict[str, Any], small: PretrainedConfig) -> list[str]:
    """Leave out names and globs of layers that a small model does not have, in place; says which."""
    model = meta_model(small, torch.float32)
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    left_out: list[str] = []

    def kept(patterns: list[str], names: Iterable[str], key: str) -> list[str]:
        found = [pattern for pattern in patterns if _means_any(pattern, names)]
        left_out.extend(f"{key}: {pattern} is left out" for pattern in patterns if pattern not in found)
        return found

    plain["model"]["freeze"] = kept(plain["model"]["freeze"], parameters, "model.freeze")
    adapter = plain["adapter"]
    if isinstance(adapter.get("target_modules"), list):
        from tuner.model.adapter import linear_layers  # and peft with it

        found = kept(adapter["target_modules"], linear_layers(model), "adapter.target_modules")
        adapter["target_modules"] = found or "all-linear"
    if adapter["kind"] == "none":
        groups = plain["optimizer"].get("groups", [])
        for group in groups:
            group["match"] = kept(list(group["match"]), parameters, "optimizer.groups")
        plain["optimizer"]["groups"] = [group for group in groups if group["match"]]
    return left_out


def _means_any(pattern: str, names: Iterable[str]) -> bool:
    try:
        select([pattern], names, "")
    except RecipeError:
        return False
    return True


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """A small config of the same architecture; of a multimodal one, of its language model. Raises RecipeError."""
    text = config.get_text_config()
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if not isinstance(kind, type):
        raise RecipeError(
            f"{text.model_type} is no causal language model that transformers makes by itself: no small one is proven",
            hint="prove the recipe of a text model of the same architecture",
        )
    values = text.to_dict()
    values.pop("quantization_config", None)
    changed = {**values, **_layers(values, text.num_hidden_layers), **_widths(text, values), **_rest(text, values)}
    changed["architectures"] = [kind.__name__]
    try:
        return type(text).from_dict(changed)
    except Exception as error:  # configs validate themselves, each with exceptions of its own
        raise RecipeError(f"no small model can be made of a config of {text.model_type}: {error}") from error


def kept(number: int) -> int:
    """A small number that 2, 3 and 4 divide where they divide this one, and that is not 1 where this one is not."""
    twos = 4 if number % 4 == 0 else 2 if number % 2 == 0 else 1
    if number in (1, 2, 4) or (twos == 4 and number % 3):
        return twos
    return twos * (3 if number % 3 == 0 else 5)


def _layers(values: Mapping[str, Any], count: int) -> dict[str, Any]:
    """One layer of each kind, at least two: what a config says layer by layer tells kinds apart."""
    listed = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == count > 1}
    dense = values.get("first_k_dense_replace") or 0
    only = values.get("mlp_only_layers") or []

    def kind(layer: int) -> tuple[Any, ...]:
        return (layer < dense, layer in only, *(str(value[layer]) for value in listed.values()))

    first = {kind(layer): layer for layer in reversed(range(count))}
    chosen = sorted(first.values())[:MOST_LAYERS]
    if len(chosen) == 1 and count > 1:
        chosen.append(chosen[0] + 1)
    found: dict[str, Any] = {key: len(chosen) for key in _LAYERS if key in values}
    found |= {key: [value[layer] for layer in chosen] for key, value in listed.items()}
    if dense:
        found["first_k_dense_replace"] = sum(layer < dense for layer in chosen)
    if only:
        found["mlp_only_layers"] = [place for place, layer in enumerate(chosen) if layer in only]
    return found


def _widths(text: PretrainedConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Heads, widths and experts: their divisors stay."""
    heads, hidden = int(text.num_attention_heads), int(text.hidden_size)
    keys = int(getattr(text, "num_key_value_heads", None) or heads)
    few_keys = kept(keys)
    groups = _groups(heads // keys, few_keys)
    few, latent = few_keys * groups, values.get("kv_lora_rank") is not None
    own = int(getattr(text, "head_dim", None) or hidden // heads)
    share = 1.0 if latent else hidden / (heads * own)
    width = max(32, round(few * HEAD_DIM * share / HEAD_DIM) * HEAD_DIM)
    if "head_dim" not in values:
        width = few * HEAD_DIM
    found = _renamed(text, values, {"num_attention_heads": few, "hidden_size": width})
    found |= {"num_key_value_heads": few_keys} if values.get("num_key_value_heads") else {}
    found |= {"head_dim": HEAD_DIM} if values.get("head_dim") else {}
    if latent:
        found |= {key: width for key, width in _LATENT.items() if values.get(key) is not None}
    if "query_pre_attn_scalar" in values:
        found["query_pre_attn_scalar"] = HEAD_DIM
    found |= {key: kept(values[key]) * HEAD_DIM for key in _INNER if isinstance(values.get(key), int)}
    return found | _few_experts(values)


def _groups(queries: int, keys: int) -> int:
    """Query heads of a key head: 1 where it is 1, else few, so that 2 and 4 divide all heads where they did."""
    if queries % 2:
        return min(queries, 3)
    return 4 if queries % 4 == 0 and keys % 2 else 2


def _few_experts(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in _EXPERTS:
        count = values.get(key)
        if isinstance(count, int) and count > 1:
            found[key] = min(count, EXPERTS if count % 4 == 0 else 6 if count % 2 == 0 else 5)
    found |= {key: min(values[key], 2) for key in _CHOSEN if isinstance(values.get(key), int) and values[key] > 0}
    if isinstance(count := values.get("n_group"), int) and count > 1:
        found["n_group"] = 2
    return found


def _rest(text: PretrainedConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Vocabulary and the tokens in it, windows, positions; no dropout."""
    found: dict[str, Any] = {key: 0.0 for key in dropouts_of(text) if key in values}
    found |= {"vocab_size": VOCABULARY + int(text.vocab_size) % 4, **_few_tokens(values)}
    found |= {key: min(values[key], WINDOW) for key in (*WINDOWS, *CHUNKS) if isinstance(values.get(key), int)}
    if values.get("rope_parameters") is None:
        found |= {key: min(values[key], 2 * LONGEST) for key in _POSITIONS if isinstance(values.get(key), int)}
    else:
        found["rope_parameters"] = _rotations(values["rope_parameters"], text)
    return found


def _few_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of special tokens that a small vocabulary has."""
    small, found = {"pad_token_id": 0, "bos_token_id": 1}, {}
    for key, value in values.items():
        if key.endswith("_token_id") and value is not None:
            found[key] = [2] if isinstance(value, list) else small.get(key, 2)
    return found


def _rotations(parameters: Any, text: PretrainedConfig) -> Any:
    """Parameters of rotary positions with as many factors as a narrow head takes."""
    if isinstance(parameters, Mapping):
        return {key: _rotations(value, text) for key, value in parameters.items()}
    if isinstance(parameters, Sequence) and not isinstance(parameters, str):
        own = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        return list(parameters)[: max(1, len(parameters) * HEAD_DIM // own)]
    return parameters


def _renamed(text: PretrainedConfig, values: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Values under the names that this config has for them (`n_embd` for `hidden_size`)."""
    names = type(text).attribute_map
    return {names.get(key, key): value for key, value in found.items() if names.get(key, key) in values}
