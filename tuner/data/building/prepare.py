"""Prepare data: records to a content-addressed directory of encoded documents and packed rows.

Two levels under the cache: `encoded/<key>` depends on the bytes of the sources, the tokenizer, the template, the
method, the shares and the hold-out; `prepared/<key>` adds row length and packing, so another `max_length` encodes
nothing again. Each is built in a temporary directory under a lock, flushed, and renamed. What builds them is imported
where the cache lacks something: a training of data that is prepared starts without it.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.config.portions import Portion
from tuner.data.building.cache import build_once, cache_path, others_may_write, valid
from tuner.data.building.spec import PrepareSpec, SplitSources, expected_bytes, keys_of, sources_of
from tuner.data.sources import next_portion
from tuner.errors import DataError, NoRowsError
from tuner.runtime.console import Console
from tuner.stages import url_of


@dataclass(frozen=True)
class PreparedInfo:
    """A prepared directory and how it came to be."""

    path: Path
    key: str
    cached: bool
    report: dict[str, Any]
    seconds: float
    warnings: tuple[str, ...] = ()
    """What of the result deserves a second look, the same for a cached one."""


def prepare(spec: PrepareSpec, console: Console | None = None) -> PreparedInfo:
    """Return the prepared directory for `spec`, building what the cache lacks.

    Raises DataError for rows that cannot be used, and where most documents are dropped for their length though the
    recipe does not say so; MachineError where the cache cannot be written.
    """
    started = time.monotonic()
    sources = sources_of(spec)
    keys = keys_of(spec, sources)
    final = cache_path(spec.cache_dir, "prepared", keys.prepared)
    manifest = manifest_of(final, console)
    cached = manifest is not None
    if manifest is None and "torch" in sys.modules and spec.workers(expected_bytes(sources.every())) == 1:
        from tuner.data.building import apart

        if apart.is_better_apart(sources.every()):
            apart.prepare_apart(prepare, spec, console is not None and console.is_heard)
            manifest = valid(final, "prepared")
    if manifest is None:
        from tuner.data.building.rows import build_rows

        def make(tmp: Path) -> dict[str, Any]:
            return build_rows(spec, keys, tmp, console)

        manifest, cached = build_once(spec.cache_dir, "prepared", keys.prepared, make, console)
        manifest_of(final, console)
    report = _with_own_names(manifest["report"], sources)
    warnings = (*_warnings(spec, report, final), *others_may_write(spec.cache_dir))
    return PreparedInfo(final, keys.prepared, cached, report, time.monotonic() - started, warnings)


def prepare_to_use(spec: PrepareSpec, console: Console) -> Path:
    """Return the prepared directory as `prepare` does, and say its warnings: for whoever does not show its report."""
    info = prepare(spec, console)
    for warning in info.warnings:
        console.warn(warning)
    return info.path


def check_to_use(spec: PrepareSpec, directory: Path, console: Console) -> None:
    """Say the warnings of a directory that was prepared for `spec`, wherever it lies.

    Raises DataError where most documents of a split are lost to their length though the recipe does not say so.
    """
    manifest = valid(directory, "prepared")
    lost = () if manifest is None else _warnings(spec, manifest["report"], directory)
    for warning in (*lost, *others_may_write(directory)):
        console.warn(warning)


def find_prepared(spec: PrepareSpec) -> Path | None:
    """Return the prepared directory for `spec` where it exists already; builds nothing."""
    final = prepared_path(spec)
    return final if manifest_of(final) is not None else None


def check_prepared(spec: PrepareSpec) -> Path:
    """Return the prepared directory for `spec`; DataError saying what is missing where it would have to be built."""
    keys = keys_of(spec)
    path = cache_path(spec.cache_dir, "prepared", keys.prepared)
    if (manifest := manifest_of(path)) is not None:
        _warnings(spec, manifest["report"], path)  # what a training would refuse is refused here
        return path
    state = "is damaged" if path.exists() else "is not there"
    encoded = valid(cache_path(spec.cache_dir, "encoded", keys.encoded), "encoded") is not None
    more = "its rows must be packed" if encoded else "its documents must be encoded and packed"
    raise DataError(f"not prepared: {path} {state}; {more}", hint="run: tuner prepare-data RECIPE")


def prepared_path(spec: PrepareSpec) -> Path:
    """Return the directory that `spec` has or would have; its sources are read for their hashes."""
    return cache_path(spec.cache_dir, "prepared", keys_of(spec).prepared)


def manifest_of(final: Path, console: Console | None = None) -> dict[str, Any] | None:
    """The manifest of prepared data that are whole: here, or in the store of the cache, from where they are fetched.

    With a console, what is here alone is published there.
    """
    if url_of(final) is not None:
        from tuner.data.building.stored import settle  # which caches on disks do without

        settle(final, console)
    return valid(final, "prepared")


def _with_own_names(report: dict[str, Any], sources: SplitSources) -> dict[str, Any]:
    """The report with the names of this recipe's sources: who built the directory may have had others."""
    renamed: dict[str, list[dict[str, Any]]] = {}
    for split, known in report["sources"].items():
        given = sources.train if split == "train" else sources.held or []
        alike = [counts["files"] for counts in known] == [len(source.files) for source in given]
        names = [{"path": source.path} for source in given] if alike else [{}] * len(known)
        renamed[split] = [counts | name for counts, name in zip(known, names, strict=True)]
    return {**report, "sources": renamed}


def _warnings(spec: PrepareSpec, report: dict[str, Any], directory: Path) -> tuple[str, ...]:
    """What of a prepared directory deserves a second look. DataError where most of a split is lost to its length."""
    splits = [report[name] for name in ("train", "eval") if report[name] is not None]
    lost = any(
        split[word] for split in splits for word in ("skipped", "dropped", "duplicates", "dropped_rows", "truncated")
    )
    untaken = any(not source["sampled"] for sources in report["sources"].values() for source in sources)
    others = (report.get("tokenizer") or {}).get("other_versions")
    forms = (source.get("forms", ()) for sources in report["sources"].values() for source in sources)
    odd = report["notes"] or any(len(found) > 1 for found in forms) or spec.examples.kind == "unpaired"
    if not (lost or untaken or others or odd or report["overlap"] or report.get("by_answer", {}).get("left_out")):
        return ()
    from tuner.data.building.report import length_warnings, warnings_of

    found = warnings_of(report, str(directory / "rejects.jsonl"), spec.examples.unit)
    return (*found, *length_warnings(spec, report, directory))


def prepare_portions(spec: PrepareSpec, console: Console) -> Iterator[tuple[Portion, PreparedInfo | None]]:
    """Yield each portion with what was prepared, None for one without rows, until one is not there.

    Raises DataError naming a portion that cannot be prepared, MachineError.
    """
    done: list[Portion] = []
    while isinstance(portion := next_portion(spec.data, done), Portion):
        done.append(portion)
        try:
            yield portion, prepare(replace(spec, portion=portion), console)
        except NoRowsError:
            yield portion, None
        except DataError as error:
            raise DataError(f"{spec.called(portion)}: {error.message}", hint=error.hint) from error
