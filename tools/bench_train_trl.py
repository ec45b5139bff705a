"""The other side of bench_train.py: TRL's SFTTrainer on rows that are packed already, in a process of its own.

    python tools/bench_train_trl.py JOB.json

The job names the model, the rows, the settings of `SFTConfig` and the number of steps. Rows come in the file's order.
A step is timed from the end of the one before to its own end, data included. Prints one JSON object. Needs `trl`.
Where the job says `padded`, each document of a row is one of a padded batch.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    """Train, print times and losses."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import datasets
    import torch
    import trl
    from peft import LoraConfig
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    losses: list[torch.Tensor] = []
    ends: list[float] = []

    class InOrder(trl.SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

        def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
            loss = super().training_step(*args, **options)
            losses.append(loss.detach().clone())
            return loss

    class Clock(trl.trainer.sft_trainer.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **options: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *args: Any, **options: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    rows = datasets.Dataset.from_list(json.loads(Path(job["rows"]).read_text(encoding="utf-8")))
    settings = trl.SFTConfig(
        output_dir=job["output_dir"], packing=not job["padded"], dataset_kwargs={"skip_prepare_dataset": True},
        report_to=[], save_strategy="no", disable_tqdm=True, max_steps=job["steps"],
        **({"remove_unused_columns": False} if job["padded"] else {}), **job["settings"],
    )

    def padded(given: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        whole = [torch.tensor(row["input_ids"]).split(row["seq_lengths"]) for row in given]
        ids = [document for row in whole for document in row]
        labels = [torch.cat([torch.tensor([-100]), document[1:]]) for document in ids]  # the first one is not predicted
        pad = torch.nn.utils.rnn.pad_sequence
        mask = pad([torch.ones_like(document) for document in ids], True)
        return {"input_ids": pad(ids, True), "attention_mask": mask, "labels": pad(labels, True, -100)}

    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = InOrder(
        model=job["model"], args=settings, train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(job["model"]), peft_config=lora if job["lora"] else None,
        callbacks=[Clock()], **({"data_collator": padded} if job["padded"] else {}),
    )
    trainer.train()
    done = time.perf_counter()
    cuda = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report = {
        "step_s": [b - a for a, b in zip(ends, ends[1:], strict=False)], "loop_s": done - ends[0],
        "loss": [loss.item() for loss in losses], "peak_gib": peak / 2**30,
        "versions": {"trl": trl.__version__, "torch": torch.__version__},
        "weights": str(next(trainer.model.parameters()).dtype), "recompute": bool(settings.gradient_checkpointing),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
