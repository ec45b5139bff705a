"""Loss and sample answers on held-out documents."""

import sys

import torch
import torch.distributed as dist

from tuner.data.batches import GlobalBatches
from tuner.data.prepared import PackedRows, Sample
from tuner.model.decode import greedy
from tuner.parallel.fsdp import sync_gradients
from tuner.train.step import Learner, microbatch_loss


@torch.no_grad()
def evaluate(learner: Learner, rows: PackedRows, micro_batch_size: int, max_rows: int | None, world_size: int) -> float:
    """Mean loss in nats per trained token over the held-out rows, every process taking its share. Collective."""
    learner.root.eval()
    per_pass = micro_batch_size * world_size
    batches = GlobalBatches(
        rows,
        seed=0,
        shuffle=False,
        global_batch_size=per_pass,
        micro_batch_size=micro_batch_size,
        rank=learner.numerics.rank,
        world_size=world_size,
        max_rows=max_rows,
    )
    sums = torch.zeros(2, dtype=torch.float64, device=learner.numerics.device)
    sync_gradients(learner.root, True)
    for index in range(batches.steps_per_epoch):
        for batch in batches.step(index).micro:
            sums[0] += microbatch_loss(learner.root, batch, learner.numerics)
            sums[1] += len(batch.trained_positions)
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss_sum, count = sums.tolist()
    return float(loss_sum / max(1.0, count))


def answer_samples(learner: Learner, samples: list[Sample], eos_ids: list[int], max_new_tokens: int) -> list[list[int]]:
    """Greedy answers, as token ids, to held-out prompts. Collective: every rank decodes the same prompts.

    An answer ends at an end token, after ``max_new_tokens``, or at the model's last position.
    """
    learner.root.eval()
    config = learner.root.model.config.get_text_config()
    max_positions = getattr(config, "max_position_embeddings", None) or sys.maxsize
    with learner.numerics.autocast():
        return [
            greedy(
                learner.root,
                sample.prompt_ids,
                eos_ids,
                min(max_new_tokens, max(0, max_positions - len(sample.prompt_ids))),
                learner.numerics.device,
            )
            for sample in samples
        ]
