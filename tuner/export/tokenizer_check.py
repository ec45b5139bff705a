"""Proof that readers of an export get the ids of training: the run's tokenizer is as it was, and loads as such."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tuner.errors import DataError, VerificationError
from tuner.export.source import Source
from tuner.rundir.layout import ID_PROBES, TOKENIZER
from tuner.runtime.files import file_entries, verify_entries

_TEXTS = ("", " ", "a", " a ", "  a  b", "\n", "a\n b\n", "Hello, world! 12345", "\u00e9 \u4e2d\u6587 \U0001f642")
"""What is encoded for a run that recorded no probes."""
_CLOCK = "strftime_now"


def require_same_tokenizer(source: Source) -> None:
    """Check every file of the run's tokenizer. Raises DataError naming the first that is missing, new or different."""
    directory = source.run_dir / TOKENIZER
    noted = source.meta.get("tokenizer_files")
    if not isinstance(noted, Mapping):
        raise DataError(f"{source.checkpoint.path}: its manifest does not say which tokenizer files it belongs to")
    found = file_entries(directory)
    for name in sorted(noted.keys() | found.keys()):
        if noted.get(name) != found.get(name):
            what = "is missing" if name not in found else "was not there" if name not in noted else "is another file"
            raise DataError(
                f"{directory / name}: the tokenizer changed since {source.checkpoint.path} was saved: this {what}",
                hint="restore the run's tokenizer directory",
            )


def require_same_ids(directory: Path, source: Source) -> int:
    """Load the exported tokenizer plainly and encode the run's probes; how many there were.

    Each probe is a text with the ids that training had of it; those of rows also with their messages, which the chat
    template must render to that text. Raises VerificationError for the first that differs, DataError where the probes
    are not those that the checkpoint noted.
    """
    probes = list(_recorded(source) or _of_the_files(source.run_dir / TOKENIZER))
    auto: Any = AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a class raises over files that it cannot read
        raise VerificationError(f"transformers cannot load the exported tokenizer: {error}") from error
    for probe in probes:
        _require(tokenizer, probe)
    return len(probes)


def _recorded(source: Source) -> list[dict[str, Any]]:
    """The probes that the run wrote; none for a checkpoint that notes none. Raises DataError."""
    noted = source.meta.get("id_probes")
    if not isinstance(noted, Mapping) or not noted:
        return []
    verify_entries(source.run_dir, noted, hash=True)
    try:
        return [json.loads(line) for line in (source.run_dir / ID_PROBES).read_bytes().splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{source.run_dir / ID_PROBES}: {error}") from error


def _of_the_files(directory: Path) -> Iterator[dict[str, Any]]:
    """Probes of what tokenizer.json says alone, which is what older runs were trained on. Raises DataError."""
    try:
        written = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"{directory / 'tokenizer.json'}: {error}") from error
    for text in _TEXTS:
        yield {"text": text, "ids": written.encode(text, add_special_tokens=False).ids}


def _require(tokenizer: Any, probe: Mapping[str, Any]) -> None:
    text = probe["text"]
    if (messages := probe.get("messages")) is not None and _CLOCK not in str(tokenizer.chat_template):
        rendered = tokenizer.apply_chat_template(messages, tools=probe.get("tools"), tokenize=False)
        if rendered != text:
            raise VerificationError(
                f"the exported chat template renders {_short(rendered)}, training saw {_short(text)}; "
                "nothing was published"
            )
    for key, framed in (("ids", False), ("framed_ids", True)):
        ids = list(tokenizer(text, add_special_tokens=framed)["input_ids"])
        if key in probe and ids != probe[key]:
            at = next((i for i, (a, b) in enumerate(zip(ids, probe[key], strict=False)) if a != b), len(ids))
            raise VerificationError(
                f"the exported tokenizer, loaded as {type(tokenizer).__name__}, gives other ids than training saw: "
                f"{_short(text)} differs at token {at} ({ids[at : at + 4]}, not {probe[key][at : at + 4]}); "
                "nothing was published",
                hint="the run was prepared with another version of transformers: export with that one, or train again",
            )


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:40]} ... {text[-30:]}")
