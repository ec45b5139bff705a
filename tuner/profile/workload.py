"""The rows that a step is predicted for: the fullest of those that are prepared, or full ones where none are."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from tuner.config.chat_templates import CHAT_TEMPLATES
from tuner.config.methods import Examples
from tuner.config.recipe import Recipe
from tuner.data.batches import Batch, StepBatches, collate, step_of
from tuner.data.building.prepare import find_prepared
from tuner.data.building.spec import prepare_spec
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.prepared import PackedRows, PreparedData, open_prepared
from tuner.errors import TunerError
from tuner.model.apart import computed_tokens, forwards_of
from tuner.model.row_layout import Route
from tuner.runtime.dist import RankInfo
from tuner.setup.mock import full_rows
from tuner.setup.resolve import Resolved, method_section
from tuner.setup.settled import data_processes, rows_at_once
from tuner.setup.specs import task_sections
from tuner.train.evaluate import MAX_ANSWER_TOKENS, answer_limits
from tuner.train.methods.method import build_method

TRACED = 2
"""Microbatches of a step that are traced: all after the second are like it."""
_LOOKED_AT = 1024
"""Rows of which it is counted what filling up documents adds."""


@dataclass(frozen=True)
class Workload:
    """The fullest step of a recipe, one evaluated microbatch where there are held-out rows, and what was assumed."""

    batches: StepBatches
    held_out: Batch | None
    tokens_per_row: float
    """Of a mean row."""
    prepared: PreparedData | None
    samples: tuple[tuple[int, int], ...]
    """Tokens of each prompt that is answered at an evaluation, and the most that its answer may have."""
    assumptions: tuple[str, ...]
    extra_forwards: int = 0
    """Forwards without gradients that the method takes of each microbatch besides the one that is trained."""


def workload(recipe: Recipe, resolved: Resolved, rank_info: RankInfo, directory: Path | None = None) -> Workload:
    """What a step of a recipe, and of what it is resolved to, is made of; data that are prepared are looked at, and
    nothing is prepared.

    They are in `directory`, where that is known; else their place follows from the sources, which are hashed.
    """
    config, max_length, answers = resolved.config, resolved.max_length, task_sections(resolved).eval.samples
    method = build_method(method_section(resolved))
    n_rows = rows_at_once(recipe.train)
    together = n_rows * data_processes(recipe.parallel, rank_info.world_size)
    count = min(TRACED, -(-recipe.train.global_batch_size // together))
    if (found := prepared_for(recipe, directory)) is None:
        examples = recipe.method.examples
        vocab_size = config.get_text_config().vocab_size
        batch = method.made_up(full_rows(examples, max_length, n_rows, vocab_size, resolved.route))
        held_out = None if recipe.data.eval is None else batch
        of_row = "one document" if examples.documents == 1 else f"{examples.documents} documents together"
        assumed = [f"the data is not prepared: every row is assumed to be {of_row} of {max_length:,} trained tokens"]
        samples = () if held_out is None else _assumed_samples(examples, answers, max_length)
        if samples:
            assumed.append(f"sample answers run to the end of a row: {len(samples)} of {samples[0][1]} tokens")
        step, extra = step_of([batch] * count, method.mismatched), method.extra_forwards
        return Workload(step, held_out, float(max_length), None, samples, tuple(assumed), extra)
    prepared, tokenizer = found
    batch = method.made_up(fullest(prepared.train, n_rows, resolved.route))
    held_out = None if prepared.eval is None else method.made_up(fullest(prepared.eval, n_rows, resolved.route))
    mean = float(prepared.train.tokens_per_row.mean())
    which = "longest" if n_rows == 1 else f"{n_rows:,} longest"
    rows = f"every micro-batch holds the {which} of the {len(prepared.train):,} prepared rows"
    asked = prepared.samples[:answers]
    limits = answer_limits(asked, tokenizer, config)
    samples = tuple((len(sample.prompt_ids), limit) for sample, limit in zip(asked, limits, strict=True))
    step = step_of([batch] * count, method.mismatched)
    return Workload(step, held_out, mean, prepared, samples, (rows,), method.extra_forwards)


def added_ids(recipe: Recipe, config: PretrainedConfig) -> tuple[range, tuple[str, ...]]:
    """The ids of the tokens that a recipe adds, and what was assumed of them where its tokenizer is not here."""
    if not recipe.tokenizer.add_tokens and recipe.tokenizer.chat_template not in CHAT_TEMPLATES:
        return range(0), ()
    try:
        spec = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
        return spec.tokenizer.new_ids, ()
    except (TunerError, OSError):
        size, count = config.get_text_config().vocab_size, len(recipe.tokenizer.add_tokens)
        if not count:
            return range(0), ("the tokenizer is not here: it is assumed to have the chat template's tokens",)
        return range(size, size + count), (f"the tokenizer is not here: all of {count:,} added tokens are new to it",)


def _assumed_samples(examples: Examples, count: int, max_length: int) -> tuple[tuple[int, int], ...]:
    """Answers as long as can be, to prompts that fill the rest of a row."""
    if examples.kind == "pretrain":
        return ()
    answer = min(MAX_ANSWER_TOKENS, max(1, max_length - 1))
    return ((max(1, max_length - answer), answer),) * count


def prepared_for(recipe: Recipe, directory: Path | None) -> tuple[PreparedData, TextTokenizer] | None:
    """The prepared data of a recipe where they are there; None too where the sources or the tokenizer are not."""
    try:
        spec = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
        found = directory or find_prepared(spec)
    except (TunerError, OSError):
        return None
    return None if found is None else (open_prepared(found), spec.tokenizer)


def fullest(rows: PackedRows, n_rows: int, route: Route = "flat") -> Batch:
    """The longest rows as one microbatch; where as long, those with the most trained tokens.

    Of those whose documents go through the model as a batch, the ones of the longest with which most is computed.
    """
    order = np.lexsort((rows.trained_per_row, rows.tokens_per_row))[::-1]
    if route == "batch":
        order = np.array(sorted(order[:_LOOKED_AT], key=lambda i: -_computed(rows, int(i))))
    return collate([rows.row(int(i)) for i in order[:n_rows]])


def _computed(rows: PackedRows, i: int) -> int:
    """Tokens that are computed for a row whose documents go through the model as a batch."""
    lengths = rows.row(i).lengths.tolist()
    return computed_tokens(lengths, forwards_of(lengths, "batch"))
