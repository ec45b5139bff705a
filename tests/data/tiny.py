"""A small ChatML tokenizer with a default system prompt and no generation markers, built in the test."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tuner.config.methods import PretrainMethod, SftMethod
from tuner.config.recipe import DataSection
from tuner.data.building.spec import PrepareSpec
from tuner.data.encoding.tokenizer import TextTokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "assistant user system You are helpful\n", "hello world, the answer is forty two\n\n", "def f(x):\n  return x"
]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@cache
def tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return str(tokenizer.to_str())


def files(template: str = CHATML, **config: Any) -> dict[str, bytes]:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>", **config,
    }
    return {
        "tokenizer.json": tokenizer_json().encode(), "tokenizer_config.json": json.dumps(settings).encode(),
        "chat_template.jinja": template.encode(),
    }


def tokenizer(template: str = CHATML, **config: Any) -> TextTokenizer:
    return TextTokenizer(files(template, **config))


def with_tokens(
    template: str = CHATML, special: Sequence[str] = (), plain: Sequence[str] = (), **config: Any
) -> TextTokenizer:
    """The tokenizer with further tokens: control tokens, and ordinary ones."""
    made = files(template, **config)
    spec = json.loads(made["tokenizer.json"])
    first = 1 + max(spec["model"]["vocab"].values())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"] += [
        {"id": first + i, "content": token, "special": i < len(special), **flags}
        for i, token in enumerate((*special, *plain))
    ]
    return TextTokenizer({**made, "tokenizer.json": json.dumps(spec).encode()})


def write_directory(directory: Path, template: str = CHATML, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files(template, **config).items():
        (directory / name).write_bytes(content)
    return directory


def chat(*contents: str, **extra: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)], **extra}


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Chats of different lengths, each another one."""
    return [chat(f"question {i}", f"answer {i}" + " very" * (i % 7)) for i in range(start, start + count)]


def write_rows(path: Path, written: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
    return path


def request(cache: Path, train: object, *, pretrain: bool = False, max_length: int = 64, **data: Any) -> PrepareSpec:
    seed, train_on, own = data.pop("seed", 1), data.pop("train_on", "assistant"), data.pop("tokenizer", None)
    method = PretrainMethod() if pretrain else SftMethod(train_on=train_on)
    section = DataSection.model_validate({"train": train if isinstance(train, (list, dict)) else str(train), **data})
    return PrepareSpec(section, method.examples, own or tokenizer(), max_length, seed, cache)
