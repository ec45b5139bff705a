"""What an export takes from outside its checkpoint, held against the hashes that the checkpoint noted."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.checkpoint.load import require_same_base
from tuner.errors import DataError
from tuner.export.source import TOKENIZER, Source
from tuner.export.weights import base_model, lora_spec
from tuner.model.adapter import add_lora
from tuner.model.freeze import freeze, frozen_hash
from tuner.runtime.files import file_entries


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


def require_same_frozen(source: Source) -> None:
    """Load the base model as training held it and check what was not trained; nothing where all of it was.

    Raises DataError where the base model is another one now.
    """
    frozen = source.recipe.get("model", {}).get("freeze") or []
    if source.adapter is None and not frozen:
        require_same_base(source.checkpoint, None)
        return
    model = base_model(source)
    if source.adapter is not None:
        add_lora(model, lora_spec(source.adapter), seed=0)
    else:
        freeze(model, frozen)
    require_same_base(source.checkpoint, frozen_hash(model))
