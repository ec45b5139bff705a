"""A directory in a store that never changes: published once, by whoever comes first, under no lease.

It has one commit, number 1, put only where none is. Who makes the same thing at the same time, on any machine, finds
that commit in place of his own, and removes what he has uploaded.
"""

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from tuner.stores.client import Client
from tuner.stores.commit import FILES, Commit, commit_key, read_commit
from tuner.stores.upload import OpenFile, upload

_KEY = commit_key(1)


def find_entry(client: Client) -> Commit | None:
    """The commit of an entry; None where it is not published. One request. Raises MachineError, DataError."""
    return read_commit(client, 1)


def publish_entry(client: Client, files: Iterable[OpenFile], note: Mapping[str, Any]) -> Commit:
    """Upload files and commit them; the commit that is there then, own or another's. MachineError, DataError."""
    document = Commit(1, str(uuid.uuid4()), "", upload(client, files), note).document()
    there = client.settle(_KEY, document, None)
    assert there is not None, "an object that is wanted where none is, is there in the end"
    commit = Commit.read(f"{client.url}/{_KEY}", there[0])
    client.delete([key for key in client.names(FILES) if key not in commit.data])
    return commit
