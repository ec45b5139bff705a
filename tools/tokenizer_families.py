"""Tokenizers of many families as model directories: their files in every form, with the chat templates of their models.

The files come from tools/fetch_assets.py --campaign; small SentencePiece and WordPiece models are trained on its chats.
"""

import base64
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.tables import beside

TEMPLATES = Path(__file__).parent / "chat_templates"


@dataclass(frozen=True)
class Family:
    """One tokenizer of a model: where its files come from and in which form they are."""

    name: str
    asset: str
    """A directory of the assets, or one of MADE: a small model, trained on the chats or converted."""
    kind: str
    """byte-level BPE, SentencePiece BPE, SentencePiece Unigram or WordPiece."""
    model_type: str
    template: str | None = None
    """Which of the templates; None takes the asset's own. `spaced` begins and ends with spaces and writes two BOS."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of tokenizer_config.json; a value of None removes one."""
    model_file: str | None = None
    """The SentencePiece model among the asset's files; the directory then has no tokenizer.json."""
    named: str = "tokenizer.model"
    """The name that the class gives the model's file."""
    tokens: tuple[str, ...] = ()
    """Tokens added to the vocabulary; they take white space that follows, where `rstrip`."""
    rstrip: bool = False
    end: str | None = None
    """The token that ends an answer, where that is not the eos_token and the template does not say it."""
    needs: str | None = None
    """A package that transformers needs for these files."""
    refused: str = ""
    """Words of the reason for which they are refused."""
    rewritten: bool = False
    """Whether transformers wrote the directory: loaded and saved again."""

    @property
    def form(self) -> str:
        """Which files the directory has."""
        if self.rewritten:
            return "tokenizer.json, saved by transformers 5"
        return self.named if self.model_file else "vocab.json, merges.txt" if self.asset == "gpt2" else "tokenizer.json"

    @property
    def answer_end(self) -> str | None:
        """The token that ends an answer; None for the eos_token."""
        return self.end or _ENDS.get(self.template or "")


_ENDS = {"chatml": "<|im_end|>", "gemma": "<end_of_turn>", "phi3": "<|end|>"}
FAMILIES = tuple(Family(**one) for one in beside(__file__))


def write_family(family: Family, assets: Path, directory: Path, corpus: Callable[[], list[str]]) -> None:
    """Write the model directory of a family: its tokenizer's files, its template and the config of a tiny model.

    `corpus` gives the texts on which the small SentencePiece models are trained.
    """
    directory.mkdir(parents=True, exist_ok=True)
    source = (directory.parent if family.asset in MADE else assets) / family.asset
    if family.asset in MADE and not source.is_dir():
        source.mkdir()
        MADE[family.asset](source, corpus, assets)
    names = [family.model_file] if family.model_file else ["tokenizer.json", "vocab.json", "merges.txt"]
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / (family.named if family.model_file else name))
    own = source / "tokenizer_config.json"
    config = json.loads(own.read_text(encoding="utf-8")) if own.is_file() and not family.model_file else {}
    config = {key: value for key, value in {**config, **family.config}.items() if value is not None}
    if family.template is not None:
        config["chat_template"] = (TEMPLATES / f"{family.template}.jinja").read_text(encoding="utf-8")
    if family.tokens:
        _add_tokens(family, directory / "tokenizer.json", config)
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps({"model_type": family.model_type}), encoding="utf-8")
    if family.refused:
        return
    if family.rewritten:
        _rewrite(directory)
    (directory / "config.json").write_text(json.dumps(_tiny(family.model_type, _size(directory))), encoding="utf-8")


def _sentencepiece(kind: str, prefix: bool) -> Callable[[Path, Callable[[], list[str]], Path], None]:
    def made(directory: Path, corpus: Callable[[], list[str]], assets: Path) -> None:
        train_sentencepiece(directory / "spm", kind, corpus(), prefix=prefix)

    return made


