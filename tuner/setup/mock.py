"""The largest micro-batch there can be, before training: what does not fit into memory shows at once."""

import numpy as np
import torch

from tuner.data.batches import Batch, StepBatches
from tuner.errors import MemoryLimitError, is_out_of_memory
from tuner.runtime.console import Console
from tuner.setup.build import Assembly
from tuner.setup.less_memory import less_memory
from tuner.setup.settled import rows_at_once
from tuner.train.step import forward_backward


def mock_batch(assembly: Assembly, console: Console) -> None:
    """Run forward and backward on full rows of random tokens, all trained, and forget the gradients. Collective.

    The optimizer's state is there already, so this is a step's peak. Raises MemoryLimitError.
    """
    train_state = assembly.train_state
    batches = full_batches(assembly)
    n_tokens = len(batches.micro[0].input_ids)
    try:
        forward_backward(train_state, 0, batches)
        if train_state.step_config.device.type == "cuda":
            torch.cuda.synchronize(train_state.step_config.device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryLimitError(
            f"a micro-batch of {n_tokens:,} tokens does not fit into memory",
            hint=less_memory(assembly.resolved.recipe, assembly.mesh.size),
        ) from error
    finally:
        train_state.optimizer.zero_grad()
    console.debug(f"a full micro-batch of {n_tokens:,} tokens fits")


def full_batches(assembly: Assembly) -> StepBatches:
    """Full rows of random tokens, all trained, as a step has them.

    Two microbatches where several follow each other: gradients of the first are alive during the second.
    """
    recipe = assembly.resolved.recipe
    vocab_size = assembly.resolved.config.get_text_config().vocab_size
    rows, data_size = rows_at_once(recipe), assembly.mesh.data_size
    per_step = recipe.train.global_batch_size // (rows * data_size)
    batch = _full(assembly.prepared.train.max_length, rows, vocab_size)
    count = min(2, per_step)
    return StepBatches(np.empty(0, np.int64), 1, 0, [batch] * count, np.tile(batch.trained_per_document, count))


def _full(max_length: int, n_rows: int, vocab_size: int) -> Batch:
    n_tokens = max_length * n_rows
    input_ids = np.random.default_rng(0).integers(0, vocab_size, n_tokens, dtype=np.int64)
    return Batch(
        input_ids=input_ids,
        targets=np.roll(input_ids, -1),
        position_ids=np.tile(np.arange(max_length, dtype=np.int64), n_rows),
        lengths=(max_length,) * n_rows,
        trained_positions=np.arange(n_tokens, dtype=np.int64),
        documents=np.arange(n_rows, dtype=np.int64),
    )
