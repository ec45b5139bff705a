"""ArcticTraining's recipes in their published forms: what they become, and that it trains."""

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import lines
from tuner.config.dump import flatten, recipe_dict
from tuner.config.imported import import_text
from tuner.config.load import load_recipe
from tuner.config.overrides import Override
from tuner.errors import RecipeError
from tuner.run.main import train
from tuner.run.options import LaunchOptions
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo

MODEL = "model: {name_or_path: ./model, dtype: fp32}\n"
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": (
        f"type: sft\nmicro_batch_size: 2\nepochs: 1\n{MODEL}"
        "data: {sources: [./rows.jsonl], max_length: 64}\n"
        "optimizer: {learning_rate: 1.0e-3}\nscheduler: {name: cosine, warmup_ratio: 0.05}\n",
        {"method.kind": "sft", "train.micro_batch_size": 2, "schedule.kind": "cosine", "schedule.warmup": "5%",
         "optimizer.lr": 1e-3, "data.max_length": 64, "optimizer.weight_decay": 0.1},
    ),
    "peft": (
        f"type: sft\nmicro_batch_size: 1\ngradient_accumulation_steps: 4\nseed: 7\n{MODEL}"
        "data:\n  sources:\n    - {type: huggingface, name_or_path: ./rows.jsonl, sample_ratio: 0.5, sample_seed: 3}\n"
        "  max_length: 64\n"
        "optimizer: {type: fused_adam, lr: 2e-4, betas: [0.9, 0.99]}\n",
        {"train.global_batch_size": 4, "seed": 7, "optimizer.betas": [0.9, 0.99], "optimizer.lr": 2e-4},
    ),
    "lora": (
        "type: sft\nmodel:\n  name_or_path: ./model\n  dtype: fp32\n"
        "  peft_config: {peft_type: LORA, r: 4, lora_alpha: 8, "
        "target_modules: [q_proj, v_proj]}\ndata: {sources: [./rows.jsonl], max_length: 64, pack_samples: true}\n"
        "train_iters: 8\nexit_iteration: 4\n",
        {"adapter.kind": "lora", "adapter.r": 4, "adapter.alpha": 8, "train.duration": "8 steps", "train.end_at": 4},
    ),
    "vera": (
        "type: sft\nmodel:\n  name_or_path: ./model\n  dtype: fp32\n"
        "  peft_config: {peft_type: VERA, r: 4, target_modules: [q_proj]}\n"
        "data: {sources: [./rows.jsonl], max_length: 64}\nmicro_batch_size: 1\n",
        {"adapter.kind": "peft", "adapter.config.peft_type": "VERA", "adapter.config.r": 4},
    ),
    "checkpoints": (
        f"type: sft\n{MODEL}"
        "data: {sources: [./rows.jsonl], train_eval_split: [0.9, 0.1], max_length: 64}\n"
        "eval_interval: 2\ncheckpoint:\n  - {type: deepspeed, output_dir: a, save_every_n_steps: 3}\n"
        "  - {type: huggingface, output_dir: b, save_end_of_training: true, save_every_n_epochs: 1}\n"
        "deepspeed: {zero_optimization: {stage: 3, offload_optimizer: {device: cpu}}}\n",
        {"data.eval": "10%", "eval.every": "2 steps", "checkpoint.every": "3 steps", "export.every": "1 epoch",
         "export.at_end": True, "parallel.shard": "full", "optimizer.offload": "host"},
    ),
    "causal": (
        f"type: causal\nmicro_batch_size: 1\nmin_iterations: 5\n{MODEL}"
        "data: {sources: [./texts.jsonl], max_length: 64}\nkill_switch_path: /nowhere/switch\nloss_log_interval: 5\n",
        {"method.kind": "pretrain", "train.duration": "5 steps", "train.stop_file": "/nowhere/switch",
         "logging.console_every": "5 steps"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_what_it_says(name: str) -> None:
    text, wanted = FILES[name]
    made = import_text(text, f"{name}.yml")
    assert made.tool == "arctictraining" and made.left == ()
    values = flatten(recipe_dict(made.recipe))
    assert {key: values.get(key) for key in wanted} == wanted
    assert made.recipe.data.train[0].seed == (3 if name == "peft" else None)


def two_steps(text: str, name: str, place: Path, **more: str) -> None:
    """Import a configuration and train two steps of it, in small."""
    trainings.prepare(place, 1, layers=1)
    (place / "texts.jsonl").write_text('{"text": "abababababab"}\n' * 40)
    (place / "made.yaml").write_text(import_text(text, name, directory=place).text)
    flags = {"tokenizer.name_or_path": "byte", "train.stop_after": "2 steps", "train.device": "cpu",
             "train.precision": "fp32", "eval.samples": "0", "train.compile": "false"} | more  # fmt: skip
    overrides = [Override(key, value) for key, value in flags.items()]
    loaded = load_recipe(place / "made.yaml", overrides, cwd=place)
    result = train(loaded, LaunchOptions(), RankInfo(), Console(main=False))
    steps = [line for line in lines(result.run_dir) if line["kind"] == "train"]
    assert len(steps) == 2 and all(line["loss"] > 0 for line in steps)


@pytest.mark.parametrize("name", FILES)
def test_what_it_becomes_trains(name: str, tmp_path: Path) -> None:
    on_gpu = {"optimizer.offload": "none"} if name == "checkpoints" else {}
    two_steps(FILES[name][0], f"{name}.yml", tmp_path, **on_gpu)


def test_a_trainer_of_its_own_is_refused() -> None:
    text = "type: mine\ncode: train.py\nmodel: {name_or_path: a/b}\ndata: {sources: [c/d]}\nmicro_batch_size: 1\n"
    with pytest.raises(RecipeError, match="a trainer of its own"):
        import_text(text, "r.yml")


def test_what_is_not_carried_over_is_said() -> None:
    text = FILES["sft"][0] + "enable_routing_replay: true\nmem_profiler: step\n"
    left = " ".join(import_text(text.replace("dtype: fp32", "attn_implementation: sdpa"), "r.yml").left)
    assert "enable_routing_replay" in left and "mem_profiler" in left and "attn_implementation" in left
    text = FILES["sft"][0] + "mem_profiler: e2e\nmem_profiler_max_entries: 5000\n"
    profile = import_text(text, "r.yml").recipe.profile
    assert (profile.memory, profile.entries) == ("all", 5000)
