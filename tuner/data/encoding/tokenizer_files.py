"""The files of a tokenizer: where they are, and the tokenizer that they make."""

import hashlib
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.data.encoding.added import with_tokens
from tuner.data.encoding.byte_tokenizer import byte_tokenizer_files
from tuner.data.encoding.template import TEMPLATE_FILE, TOOL_TEMPLATE_FILE
from tuner.data.encoding.tokenizer import TextTokenizer, parse_json
from tuner.errors import DataError, MachineError
from tuner.runtime.files import TMP_PREFIX, discard_dir, publish_dir

if TYPE_CHECKING:
    from tuner.config.recipe import TokenizerSection

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    TEMPLATE_FILE,
    TOOL_TEMPLATE_FILE,
)
_CONVERT = (
    "import sys; from transformers import AutoTokenizer; "
    "AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False).save_pretrained(sys.argv[2])"
)



def load_tokenizer(model_path: str, revision: str | None, tokenizer: "TokenizerSection") -> TextTokenizer:
    """Read the recipe's tokenizer: its own, `byte`, or the model's.

    `model_path` is a directory or a hub name; a hub name is the only thing that reaches for the network, and only
    what the local cache lacks. Raises DataError where the files are missing or wrong.
    """
    template = None
    if tokenizer.chat_template is not None:
        try:
            template = Path(tokenizer.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"tokenizer.chat_template: {error}") from error
    ends: list[int] = []
    if tokenizer.name_or_path == "byte":
        files = byte_tokenizer_files()
    else:
        own = tokenizer.name_or_path is not None and str(tokenizer.name_or_path) != model_path
        directory = tokenizer_directory(str(tokenizer.name_or_path) if own else model_path, None if own else revision)
        files, ends = _read_files(directory), _model_eos_ids(directory)
    files, new_ids = with_tokens(files, tokenizer.add_tokens)
    return TextTokenizer(files, template, ends, new_ids=new_ids)


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
    if not (directory / "tokenizer.json").is_file():
        directory = _converted(directory)
    return {name: (directory / name).read_bytes() for name in _FILES if (directory / name).is_file()}


def _converted(directory: Path) -> Path:
    """Convert a tokenizer without tokenizer.json once, in a child process: transformers would import torch."""
    sources = [directory / name for name in _FILES if (directory / name).is_file()]
    if not sources:
        raise DataError(f"{directory}: holds no tokenizer", hint="set tokenizer.name_or_path (`byte` needs no files)")
    digest = hashlib.sha256(b"".join(hashlib.sha256(source.read_bytes()).digest() for source in sources)).hexdigest()
    target = cache_root() / "tokenizers" / digest[:16]
    if not (target / "tokenizer.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        tmp = target.parent / f"{TMP_PREFIX}{target.name}-{secrets.token_hex(4)}"
        command = [sys.executable, "-c", _CONVERT, str(directory), str(tmp)]
        # tiktoken would keep what it reads in a directory of a fixed name in /tmp.
        own = {"HF_HUB_OFFLINE": "1", "TIKTOKEN_CACHE_DIR": ""}
        result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **own})
        made = result.returncode == 0 and (tmp / "tokenizer.json").is_file()
        if made and not (target / "tokenizer.json").is_file():
            discard_dir(target)
            publish_dir(tmp, target)
        discard_dir(tmp)
        if not made:
            reason = (result.stderr.strip().splitlines() or ["no tokenizer.json was written"])[-1]
            raise DataError(f"{directory}: the tokenizer cannot be converted to tokenizer.json: {reason}")
    return target


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
