"""The files of a tokenizer: where they are, and the tokenizer that they make."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.data.encoding.added import require_ids, with_tokens
from tuner.data.encoding.as_loaded import LoadedAs, as_loaded
from tuner.data.encoding.byte_tokenizer import byte_tokenizer_files
from tuner.data.encoding.template import TEMPLATE_FILE, TOOL_TEMPLATE_FILE
from tuner.data.encoding.tokenizer import TextTokenizer, parse_json
from tuner.errors import DataError, MachineError

if TYPE_CHECKING:
    from tuner.config.recipe import TokenizerSection

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model"),
    TEMPLATE_FILE,
    TOOL_TEMPLATE_FILE,
)


def load_tokenizer(
    model_path: str, revision: str | None, tokenizer: "TokenizerSection", cache_dir: Path | None = None
) -> TextTokenizer:
    """Read the recipe's tokenizer, as transformers loads it: its own, `byte`, or the model's.

    `model_path` is a directory or a hub name; a hub name is the only thing that reaches for the network, and only
    what the local cache lacks. What transformers makes of the files is kept in `cache_dir`, else `cache_root()`.
    Raises DataError where the files are missing or wrong.
    """
    template = None
    if tokenizer.chat_template is not None:
        try:
            template = Path(tokenizer.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"tokenizer.chat_template: {error}") from error
    own = tokenizer.name_or_path is not None and str(tokenizer.name_or_path) != model_path
    cache = cache_dir or cache_root()
    if tokenizer.name_or_path == "byte":
        context = _LoadContext("tokenizer.name_or_path: byte", None, _model_config(model_path, revision), cache)
        files, ends = byte_tokenizer_files(), []
    else:
        directory = tokenizer_directory(str(tokenizer.name_or_path) if own else model_path, None if own else revision)
        config = _config(directory)
        context = _LoadContext(str(directory), config, _model_config(model_path, revision) if own else config, cache)
        files, ends = _read_files(directory), _model_eos_ids(directory)
    files, loaded = context.as_loaded(files)
    new_ids = range(0)
    if tokenizer.add_tokens:
        files, new_ids = with_tokens(files, tokenizer.add_tokens)
        files, _ = context.as_loaded(files)
        require_ids(files, tokenizer.add_tokens, new_ids)
    return TextTokenizer(files, template, ends, new_ids=new_ids, loaded_as=loaded)


def tokenizer_directory(name_or_path: str, revision: str | None) -> Path:
    """Return the local directory of a tokenizer, fetching a hub name's tokenizer files into the hub's cache."""
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    if name_or_path.startswith(("/", ".", "~")):
        raise DataError(f"{name_or_path}: no such directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_FILES, "config.json", "generation_config.json"]
    try:
        return Path(snapshot_download(name_or_path, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise MachineError(
            f"{name_or_path}: not a directory, and not available from the hub: {str(error).splitlines()[0]}",
            hint="give a local directory, or check the name and the network",
        ) from error


def _read_files(directory: Path) -> dict[str, bytes]:
    """The files of a tokenizer by name. DataError where there is none."""
    files = {name: (directory / name).read_bytes() for name in _FILES if (directory / name).is_file()}
    if not files:
        raise DataError(f"{directory}: holds no tokenizer", hint="set tokenizer.name_or_path (`byte` needs no files)")
    return files


@dataclass(frozen=True)
class _LoadContext:
    """What decides, besides its files, how a tokenizer is loaded."""

    name: str
    """For people."""
    config: bytes | None
    model_config: bytes | None
    cache_dir: Path

    def as_loaded(self, files: Mapping[str, bytes]) -> tuple[dict[str, bytes], LoadedAs]:
        """The files as transformers loads them. Raises DataError."""
        try:
            return as_loaded(files, self.config, self.model_config, self.cache_dir)
        except DataError as error:
            raise DataError(f"{self.name}: {error.message}", hint=error.hint) from error


def _config(directory: Path) -> bytes | None:
    path = directory / "config.json"
    return path.read_bytes() if path.is_file() else None


def _model_config(model_path: str, revision: str | None) -> bytes | None:
    """The model's config.json; None where the model is not here, which is said where the model is needed."""
    with suppress(DataError, MachineError):
        return _config(tokenizer_directory(model_path, revision))
    return None


def cache_root(environment: Mapping[str, str] | None = None) -> Path:
    """Return $TUNER_CACHE, else ~/.cache/tuner."""
    root = (os.environ if environment is None else environment).get("TUNER_CACHE")
    return Path(root).expanduser() if root else Path("~/.cache/tuner").expanduser()


def _model_eos_ids(directory: Path) -> list[int]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (directory / name).is_file():
            value = parse_json({name: (directory / name).read_bytes()}, name).get("eos_token_id")
            ids += [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and i not in ids]
    return ids
