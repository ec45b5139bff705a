"""The largest micro-batch there can be, before training: what does not fit into memory shows at once."""

import numpy as np
import torch

from tuner.config.methods import Examples
from tuner.data.batches import IGNORED, Batch, StepBatches, step_of
from tuner.errors import MemoryLimitError
from tuner.model.row_layout import Route
from tuner.runtime.console import Console
from tuner.setup.build import Assembly
from tuner.setup.less_memory import less_memory, memory_errors_as
from tuner.train.step import forward_backward


def mock_batch(assembly: Assembly, console: Console) -> None:
    """Run forward and backward on full rows of random tokens and forget the gradients. Collective.

    The optimizer's state is there already, so this is a step's peak. Raises MemoryLimitError.
    """
    train_state = assembly.train_state
    batches = full_batches(assembly, assembly.batches.micro_batch_size)
    n_tokens = len(batches.micro[0].input_ids)
    it, hint = f"micro-batch of {n_tokens:,} tokens", less_memory(assembly.resolved, assembly.mesh.size)
    try:
        with memory_errors_as(lambda error: MemoryLimitError(f"a {it} does not fit into memory", hint=hint)):
            forward_backward(train_state, 0, batches)
            if train_state.step_config.device.type == "cuda":
                torch.cuda.synchronize(train_state.step_config.device)
    finally:
        train_state.optimizer.zero_grad()
    console.debug(f"a full {it} fits")


def full_batches(assembly: Assembly, rows: int) -> StepBatches:
    """Full rows of random tokens as a step has them, so many in a micro-batch.

    Two microbatches where several follow each other: gradients of the first are alive during the second.
    """
    recipe = assembly.resolved.recipe
    vocab_size = assembly.resolved.config.get_text_config().vocab_size
    per_step = recipe.train.global_batch_size // (rows * assembly.mesh.data_size)
    examples, longest, route = recipe.method.examples, assembly.prepared.train.max_length, assembly.resolved.route
    batch = full_rows(examples, longest, rows, vocab_size, route)
    method = assembly.train_state.method
    return step_of([method.made_up(batch)] * min(2, per_step), method.mismatched)


def full_rows(examples: Examples, max_length: int, n_rows: int, vocab_size: int, route: Route = "flat") -> Batch:
    """A micro-batch of rows with one example each, of documents as long as can be: random tokens, all of them trained
    that have a next one.

    Where documents go through the model as a batch, they are of the lengths that fill up most of it: three quarters of
    a row and the rest of it.
    """
    parts = [len(part) for part in np.array_split(np.arange(max_length), examples.documents)]
    if route == "batch" and max_length >= 4:
        parts = [3 * max_length // 4, max_length - 3 * max_length // 4]
    lengths = parts * n_rows
    n_tokens = sum(lengths)
    ids = np.random.default_rng(0).integers(0, vocab_size, n_tokens, dtype=np.int64)
    targets = np.roll(ids, -1)
    targets[np.cumsum(lengths) - 1] = IGNORED
    return Batch(
        input_ids=ids, targets=targets,
        position_ids=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]), lengths=tuple(lengths),
        trained_positions=np.flatnonzero(targets != IGNORED), documents=np.arange(len(lengths), dtype=np.int64),
    )
