"""Small SentencePiece tokenizers in every form of file that published models have, built in the test."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.data import tiny
from tests.data.families import TEMPLATES

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
INST, TURNS, SPACES = (TEMPLATES[name] for name in ("inst", "turns", "spaces"))
_CORPUS = [*tiny.CORPUS, "[INST] hello [/INST] the answer </s> user: assistant: \u00e9t\u00e9 \u4e2d\u6587 12345"]


@cache
def model(kind: str = "bpe") -> bytes:
    """A SentencePiece model: `bpe` or `unigram`, with a token for each byte."""
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS * 20), model_writer=written, model_type=kind, vocab_size=360, byte_fallback=True,
        minloglevel=2, hard_vocab_limit=False, normalization_rule_name="identity", remove_extra_whitespaces=False,
        num_threads=1,
    )  # fmt: skip
    return written.getvalue()


@cache
def tokenizer_json(normalizes: bool = True) -> bytes:
    """tokenizer.json as transformers 4 made it of the model: with a normalizer, or with Metaspace (`always`)."""
    from transformers.convert_slow_tokenizer import import_protobuf
    from transformers.tokenization_utils_base import generate_merges

    proto: Any = import_protobuf().ModelProto()
    proto.ParseFromString(model())
    vocabulary = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    spec = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    spec["normalizer" if not normalizes else "pre_tokenizer"] = None
    merges = [" ".join(pair) for pair in generate_merges(vocabulary)]
    spec["model"] |= {"vocab": vocabulary, "merges": merges}
    return json.dumps(spec).encode()


def write(directory: Path, files: dict[str, bytes], model_type: str | None, **config: Any) -> Path:
    """A directory of these files, of tokenizer_config.json and, for a type of model, of config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    if config:
        files = {**files, "tokenizer_config.json": json.dumps(config).encode()}
    if model_type is not None:
        files = {**files, "config.json": json.dumps({"model_type": model_type}).encode()}
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory
