"""What the card of a reward model says of its use."""

from __future__ import annotations

from tuner.export.source import Source
from tuner.rundir.layout import TOKENIZER
from tuner.runtime.files import read_json

_CHATS = '''question = {"role": "user", "content": "2 + 2?"}
chats = [[question, {"role": "assistant", "content": answer}] for answer in ("4", "5")]
texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]'''
_TEXTS = '''texts = ["2 + 2 = " + answer + tokenizer.eos_token for answer in ("4", "5")]'''
_BATCH = [
    'batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")',
    "scores = model(**batch).logits[:, 0]",
]
_ONE_BY_ONE = [
    'each = [tokenizer(text, add_special_tokens=False, return_tensors="pt") for text in texts]',
    "scores = [model(**one).logits[0, 0] for one in each]",
]
_MEANING = (
    "A score is that of the last token, so a text ends as in training, and nothing is cut off its end. Differences "
    "between answers to one prompt have a meaning: the logistic function of one is the probability that the first "
    "answer is preferred."
)
_NO_PADDING = (
    "Its tokenizer has no token to pad with that no text ends with: score texts one at a time, without `padding`."
)


def scoring(source: Source, is_adapter: bool, vocabulary: int | None, is_padded: bool) -> list[str]:
    """How to load it and to score answers; an adapter with new tokens needs a base with room for this vocabulary."""
    lines = ["```python"]
    lines += ["from peft import PeftModel"] if is_adapter else []
    lines += ["from transformers import AutoModelForSequenceClassification, AutoTokenizer", ""]
    lines += ["tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)"]
    if is_adapter:
        lines += ["base = AutoModelForSequenceClassification.from_pretrained(BASE_MODEL, num_labels=1)"]
        lines += [] if vocabulary is None else [f"base.resize_token_embeddings({vocabulary})"]
        lines += ["base.config.pad_token_id = tokenizer.pad_token_id  # transformers scores the token before padding"]
        lines += ["model = PeftModel.from_pretrained(base, DIRECTORY)"]
    else:
        lines += ["model = AutoModelForSequenceClassification.from_pretrained(DIRECTORY)"]
    lines += [_CHATS if _has_template(source) else _TEXTS]
    lines += _BATCH if is_padded else _ONE_BY_ONE
    return [*lines, "```", "", _MEANING, *([] if is_padded else ["", _NO_PADDING])]


def _has_template(source: Source) -> bool:
    directory = source.run_dir / TOKENIZER
    if (directory / "chat_template.jinja").is_file():
        return True
    config = directory / "tokenizer_config.json"
    return config.is_file() and bool(read_json(config).get("chat_template"))
