"""The other side of bench_prepare.py: TRL's SFT preparation of one file, in a process of its own.

    python tools/bench_trl.py ROWS TOKENIZER MARKED_TEMPLATE MAX_LENGTH DIGESTS

Runs `SFTTrainer._prepare_dataset`, the function between raw messages and packed rows, as the trainer calls it with
`assistant_only_loss=True, packing=True`; no model is built. What is timed begins with reading the rows and ends with
the packed data set: importing TRL and loading the tokenizer are not counted, but in `process_cpu_s`. Prints one JSON
object; writes 16 bytes for each document to DIGESTS. Needs `trl`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.bench_digests import digests  # noqa: E402


def main() -> int:
    """Prepare, print the times, write the digests."""
    rows, tokenizer, template, max_length, out = sys.argv[1:]
    packed, figures = prepare(rows, tokenizer, Path(template).read_text(encoding="utf-8"), int(max_length))
    Path(out).write_bytes(documents(packed))
    print(json.dumps(figures))
    return 0


def prepare(rows: str, tokenizer: str, template: str, max_length: int) -> tuple[Any, dict[str, Any]]:
    """Return the packed data set and what it took: seconds of CPU, of the clock, and of CPU since the process began."""
    import datasets
    import trl
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    processing = AutoTokenizer.from_pretrained(tokenizer)
    processing.chat_template = template
    args = trl.SFTConfig(
        output_dir=os.devnull, assistant_only_loss=True, packing=True, max_length=max_length, dataset_num_proc=None,
        report_to=[], use_cpu=True, bf16=False,
    )
    trainer = object.__new__(trl.SFTTrainer)
    trainer._tokenizer = processing
    trainer.chat_template = None  # the tokenizer's own has the marks
    trainer.completion_only_loss = False
    cpu, wall = time.process_time(), time.perf_counter()
    raw = datasets.load_dataset("json", data_files=rows, split="train")
    packed = trainer._prepare_dataset(raw, processing, args, True, None, "train")
    figures = {
        "cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall, "process_cpu_s": time.process_time(),
        "trl": trl.__version__, "packed_rows": len(packed),
        "fill": sum(map(sum, packed["seq_lengths"])) / (len(packed) * max_length),
    }
    return packed, figures


def documents(packed: Any) -> bytes:
    """The digest of every document of the packed rows, sorted."""
    parts = []
    for batch in packed.with_format("arrow").iter(batch_size=1000):
        lengths = _flat(batch, "seq_lengths")
        ids, labels = _flat(batch, "input_ids"), _flat(batch, "labels")
        parts += digests(ids, labels != -100, np.concatenate([[0], np.cumsum(lengths)]))
    return b"".join(sorted(parts))


def _flat(batch: pa.Table, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    return pa.concat_arrays([chunk.flatten() for chunk in batch.column(name).chunks]).to_numpy().astype(np.int64)


if __name__ == "__main__":
    raise SystemExit(main())
