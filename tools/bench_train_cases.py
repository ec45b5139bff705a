"""What bench_train.py trains on: models, rows, and the arithmetic of a step."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.tables import beside


@dataclass(frozen=True)
class Case:
    """One comparison: a model shape or directory, how it is trained, rows of `max_length` tokens, `rows` a step."""

    name: str
    shape: dict[str, Any] | None
    """A config to be filled with random weights, of a Qwen3 unless it names a type; None: the directory of --model."""
    lora: bool
    rows: int
    max_length: int
    steps: int
    goals: tuple[float, float]
    """How many times faster than TRL's defaults, and than its best configuration."""
    padded: bool = False
    """Whether the peer gets the documents of a row as a padded batch: its own packed rows would not be the same work,
    for they carry the state of one document into the next."""


_TABLE: dict[str, Any] = beside(__file__)
CASES = {
    name: Case(name, **{**fields, "shape": _TABLE["shapes"].get(fields.get("shape"))})
    for name, fields in _TABLE["cases"].items()
}


def write_model(shape: dict[str, Any], directory: Path) -> None:
    """A model of this shape with random float32 weights, and a tokenizer of as many words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{"model_type": "qwen3", **shape})
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(shape["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w2").save_pretrained(directory)


def write_rows(path: Path, vocab: int, max_length: int, rows: int, seed: int) -> None:
    """Documents of random ids that fill `rows` rows exactly: 2 to 8 of uneven length in each."""
    generator = random.Random(seed)
    with path.open("w", encoding="utf-8") as out:
        for _ in range(rows):
            cuts = sorted(generator.sample(range(8, max_length - 8), generator.randint(1, 7)))
            for start, end in zip([0, *cuts], [*cuts, max_length], strict=True):
                # A few words make most of the text, as in real text; uniform ids would leave nothing to learn.
                ids = [min(vocab - 1, 3 + int(generator.paretovariate(0.4))) for _ in range(end - start)]
                out.write(json.dumps({"input_ids": ids}) + "\n")


def packed_rows(prepared: Path) -> list[dict[str, list[int]]]:
    """The rows that the command trains on, in their order: token ids and document lengths."""
    from tuner.data.prepared import open_prepared

    rows = open_prepared(prepared).train
    return [{"input_ids": row.input_ids.tolist(), "seq_lengths": row.lengths.tolist()} for row in rows]


def flops_per_step(model: Path, lora: bool, rows: Sequence[dict[str, list[int]]]) -> float:
    """Arithmetic of a training on `rows`, in full or with LoRA of rank 16 on every linear layer (tuner.model.flops)."""
    import torch
    from transformers import AutoConfig

    from tuner.model.adapter import LoraSpec, add_lora
    from tuner.model.build import meta_model
    from tuner.model.flops import training_flops

    on_meta = meta_model(AutoConfig.from_pretrained(model), torch.float32)
    if lora:
        add_lora(on_meta, LoraSpec(16, 32.0, 0.0, "all-linear"), seed=0)
    flops = training_flops(on_meta)
    return sum(flops.of(row["seq_lengths"], len(row["input_ids"])) for row in rows)
