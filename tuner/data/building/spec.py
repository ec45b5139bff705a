"""What is to be prepared, and how a recipe's sections become it: the one place where `auto` becomes a number."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.data.building.pack import TooLong
from tuner.data.encoding.encode import Encoder
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.encoding.tokenizer_files import cache_root, load_tokenizer, tokenizer_directory
from tuner.data.encoding.turns import SpecialTokens
from tuner.errors import RecipeError
from tuner.runtime.files import read_json

if TYPE_CHECKING:
    from tuner.config.recipe import DataSection, Examples, Method, ModelSection, TokenizerSection

AUTO_MAX_LENGTH = 2048
"""`data.max_length: auto` is at most this many tokens."""
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class PrepareSpec:
    """Everything that decides the prepared data, and where the cache is."""

    data: "DataSection"
    examples: "Examples"
    tokenizer: TextTokenizer
    max_length: int
    seed: int
    cache_dir: Path
    special_tokens_in_text: SpecialTokens = "refuse"

    @property
    def too_long(self) -> TooLong:
        """The policy for long documents, `auto` resolved."""
        return self.examples.too_long if self.data.too_long == "auto" else self.data.too_long

    @property
    def workers(self) -> int | None:
        """Processes that encode; None leaves it to the number of cores."""
        return None if self.data.workers == "auto" else self.data.workers

    def encoder(self) -> Encoder:
        """What encodes the examples."""
        return Encoder(self.tokenizer, self.examples.train_on, self.special_tokens_in_text)


def prepare_spec(
    model: "ModelSection",
    tokenizer: "TokenizerSection",
    data: "DataSection",
    method: "Method",
    seed: int,
    cache_dir: Path | None = None,
) -> PrepareSpec:
    """Return the spec of a recipe; reads the tokenizer's files and the model's config.json, nothing else.

    The cache is `cache_dir`, else the recipe's `data.cache_dir`, else $TUNER_CACHE, else ~/.cache/tuner.
    Raises DataError and MachineError where these are missing, RecipeError where rows are longer than the model allows.
    """
    cache = (cache_dir or (cache_root() if data.cache_dir is None else Path(data.cache_dir))).absolute()
    return PrepareSpec(
        data=data,
        examples=method.examples,
        tokenizer=load_tokenizer(model.name_or_path, model.revision, tokenizer, cache),
        max_length=resolve_max_length(model, data),
        seed=seed,
        cache_dir=cache,
        special_tokens_in_text=tokenizer.special_tokens_in_text,
    )


def resolve_max_length(model: "ModelSection", data: "DataSection") -> int:
    """Return the tokens of a row: the recipe's, or the smaller of the model's positions and 2048. RecipeError."""
    positions = model_positions(model)
    if data.max_length == "auto":
        return AUTO_MAX_LENGTH if positions is None else min(positions, AUTO_MAX_LENGTH)
    if positions is not None and data.max_length > positions:
        raise RecipeError(
            f"data.max_length {data.max_length} is more than the model's {positions} positions",
            hint=f"set data.max_length: {positions}, or raise model.config.max_position_embeddings",
        )
    return data.max_length


def model_positions(model: "ModelSection") -> int | None:
    """Return the model's longest position by its config, with the recipe's overrides; None where it names none."""
    path = tokenizer_directory(model.name_or_path, model.revision) / "config.json"
    config: dict[str, Any] = read_json(path) if path.is_file() else {}
    return _positions({**config, **model.config})


def _positions(config: Mapping[str, Any]) -> int | None:
    for key in _POSITION_KEYS:
        if isinstance(config.get(key), int) and config[key] > 0:
            return int(config[key])
    nested = config.get("text_config")
    return _positions(nested) if isinstance(nested, dict) else None
