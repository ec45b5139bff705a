"""`tuner data`: the directories of prepared data."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.command import Outcome, command, input_path
from tuner.cli.output import columns
from tuner.errors import DataError, VerificationError, counted

if TYPE_CHECKING:  # it loads pyarrow, and what follows pydantic: help and completion do without
    from tuner.data.building.cache import Entry


@command("data list")
def list_directories(cache_dir: Path | None = None) -> Outcome:
    """List prepared, encoded, reference and teacher directories: key, size, documents, tokens, rows and sources."""
    from tuner.data.building.cache import entries

    root = _root(cache_dir)
    rows = [_facts(entry) for entry in entries(root)]
    return Outcome(
        _table(rows) if rows else f"nothing is prepared in {root}",
        artifacts={"cache_dir": str(root), "directories": rows},
        metrics={"directories": len(rows), "bytes": sum(row["bytes"] for row in rows)}, is_table=True,
    )


@command("data show")
def show(entry: str, cache_dir: Path | None = None) -> Outcome:
    """Show what a directory holds and what became of its rows."""
    found = _find(entry, cache_dir)
    if found.manifest is None:
        raise DataError(f"{found.path} is damaged", hint=f"see what: tuner data verify {found.path}")
    return Outcome(
        _shown(found), artifacts={"directory": _facts(found)}, metrics=dict(found.manifest["report"]), is_table=True
    )


@command("data verify")
def verify(wanted: list[str] | None = None, cache_dir: Path | None = None) -> Outcome:
    """Compare every file with the SHA-256 that its manifest noted; exit 6 names each that differs."""
    from tuner.data.building.cache import damages, entries

    found = [_find(name, cache_dir) for name in wanted] if wanted else entries(_root(cache_dir))
    damaged = [damage for entry in found for damage in damages(entry)]
    if damaged:
        raise VerificationError(
            "\n  ".join([f"{len(damaged)} damaged:", *damaged]),
            hint="tuner data gc --verify removes damaged directories; preparing again rebuilds them",
        )
    files = sum(len(entry.manifest["files"]) for entry in found if entry.manifest is not None)
    size = sum(entry.size for entry in found)
    return Outcome(
        f"{counted(len(found), 'directory', 'directories')}, {counted(files, 'file')}, {size:,} bytes: "
        "all as they were written",
        artifacts={"verified": [str(entry.path) for entry in found]},
        metrics={"directories": len(found), "files": files, "bytes": size}, is_text=True,
    )


@command("data gc")
def gc(unused: bool = False, hashes: bool = False, dry_run: bool = False, cache_dir: Path | None = None) -> Outcome:
    """Remove what interrupted preparations left and what is damaged; never what is being built."""
    from tuner.data.building.cache import collect

    removed = collect(_root(cache_dir), unused, hashes, dry_run)
    word = "would remove" if dry_run else "removed"
    lines = [f"{word} {item.path}  {item.size:,} bytes: {item.reason}" for item in removed]
    return Outcome(
        "\n".join(lines) or "nothing to remove",
        artifacts={"removed": [{"path": str(one.path), "reason": one.reason, "bytes": one.size} for one in removed]},
        metrics={"removed": len(removed), "bytes": sum(item.size for item in removed), "dry_run": dry_run},
        is_text=True,
    )


def _root(cache_dir: Path | None) -> Path:
    from tuner.stages import cache_root

    return (cache_root() if cache_dir is None else cache_dir.expanduser()).absolute()


def _find(wanted: str, cache_dir: Path | None) -> "Entry":
    from tuner.data.building.cache import find

    return find(_root(cache_dir), str(input_path("-")) if wanted == "-" else wanted)


def _facts(entry: "Entry") -> dict[str, Any]:
    """What `ls` shows of a directory, as JSON values."""
    facts: dict[str, Any] = {
        "level": entry.level, "key": entry.key, "path": str(entry.path), "bytes": entry.size,
        "damaged": entry.manifest is None,
    }  # fmt: skip
    if entry.manifest is None:
        return facts
    splits = [split for split in (entry.manifest["report"][name] for name in ("train", "eval")) if split is not None]
    facts |= {name: sum(split[name] for split in splits) for name in ("documents", "tokens")}
    if entry.level in ("reference", "teacher"):
        return facts | {"rows": sum(split["packed_rows"] for split in splits), "sources": [entry.manifest["model"]]}
    facts["sources"] = [path for paths in entry.manifest["sources"].values() for path in paths]
    if entry.level == "prepared":
        facts |= {"rows": sum(split["packed_rows"] for split in splits), "max_length": entry.manifest["max_length"]}
    return facts


def _table(rows: list[dict[str, Any]]) -> str:
    """One line for each directory, in columns; numbers to the right."""
    lines = [("level", "key", "bytes", "documents", "tokens", "rows", "sources")]
    for row in rows:
        packed = f"{row['rows']:,}" if "rows" in row else ""
        packed += f" x {row['max_length']:,}" if "max_length" in row else ""
        sources = row.get("sources", [])
        shown = ", ".join(sources[:2]) + (f" and {len(sources) - 2:,} more" if len(sources) > 2 else "")
        counts = ("damaged", "") if row["damaged"] else (f"{row['documents']:,}", f"{row['tokens']:,}")
        lines.append((row["level"], row["key"], f"{row['bytes']:,}", *counts, packed, shown))
    return columns(lines, right=range(2, 6))


def _shown(entry: "Entry") -> str:
    """A directory's report, line by line."""
    from tuner.data.building.report import report_lines
    from tuner.runtime.console import LABEL_WIDTH, escape

    manifest = dict(entry.manifest or {})
    lines = [("level", entry.level), ("key", entry.key), ("path", str(entry.path)), ("size", f"{entry.size:,} bytes")]
    if entry.level in ("reference", "teacher"):
        lines += [("model", manifest["model"]), ("from", f"prepared/{manifest['prepared_key']}")]
    for name in ("train", "eval"):
        lines += [(f"{name} of", path) for path in manifest.get("sources", {}).get(name, [])[:10]]
    if entry.level == "prepared":
        lines.append(("from", f"encoded/{manifest['encoded_key']}"))
        lines.append(("method", f"{manifest['method']}, {manifest['train_on']}"))
        lines += report_lines(manifest["report"], manifest["method"], manifest["max_length"], manifest["packing"])
    else:
        for name in ("train", "eval"):
            split = manifest["report"][name]
            if split is not None:
                lines.append((name, f"{counted(split['documents'], 'document')}  {counted(split['tokens'], 'token')}"))
    lines += [("sha256", f"{facts['sha256']}  {name}") for name, facts in sorted(manifest["files"].items())]
    return "\n".join(f"{label:<{LABEL_WIDTH}}{escape(text)}" for label, text in lines)
