"""GGUF files that were written here, checked to be whole before they are uploaded."""

import re
from pathlib import Path
from typing import Any

import gguf

from tuner.errors import DataError, RecipeError
from tuner.export.gguf.modelfile import place

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def files_of(path: Path) -> tuple[dict[str, Path], int | None]:
    """What goes to a repository of a file, or of the first of several, by its names there; and the run's step.

    Its Modelfile is named so there. Raises DataError for a file that is cut short or missing, RecipeError for one that
    was not verified when it was written here.
    """
    paths = [path]
    if match := _SHARD.fullmatch(path.name):
        paths = [path.with_name(f"{match[1]}-{at:05d}-of-{match[3]}.gguf") for at in range(1, int(match[3]) + 1)]
    facts = [_facts(each) for each in paths][0]
    verified = facts.get("tuner.verified")
    if verified is None or verified == "not verified":
        what = f"{paths[0]}: it was {verified or 'not written by tuner export-gguf'}"
        raise RecipeError(what, hint="write it verified: tuner export-gguf")
    step, model = str(facts.get("tuner.step", "")), place(path)
    found = {each.name: each for each in paths} | ({"Modelfile": model} if model.is_file() else {})
    return found, int(step) if step.isdigit() else None


def _facts(path: Path) -> dict[str, Any]:
    """The keys of a file that is as long as its tensors are. Raises DataError."""
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:  # numpy's, of a file that ends early
        raise DataError(f"{path}: no whole GGUF file: {error}", hint="write it again: tuner export-gguf") from error
    end = max((int(tensor.data_offset + tensor.n_bytes) for tensor in reader.tensors), default=0)
    if path.stat().st_size < end:
        raise DataError(f"{path}: ends early", hint="write it again: tuner export-gguf")
    return {key: field.contents() for key, field in reader.fields.items() if key.startswith("tuner.")}
