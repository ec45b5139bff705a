"""The licence under which a base model was published, as its own card says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

CARD = "README.md"
MAX_CHARACTERS = 100


def licence_of(name_or_path: str, revision: str | None) -> str | None:
    """The `license` (for `other`, the `license_name`) in the front matter of the model's card; None where unknown."""
    path = Path(name_or_path) / CARD
    if not Path(name_or_path).is_dir():
        try:
            path = Path(hf_hub_download(name_or_path, CARD, revision=revision))
        except (OSError, ValueError):  # of a hub that cannot be reached, too: the licence is then unknown
            return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    parts = text.split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return None
    try:
        front: Any = YAML(typ="safe", pure=True).load(parts[1])
    except (YAMLError, RecursionError, ValueError):
        return None
    if not isinstance(front, dict):
        return None
    licence = front.get("license_name") if front.get("license") == "other" else front.get("license")
    return licence if isinstance(licence, str) and len(licence) <= MAX_CHARACTERS and licence.isprintable() else None
