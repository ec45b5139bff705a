"""Of each labelled answer, another document whose answer stands for one to another prompt: KTO's mismatched answers.

Kahneman-Tversky optimization (Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306) estimates how far the policy is
from the reference by answers that were given to other prompts. Which one a prompt gets follows from the data alone.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tuner.data.building.encoded import digest, record_batches
from tuner.data.prepared import PARTNERS_SCHEMA, arrow, view
from tuner.errors import DataError


def write_partners(documents: Path, path: Path) -> None:
    """Write the partner of each of a file's documents. DataError where all their prompts are equal."""
    found = partners(np.concatenate([np.empty((0, 2), dtype=np.uint64), *_prompts(documents)]))
    if found is None:
        split = documents.name.partition(".")[0]
        raise DataError(
            f"data.{split}: all rows have the same prompt, and none can lend its answer to another one",
            hint="add rows with other prompts, or remove the split",
        )
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, PARTNERS_SCHEMA) as writer:
        writer.write_batch(pa.record_batch([arrow(found)], schema=PARTNERS_SCHEMA))


def partners(prompts: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32] | None:
    """Return uint32[documents]: of each the next document, after the last one the first, that has another prompt.

    `prompts` are uint64[documents, 2], equal where the prompts are. None where all are.
    """
    count = len(prompts)
    changes = np.flatnonzero((prompts[1:] != prompts[:-1]).any(axis=1)) + 1
    if len(changes) == 0:
        return None
    first = 0 if (prompts[0] != prompts[-1]).any() else changes[0]
    following = np.append(changes, first)
    run = np.searchsorted(changes, np.arange(count), side="right")
    return following[run].astype(np.uint32)


def _prompts(documents: Path) -> Iterator[npt.NDArray[np.uint64]]:
    """uint64[documents of a record batch, 2]: what stands for each prompt's token ids."""
    for batch in record_batches(documents):
        lists = batch.column("input_ids")
        offsets, counts = view(lists.offsets).astype(np.int64), view(batch.column("prompt_tokens")).astype(np.int64)
        ids = view(lists.values)
        bounds = np.append(0, np.cumsum(counts))
        within = np.arange(bounds[-1]) - np.repeat(bounds[:-1], counts)
        yield digest(ids[np.repeat(offsets[:-1], counts) + within], bounds)
