"""A run's tokenizer, and whether the model has an embedding for each of its ids."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.data import tiny
from tuner.config.recipe import TokenizerSection
from tuner.data.encoding.tokenizer_files import load_tokenizer
from tuner.errors import RecipeError
from tuner.setup.resolve import check_fits


def test_tokens_beyond_the_embeddings_are_named(tmp_path: Path) -> None:
    """transformers adds a padding token that only tokenizer_config.json names: readers would pad with its id."""
    size = tiny.tokenizer().vocab_size
    text = SimpleNamespace(vocab_size=size, max_position_embeddings=None)
    config: Any = SimpleNamespace(get_text_config=lambda: text)
    prepared: Any = None
    base = tiny.write_directory(tmp_path, pad_token="<pad>")  # noqa: S106 (a token of a tokenizer)
    tokenizer = load_tokenizer(str(base), None, TokenizerSection())
    words = rf"{size + 1:,} ids are more than the model's {size:,} embeddings \(<pad>\)"
    with pytest.raises(RecipeError, match=words) as found:
        check_fits(tokenizer, config, prepared)
    assert found.value.hint == "name a pad_token in tokenizer_config.json that the model has, such as its eos_token"
    text.vocab_size = size + 1
    check_fits(tokenizer, config, prepared)
