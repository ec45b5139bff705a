"""The padding of an exported reward model.

transformers scores, of each sequence of a batch, the last token that is not padding, whatever the attention mask says.
Training scores the last one: both are the same where no document ends with the token that pads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from tuner.export.source import ExportSource
from tuner.export.verify import Probes, compare, last_logits, not_published, recorded_probes, require_close
from tuner.export.weights import read_config
from tuner.export.write import ends_of, generation_in, load_tokenizer
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
    """What the export of a reward model pads with; None too of a model that writes text.

    It is the tokenizer's own padding, or the special token that is likeliest to end no document, by the run's probes;
    None where all may. Raises DataError for a tokenizer that does not load.
    """
    if source.head == "tokens":
        return None
    probes, config = recorded_probes(source), read_config(source)
    tokenizer, generation = load_tokenizer(source.run_dir / TOKENIZER), generation_in(source.run_dir / MODEL_CONFIG)
    ends = {prompt[-1] for prompt in (probes.prompts if probes else ())}
    ends |= {*ends_of(tokenizer, generation.get("eos_token_id"), getattr(config, "eos_token_id", None))}
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
    found = load_tokenizer(directory)
    if (found.pad_token_id, found.padding_side) != (padding.id, "right"):
        raise not_published(f"the exported tokenizer pads with {found.pad_token!r}, not {padding.token!r}")


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
