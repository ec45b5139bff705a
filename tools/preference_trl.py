"""The other side of preference_vs_trl.py and bench_dpo.py: TRL's trainers on rows that are token ids already.

    python tools/preference_trl.py JOB.json

The job names the model, the rows, and runs, each with its trainer (dpo, orpo, cpo, kto, reward), the settings of that
trainer's config, and the number of steps. Rows come in the file's order and are not tokenized again: of a pair
`prompt_ids`, `chosen_ids` and `rejected_ids`, of an unpaired row `prompt_ids`, `completion_ids`, `label`, and
`KL_completion_ids`, which a run with `partners` takes in place of TRL's own choice. A step is timed from the end of the
one before to its own end, data included. Prints one JSON object. Needs `trl`.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

SAME: dict[str, Any] = {
    "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 10**6, "use_cpu": True,
}


def main() -> int:
    """Train every run, print times and losses."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import datasets
    import torch
    import trl

    datasets.disable_progress_bars()
    found = {run["name"]: train(job, run) for run in job["runs"]}
    print(json.dumps({"runs": found, "versions": {"trl": trl.__version__, "torch": torch.__version__}}))
    return 0


def train(job: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """One run: its losses, the seconds of its steps and of all that training needs, and the peak of the process."""
    import datasets
    import torch
    from transformers import AutoTokenizer, TrainerCallback

    losses: list[torch.Tensor] = []
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **options: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *args: Any, **options: Any) -> None:
            ends.append(time.perf_counter())

    trainer_class, config_class = trainer_of(run, losses)
    items = json.loads(Path(run["rows"]).read_text(encoding="utf-8"))
    steps = {"max_steps": run["steps"]} if "steps" in run else {}
    settings = config_class(output_dir=job["output_dir"], **{**SAME, **steps, **run["settings"]})
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.pad_token = "<|endoftext|>"  # ends no row: transformers scores the token before the first one of padding
    start = time.perf_counter()
    trainer = trainer_class(
        model=model_of(run.get("model", job["model"]), run["trainer"]), args=settings,
        train_dataset=datasets.Dataset.from_list(items), processing_class=tokenizer,
        peft_config=lora(run["lora"]) if run.get("lora") else None, callbacks=[Clock()],
    )
    trainer.train()
    accumulated = settings.gradient_accumulation_steps
    values = [loss.item() for loss in losses]
    return {
        "loss": [sum(values[i : i + accumulated]) for i in range(0, len(values), accumulated)],
        "step_s": [b - a for a, b in zip(ends, ends[1:], strict=False)], "whole_s": ends[-1] - start,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30,
        "recompute": bool(settings.gradient_checkpointing), "bf16": bool(settings.bf16),
    }


def lora(options: dict[str, Any]) -> Any:
    """The adapter's configuration."""
    from peft import LoraConfig

    return LoraConfig(**options)


def model_of(path: str, trainer: str) -> Any:
    """A path where the trainer loads both models itself, as a user's script has it; else the loaded model."""
    if trainer in {"dpo", "kto", "reward"}:
        return path
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def trainer_of(run: dict[str, Any], losses: list[Any]) -> tuple[Any, Any]:
    """A trainer of TRL that takes ids as they are, in the file's order, and keeps the loss of every micro-batch."""
    from torch.utils.data import SequentialSampler

    kind = run["trainer"]
    base, config = classes(kind)

    class AsGiven(base):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

        def training_step(self, *args: Any, **options: Any) -> Any:
            loss = super().training_step(*args, **options)
            losses.append(loss.detach().clone())
            return loss

        def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, name: str) -> Any:
            if kind == "kto" and not self.calculate_KL:
                return dataset.remove_columns("KL_completion_ids")
            if kind == "kto" and not run["partners"]:
                return dataset.map(rotated, batched=True, batch_size=args.per_device_train_batch_size)
            return dataset

        def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
            return labelled(feature, bool(run.get("answers_only")))

    return AsGiven, config


def classes(kind: str) -> tuple[Any, Any]:
    """The trainer and its configuration."""
    import trl

    if kind == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer, ORPOConfig
    if kind == "cpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return CPOTrainer, CPOConfig
    return {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
    }[kind]


def rotated(examples: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """As KTOTrainer does: the answers of a block move one place on, so that none is at its own prompt."""
    answers = examples["completion_ids"]
    return {**examples, "KL_completion_ids": [answers[-1], *answers[:-1]]}


def labelled(feature: dict[str, Any], answers_only: bool) -> dict[str, Any]:
    """As ORPOTrainer and CPOTrainer make of texts: both sequences with their labels, the prompt without.

    With `answers_only` the mask of the prompt is 2, which is attended to as 1 is, and which ORPOTrainer's cross-entropy
    leaves out.
    """
    prompt = feature["prompt_ids"]
    found: dict[str, Any] = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
    for name in ("chosen", "rejected"):
        answer = feature[f"{name}_ids"]
        found[f"{name}_input_ids"] = prompt + answer
        found[f"{name}_attention_mask"] = [2 if answers_only else 1] * len(prompt) + [1] * len(answer)
        found[f"{name}_labels"] = [-100] * len(prompt) + answer
    return found


if __name__ == "__main__":
    raise SystemExit(main())
