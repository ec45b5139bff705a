"""What an export takes from outside its checkpoint, held against the hashes that the checkpoint noted."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.checkpoint.load import require_same_base
from tuner.errors import DataError
from tuner.export.frozen import Frozen, hash_of
from tuner.export.outputs import Trained
from tuner.export.published import published
from tuner.export.source import Source
from tuner.export.tensors import OpenFiles
from tuner.model.freeze import frozen_names
from tuner.rundir.layout import TOKENIZER
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


def require_same_frozen(source: Source, trained: Trained, files: OpenFiles) -> None:
    """Read what was not trained where it lies and check its hash. Raises DataError where it is another one now."""
    names = frozen_names(trained.adapted)
    entries = [entry for entry in published(trained.plain) if entry.name in names] if names else []
    require_same_base(source.checkpoint, hash_of(Frozen(source, trained.plain, files, entries), entries))
