"""What an export says of its options, and of what it writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.model.tiny import SHAPE
from tools.advice.hint_cases.setup import family
from tools.advice.hint_place import Case, Change
from tools.advice.hint_words import RUN, Way

EXPORT = "export-hf runs/r"
TRAINED = f"train r.yaml && {EXPORT}"
MEAN: Way = {"--weights": "mean:2"}
LORA = {"adapter.kind": "lora", "adapter.r": 4}
RANDOM = {"model.init": "random", "model.config": {"vocab_size": 300}}
BASE = {"model.init_from": ["model"]}
GLM = {**RANDOM, "adapter.kind": "dora", "adapter.r": 4, "adapter.target_modules": ["*.shared_experts.up_proj"]}
TIED = {**LORA, "adapter.target_modules": ["q_proj", "lm_head"]}


def mixture(place: Path) -> None:
    """The config of a model whose shared experts have layers of the names of routed ones."""
    from transformers import AutoConfig

    shape: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape["num_key_value_heads"] = 2
    shape |= {"moe_intermediate_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "vocab_size": 300}
    shape |= {"head_dim": 8, "first_k_dense_replace": 1, "architectures": ["Glm4MoeForCausalLM"]}
    config = AutoConfig.for_model("glm4_moe", **shape)
    config.save_pretrained(place / "model")


def pictures(alone: bool) -> Change:
    """A multimodal model, whose language model has a class of its own or not."""

    def change(place: Path) -> None:
        from transformers import AutoConfig, AutoModelForImageTextToText

        text: dict[str, Any] = SHAPE | {"vocab_size": 300}
        vision: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24}
        if alone:
            text["model_type"] = "mistral"
            vision |= {"model_type": "pixtral", "image_size": 8, "patch_size": 4, "head_dim": 8}
            vision |= {"num_hidden_layers": 1, "num_attention_heads": 2}
        else:
            text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
            vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
        kind = "mistral3" if alone else "qwen2_5_vl"
        shutil.rmtree(place / "model")
        config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=not alone)
        AutoModelForImageTextToText.from_config(config).save_pretrained(place / "model")

    return change


def outliers(place: Path) -> None:
    """A model of whose weights codes of 4 bits keep one in each row."""
    from safetensors.torch import load_file, save_file

    path = place / "model/model.safetensors"
    held = load_file(path)
    for name, tensor in held.items():
        if "_proj" in name:
            tensor[:, 3] = 3.0
    save_file(held, path, {"format": "pt"})


def of_run(site: str, options: str, *meant: Way, **more: Any) -> Case:
    """What an export of a finished run says; where it is about options alone, nothing is written."""
    return Case(site, {}, meant, **{"start": "kept", "words": f"{EXPORT} {options} --dry-run", **more})


def of_adapter(site: str, options: str, *meant: Way, **more: Any) -> Case:
    """The same of an adapter."""
    return of_run(site, options, *meant, start="adapter", **more)


def trained(site: str, recipe: dict[str, Any], options: str, *meant: Way, **more: Any) -> Case:
    """What an export says of a run that the recipe's own lines have made so."""
    return Case(site, recipe, meant, **{"start": "model", "words": f"{TRAINED} {options}", "dear": True, **more})


OPTIONS = (
    of_run("cli/export_hf.py:export_hf", "--shard-size 5giga", {"--shard-size": "5GB"}, {"--shard-size": "500MB"},
        {"--shard-size": "4GiB"}, reading={"write 5GB, 500MB or 4GiB":
        "give --shard-size 5GB, or --shard-size 500MB or --shard-size 4GiB"}),
    of_run("cli/export_hf.py:_step", "--step last", {"--step": "newest"}, {"--step": "best"}, {"--step": "3"},
        reading={"write newest, best or a step, such as 500": "give --step newest, or --step best or --step 3"}),
    of_run("export/averages.py:Weights.parse", "--weights mean", {"--weights": "ema"}, MEAN,
        reading={"write ema, or mean:5": "give --weights ema, or --weights mean:2"}),
    of_run("export/averages.py:averaged_over: write", "--weights mean:4", {"--weights": "mean:3"}),
    of_adapter("export/plan.py:ExportOptions.check: add", "--base-model owner/name --output other",
        {"--adapter": "keep"}),
    of_adapter("export/plan.py:ExportOptions.check: leave out --base", "--base quantized --adapter keep",
        {"--base": None}),
    of_run("export/plan.py:is_done", "--dtype fp32", {"--output": "other"}, start="exported",
        reading={"another --output": "--output other"}),
    of_run("export/source.py:warn_of_better", "", {"--step": "best"}),
)  # fmt: skip
RUNS = (
    trained("export/averages.py:averaged_over: train", {"train.duration": "4 steps"}, "--weights mean:2",
        {"checkpoint.every": "2 steps", "checkpoint.keep": 2}),
    trained("export/source.py:resolve: , or", {"checkpoint.every": "1 steps"}, "--weights ema",
        {"ema.decay": 0.999}, MEAN),
    trained("export/source.py:resolve: train", {}, "--weights ema", {"ema.decay": 0.999}),
    trained("export/outputs.py:_require_untied", TIED, "", {"--adapter": "keep"}),
    trained("export/write.py:_new_tokens", {**RANDOM, **LORA, "tokenizer.add_tokens": ["<new>"]}, "--adapter keep",
        {"--adapter": "merge"}, change=family("phi")),
    trained("export/write.py:_by_weight", GLM, "--adapter keep", {"--adapter": "merge"}, change=mixture),
    trained("export/proof.py:prove", {**LORA, "model.quantize": "nf4"}, "--base original", {"--base": "quantized"},
        change=outliers),
    trained("export/plan.py:plan_export", {**LORA, **BASE}, "--adapter keep", {"--adapter": None}),
    trained("export/multimodal.py:Alone.__init__: export", {}, "--text-only", {"--text-only": None},
        change=pictures(False)),
    trained("export/plan.py:ExportOptions.check: leave out --adapter", LORA, "--text-only --adapter keep",
        {"--adapter": None}, change=pictures(True)),
    trained("cli/export_hf.py:_reported", {"optimizer.lr": 1e-6}, "--dtype bf16",
        {RUN: ["export-hf runs/r/checkpoints/step-2 --dtype fp32 --output runs/r/exports/step-2-kept"]},
        instead=True, onward=True),
)  # fmt: skip
CASES = (*OPTIONS, *RUNS)
