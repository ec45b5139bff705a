"""The padding of an exported reward model.

transformers scores, of each sequence of a batch, the last token that is not padding, whatever the attention mask says.
Training scores the last one: both are the same where no document ends with the token that pads.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PretrainedConfig

from tuner.errors import DataError, VerificationError
from tuner.export.source import ExportSource
from tuner.export.verify import Probes, compare, last_logits, recorded_probes, require_close
from tuner.export.weights import read_config
from tuner.export.write import token_ids, turn_ends
from tuner.model.attention import withdrawn
from tuner.rundir.layout import MODEL_CONFIG, TOKENIZER
from tuner.runtime.files import json_bytes, read_json, write_new

_UNUSED = ("pad", "unused", "reserved", "unk")
"""In names of tokens that no document ends with, the likeliest first."""


BATCHED = 1e-3
"""Of the largest score, for products of other shapes; the score of another token is another score."""


@dataclass(frozen=True)
class VocabularyPadding:
    """The token that fills up the sequences of a batch."""

    token: str
    id: int


def reward_padding(source: ExportSource) -> VocabularyPadding | None:
    """What the export of a reward model pads with; None too of a model that writes text."""
    if source.head == "tokens":
        return None
    probes = recorded_probes(source)
    return _padding_of(source, read_config(source), {prompt[-1] for prompt in probes.prompts} if probes else ())


def _padding_of(source: ExportSource, config: PretrainedConfig, last_ids: Collection[int]) -> VocabularyPadding | None:
    """The tokenizer's own padding, or the special token that is likeliest to end no document; None where all may.

    ``last_ids`` are what documents of training ended with. Raises DataError for a tokenizer that does not load.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            source.run_dir / TOKENIZER, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{source.run_dir / TOKENIZER}: transformers cannot load the tokenizer: {error}") from error
    generation = source.run_dir / MODEL_CONFIG / "generation_config.json"
    ends = {*last_ids, *token_ids(tokenizer.eos_token_id), *token_ids(getattr(config, "eos_token_id", None))}
    ends |= {*token_ids(read_json(generation).get("eos_token_id") if generation.is_file() else None)}
    ends |= {*turn_ends(tokenizer)}
    specials = {int(tokenizer.convert_tokens_to_ids(token)): str(token) for token in tokenizer.all_special_tokens}
    specials |= {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}

    def rank(id: int) -> tuple[bool, int, int]:
        named = [place for place, part in enumerate(_UNUSED) if part in specials[id].lower()]
        return id != tokenizer.pad_token_id, min(named, default=len(_UNUSED)), id

    fit = [id for id in specials if id not in ends and 0 <= id < config.get_text_config().vocab_size]
    return min((VocabularyPadding(specials[id], id) for id in fit), key=lambda found: rank(found.id), default=None)


def write_padding(directory: Path, config: PretrainedConfig, padding: VocabularyPadding | None) -> None:
    """Have config and tokenizer of an export pad with it, on the right; without one the config names none.

    The config is changed in place, the tokenizer's files in the directory. Raises VerificationError where transformers
    reads another token from them.
    """
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part.pad_token_id = None if padding is None else padding.id
    if padding is None:
        return
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        if path.is_file():
            facts = read_json(path) | {"pad_token": padding.token}
            path.unlink()
            write_new(path, json_bytes(facts | ({"padding_side": "right"} if name == "tokenizer_config.json" else {})))
    found: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if (found.pad_token_id, found.padding_side) != (padding.id, "right"):
        raise VerificationError(
            f"the exported tokenizer pads with {found.pad_token!r}, not {padding.token!r}; nothing was published"
        )


def require_batches(model: torch.nn.Module, probes: Probes, padding: VocabularyPadding) -> None:
    """Check that a loaded reward model scores a padded batch as each prompt alone. Raises VerificationError."""
    with withdrawn():
        alone, together = last_logits(model, probes.prompts), batch_scores(model, probes.prompts, padding)
    require_close(compare(alone, together), "a padded batch is scored otherwise", relative=BATCHED)


@torch.no_grad()
def batch_scores(model: torch.nn.Module, prompts: Sequence[Sequence[int]], padding: VocabularyPadding) -> torch.Tensor:
    """Scores ``[P, 1]`` in float32 of all prompts as one batch that is filled up with the padding."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[padding.id] * (longest - len(prompt))] for prompt in prompts])
    mask = torch.tensor([[1] * len(prompt) + [0] * (longest - len(prompt)) for prompt in prompts])
    scores: torch.Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return scores.float()