def _wordpiece(directory: Path, corpus: Callable[[], list[str]], assets: Path) -> None:
    """Train WordPiece on texts, as BERT's without lower case, and write vocab.txt."""
    from tokenizers import BertWordPieceTokenizer

    trained = BertWordPieceTokenizer(lowercase=False)
    trained.train_from_iterator(corpus(), vocab_size=8000, show_progress=False)
    trained.save_model(str(directory))


def _tiktoken(directory: Path, corpus: Callable[[], list[str]], assets: Path) -> None:
    """Write GPT-2's vocabulary as tiktoken has it: a line for each token, its bytes in base64 and its rank."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    bytes_of = {char: byte for byte, char in bytes_to_unicode().items()}
    vocabulary: dict[str, int] = json.loads((assets / "gpt2" / "vocab.json").read_text(encoding="utf-8"))
    tokens = [token for token, _ in sorted(vocabulary.items(), key=lambda item: item[1]) if token != "<|endoftext|>"]
    lines = (base64.b64encode(bytes(bytes_of[c] for c in token)) + b" %d" % i for i, token in enumerate(tokens))
    (directory / "gpt.model").write_bytes(b"\n".join(lines) + b"\n")


MADE: dict[str, Callable[[Path, Callable[[], list[str]], Path], None]] = {
    "bpe": _sentencepiece("bpe", True), "bpe-bare": _sentencepiece("bpe", False),
    "unigram": _sentencepiece("unigram", True), "unigram-bare": _sentencepiece("unigram", False),
    "wordpiece": _wordpiece, "tiktoken": _tiktoken,
}
"""What is made where it is needed, from the chats or another asset; `bare`: no space is put before a text."""


def train_sentencepiece(path: Path, kind: str, texts: list[str], size: int = 4000, prefix: bool = True) -> None:
    """Train a SentencePiece model on texts and write PATH.model; with `prefix` a space is put before each text."""
    from sentencepiece import SentencePieceTrainer

    path.parent.mkdir(parents=True, exist_ok=True)
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(path), model_type=kind, vocab_size=size, byte_fallback=True,
        character_coverage=0.999, minloglevel=2, hard_vocab_limit=False, max_sentence_length=20_000, num_threads=1,
        add_dummy_prefix=prefix, remove_extra_whitespaces=False, normalization_rule_name="identity",
    )  # fmt: skip


def _add_tokens(family: Family, path: Path, config: dict[str, Any]) -> None:
    """Add the family's tokens to tokenizer.json and, as published models do, to the config's list of added ones."""
    spec = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = spec["model"]["vocab"]
    there = {token["content"] for token in spec["added_tokens"]}
    first = 1 + max([*vocabulary.values(), *(token["id"] for token in spec["added_tokens"])])
    for token in family.tokens:
        if token in there:
            continue
        flags = {"single_word": False, "lstrip": False, "rstrip": family.rstrip, "normalized": False, "special": True}
        number = vocabulary.get(token, first)
        first += number == first
        spec["added_tokens"].append({"id": number, "content": token, **flags})
        if "added_tokens_decoder" in config:
            config["added_tokens_decoder"][str(number)] = {"content": token, **flags}
    path.write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")


def _rewrite(directory: Path) -> None:
    """Let transformers load and save the directory's tokenizer, and keep only what it wrote."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)  # type: ignore[no-untyped-call]
    for path in directory.iterdir():
        if path.name != "config.json":
            path.unlink()
    tokenizer.save_pretrained(directory)


def _size(directory: Path) -> int:
    """Rows of embeddings for every id."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)  # type: ignore[no-untyped-call]
    return 1 + max(tokenizer.get_vocab().values())


def _tiny(model_type: str, size: int) -> dict[str, Any]:
    if model_type == "gpt2":
        return {"model_type": "gpt2", "vocab_size": size, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 1024}
    config = {
        "model_type": model_type, "vocab_size": size, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if model_type == "phi3":
        config["original_max_position_embeddings"] = 1024
    return config
