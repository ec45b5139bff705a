"""A commit of a store directory: the full listing of its files, sealed, put under the next number or not at all.

PREFIX/tuner/commits/0000000042.json   the listing; readers believe nothing else
PREFIX/tuner/files/ID/00000            bytes of a file, in parts; an ID is new for each upload and never written twice
PREFIX/tuner/lease.json                who publishes here
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.errors import DataError
from tuner.stores.client import Client

SCHEMA = 1
COMMITS = "tuner/commits"
FILES = "tuner/files"
LEASE = "tuner/lease.json"


@dataclass(frozen=True)
class StoredFile:
    """One file of a commit: `size` bytes in parts of `part` bytes below the key, or a link to `link`."""

    key: str = ""
    size: int = 0
    sha256: str = ""
    part: int = 1
    link: str | None = None

    def parts(self) -> Iterator[tuple[str, int, int]]:
        """Key, first byte and length of each object that holds it; an empty file and a link have none."""
        for number, start in enumerate(range(0, self.size, self.part)):
            yield f"{FILES}/{self.key}/{number:05}", start, min(self.part, self.size - start)


@dataclass(frozen=True)
class Commit:
    """What a directory was at one moment. `writer` is the lease under which it was put; `note` is the caller's."""

    number: int
    commit_id: str
    writer: str
    files: Mapping[str, StoredFile]
    note: Mapping[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> set[str]:
        """The keys of all objects that hold its files."""
        return {key for file in self.files.values() for key, _, _ in file.parts()}

    @property
    def contents(self) -> dict[str, StoredFile]:
        """Its files by their SHA-256."""
        return {file.sha256: file for file in self.files.values() if file.link is None}

    def document(self) -> bytes:
        """The listing, with the SHA-256 of itself without that line."""
        listed = {
            name: {key: value for key, value in vars(file).items() if value is not None}
            for name, file in self.files.items()
        }
        content = {
            "schema": SCHEMA, "number": self.number, "commit_id": self.commit_id, "writer": self.writer,
            "files": listed, "note": dict(self.note),
        }  # fmt: skip
        return _bytes({**content, "seal": hashlib.sha256(_bytes(content)).hexdigest()})

    @staticmethod
    def read(where: str, document: bytes) -> Commit:
        """The commit that a listing describes. Raises DataError where it is damaged or of a newer program."""
        try:
            content = json.loads(document)
            seal = content.pop("seal")
            if content["schema"] != SCHEMA:
                raise DataError(f"{where}: of schema {content['schema']}, written by another version", "update tuner")
            if seal != hashlib.sha256(_bytes(content)).hexdigest():
                raise DataError(f"{where}: damaged: its SHA-256 is not the one that it names")
            files = {name: StoredFile(**entry) for name, entry in content["files"].items()}
            return Commit(content["number"], content["commit_id"], content["writer"], files, content["note"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: not the listing of a commit ({error!r})") from error


def commit_key(number: int) -> str:
    """Where the listing of a number lies."""
    return f"{COMMITS}/{number:010}.json"


def read_commit(client: Client, number: int) -> Commit | None:
    """The commit of a number, or None where there is none. Raises DataError, MachineError."""
    found = client.get(commit_key(number))
    return None if found is None else Commit.read(f"{client.url}/{commit_key(number)}", found[0])


def _bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
