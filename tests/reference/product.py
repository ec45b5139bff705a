"""The product from outside: the real command, and the files that it leaves, read with pyarrow."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tests.caches import new_cache
from tests.fixtures import forked
from tuner.data.encoding.tokenizer import TextTokenizer

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Encoded:
    """One document: int64[n] token ids and bool[n], whether each is trained."""

    ids: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]

    def same(self, other: Encoded) -> bool:
        """Whether ids and masks are equal."""
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.trained, other.trained)


@dataclass(frozen=True)
class Prepared:
    """What one run left: documents in the order of the rows, refused rows, and its report."""

    documents: list[Encoded]
    rejects: list[dict[str, Any]]
    report: dict[str, Any]


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write rows as JSONL, non-ASCII text as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def prepare(work: Path, recipe: dict[str, Any], cache: Path | None = None) -> Prepared:
    """Run the command on a recipe in the directory `work`, with a cache of its own unless one is given."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / "recipe.yaml"
    path.write_text(json.dumps(recipe, ensure_ascii=False), encoding="utf-8")
    command = [sys.executable, "-m", "tuner", "prepare-data", str(path), "--json"]
    environment = {**os.environ, "TUNER_CACHE": str(new_cache(cache or work / "cache")), "PYTHONPATH": str(ROOT)}
    result = forked.run(command, capture_output=True, text=True, check=False, cwd=work, env=environment)
    assert result.returncode == 0, result.stderr
    return opened(Path(json.loads(result.stdout)["artifacts"]["path"]))


def prepare_here(recipe: dict[str, Any]) -> Prepared:
    """Prepare by the public function, in this process and in the cache that the environment names: no start-up."""
    from tuner import prepare_data

    return opened(prepare_data(recipe).path)


@contextlib.contextmanager
def parsed_once() -> Iterator[None]:
    """Within, a tokenizer.json is parsed once, and not for each run in this process."""
    with contextlib.ExitStack() as until:
        for name in ("_parsed", "_table"):
            once = cached_property(_once(vars(TextTokenizer)[name].func))
            once.__set_name__(TextTokenizer, name)
            until.enter_context(patch.object(TextTokenizer, name, once))
        yield


def _once(parse: Callable[[TextTokenizer], Any]) -> Callable[[TextTokenizer], Any]:
    found: dict[bytes, Any] = {}

    def kept(tokenizer: TextTokenizer) -> Any:
        content = tokenizer.files["tokenizer.json"]
        if content not in found:
            found[content] = parse(tokenizer)
        return found[content]

    return kept


def opened(prepared: Path) -> Prepared:
    """Read a prepared directory."""
    rejects = [json.loads(line) for line in (prepared / "rejects.jsonl").read_bytes().splitlines()]
    report = json.loads((prepared / "manifest.json").read_bytes())["report"]
    return Prepared(documents(prepared / "train.documents.arrow"), rejects, report)


def documents(path: Path) -> list[Encoded]:
    """Every document of an Arrow IPC stream file."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        table = stream.read_all()
        found = []
        for batch in table.to_batches():
            ids, trained = batch.column("input_ids"), batch.column("trained")
            flat = ids.values.to_numpy().astype(np.int64)
            flags = trained.values.to_numpy(zero_copy_only=False)
            for a, b in zip(ids.offsets.to_pylist(), ids.offsets.to_pylist()[1:], strict=False):
                found.append(Encoded(flat[a:b], flags[a:b]))
            assert ids.offsets.equals(trained.offsets)
    return found
