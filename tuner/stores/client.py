"""The requests that a store directory needs, over obstore: plain and conditional puts, reads, names, deletions.

What is asked of a store is what S3, Google's and Azure's stores all promise: a put is whole or absent, an object is
seen by its key once it was put, and a put on a condition (only where nothing is, only over this version) is decided by
the store. Credentials, regions and endpoints come from the environment that other tools read (`AWS_ACCESS_KEY_ID`,
`AWS_REGION`, `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME` ...).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tuner.errors import MachineError
from tuner.runtime.files import write_all

SCHEMES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "gs": ("STORAGE_EMULATOR_HOST",),
    "az": ("AZURE_STORAGE_ENDPOINT",),
}  # fmt: skip
"""The variables that lead to another server than the vendor's."""
_S3_BODIES = {"AWS_CHECKSUM_ALGORITHM": "crc64nvme", "AWS_UNSIGNED_PAYLOAD": "true"}
"""A body goes with its CRC-64, which S3 holds it against, instead of a SHA-256 of it within the signature: the SHA-256
of each file stands in its commit, and a second one would be a tenth of a put's time. The vendor's own tools do so."""
REQUEST_SECONDS = 300
"""How long one request may take: a part of a file over a slow line."""
CONNECT_SECONDS = 10
RETRY_SECONDS = 60
"""For how long a request that failed is sent again, at growing intervals of at most 5 seconds."""
MOST_BYTES = 1 << 62
STREAM_BYTES = 1 << 20
"""What is read of an object before it is written to the file."""

T = TypeVar("T")
Version = Mapping[str, str]
"""What a store calls one state of an object: its etag, on Google its generation too."""

_CAUSES: list[dict[str, str]] = json.loads(Path(__file__).with_name("causes.json").read_text(encoding="utf-8"))
"""What the `words` of an error mean, a pattern, in this order; in obstore's text they stand with the store's answer."""


@dataclass(frozen=True)
class Client:
    """The objects below one URL, by keys relative to it. All methods raise MachineError with the URL and the cause."""

    url: str
    store: Any
    library: Any

    @staticmethod
    def connect(url: str) -> Client:
        """The client of a URL, as `stages.url_of` gives it; nothing is asked of the store yet."""
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        try:
            import obstore.store
        except ModuleNotFoundError as error:
            missing = f"{url}: the library obstore is missing"
            raise MachineError(missing, hint="install it: pip install obstore") from error
        endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS[scheme])), "")
        limits = {"timeout": timedelta(seconds=REQUEST_SECONDS), "connect_timeout": timedelta(seconds=CONNECT_SECONDS)}
        waits = {"retry_timeout": timedelta(seconds=RETRY_SECONDS), "backoff": {"max_backoff": timedelta(seconds=5)}}
        settings: dict[str, Any] = {
            "retry_config": {"max_retries": 12, **waits},
            # An address that says http is meant as it is said: by the vendors' own tools, and so here.
            "client_options": {**limits, "allow_http": endpoint.startswith("http:")},
        }
        if scheme == "s3":
            settings |= {name.lower()[4:]: value for name, value in _S3_BODIES.items() if name not in os.environ}
        if scheme == "gs" and endpoint:
            emulator = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": "", "private_key": ""}
            settings["service_account_key"] = json.dumps({**emulator, "private_key_id": ""})
        with _errors(url):
            store = getattr(obstore.store, SCHEMES[scheme])(bucket, prefix=prefix or None, **settings)
        return Client(url, store, obstore)

    def get(self, key: str) -> tuple[bytes, Version] | None:
        """An object's bytes and version, or None where there is none."""

        def read() -> tuple[bytes, Version]:
            result = self.library.get(self.store, key)
            return bytes(result.bytes()), _version(result.meta)

        return self._found(read)

    def meta(self, key: str) -> Mapping[str, Any] | None:
        """What the store says of an object: `path`, `size`, `e_tag`; None where there is none."""
        return self._found(lambda: self.library.head(self.store, key))

    def put(self, key: str, data: bytes) -> None:
        """Make or replace an object."""
        with _errors(self.url):
            self.library.put(self.store, key, data, use_multipart=False)

    def settle(self, key: str, data: bytes, version: Version | None) -> tuple[bytes, Version] | None:
        """Make an object where none is (`version` None), or replace this version of it, until one knows what is there.

        That is `data`, with its new version, where this put was the one, else another's, or nothing. Every content is
        put under a condition at most once in its life, so that finding one's own bytes means that the put was done,
        whatever its answer was.
        """
        for _ in range(3):
            try:
                return data, self._put_where(key, data, version)
            except MachineError as error:  # refused, or carried out and sent again, or carried out all the same
                refused = error
            found = self.get(key)
            if found is None and version is not None:
                return None
            if found is not None and found[1] != version:
                return found
        raise refused

    def require_conditions(self, key: str, data: bytes, version: Version | None) -> None:
        """Repeat a conditional put that was done; raises MachineError where the store does it once more.

        Some servers take the headers of conditions and do not look at them.
        """
        try:
            self._put_where(key, data, version)
        except MachineError:  # refused, as it has to be; or the store does not answer, which says nothing
            return
        ignored = f"{self.url}: this store does not look at the conditions of puts, so that two launches could mix"
        hint = "choose one that does: Amazon's, Google's, Azure's, SeaweedFS, or a directory on a file system"
        raise MachineError(ignored, hint=hint)

    def _put_where(self, key: str, data: bytes, version: Version | None) -> Version:
        mode = "create" if version is None else dict(version)
        with _errors(self.url):
            return _version(self.library.put(self.store, key, data, mode=mode, use_multipart=False))

    def read(self, key: str, into: int, start: int = 0, most: int = MOST_BYTES, etag: str | None = None) -> int | None:
        """Write an object's bytes to a descriptor at `start` as they arrive, from its first again where they broke off.

        How many it has, of which none beyond `most` are written; None where there is none, or none of this etag.
        """
        options = None if etag is None else {"if_match": etag}

        def stream() -> int:
            size = 0
            os.lseek(into, start, os.SEEK_SET)
            for chunk in self.library.get(self.store, key, options=options).stream(min_chunk_size=STREAM_BYTES):
                size += len(chunk)
                if size <= most:
                    write_all(into, memoryview(chunk))
            return size

        try:
            return self._found(stream)
        except MachineError as error:
            if isinstance(error.__cause__, self.library.exceptions.PreconditionError):
                return None
            raise

    def part(self, key: str, start: int, length: int) -> bytes | None:
        """So many of an object's bytes from `start`; None where there is none."""
        return self._found(lambda: bytes(self.library.get_range(self.store, key, start=start, length=length)))

    def names(self, prefix: str) -> list[str]:
        """The keys below a prefix, in no order."""
        return [each["path"] for each in self.metas(prefix)]

    def metas(self, prefix: str) -> list[Mapping[str, Any]]:
        """What the store says of each object below a prefix, in no order."""
        pages = self._found(lambda: list(self.library.list(self.store, prefix, chunk_size=1000)))
        return [each for page in pages or () for each in page]

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; one that is not there is fine."""
        if keys and self._found(partial(self._delete, list(keys))) is None and len(keys) > 1:
            for key in keys:  # a store that names a missing one leaves the rest
                self.delete([key])

    def _delete(self, keys: list[str]) -> bool:
        self.library.delete(self.store, keys)
        return True

    def _found(self, ask: Callable[[], T]) -> T | None:
        """What is asked, or None where the store has no such object.

        Asked again where the answer broke off, which the library does not do: all that comes here may be repeated.
        """
        until = time.monotonic() + RETRY_SECONDS
        while True:
            try:
                with _errors(self.url):
                    return ask()
            except MachineError as error:
                said = str(error.__cause__)
                if isinstance(error.__cause__, FileNotFoundError) and not re.search(_CAUSES[0]["words"], said):
                    return None
                if "HTTP error" not in said or time.monotonic() > until:
                    raise
                time.sleep(0.2)


def _version(meta: Mapping[str, Any]) -> Version:
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name) is not None}


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Have what obstore raises within raised as a MachineError with the cause by name."""
    try:
        yield
    except (MachineError, KeyboardInterrupt):
        raise
    except Exception as error:
        if not isinstance(error, FileNotFoundError) and not type(error).__module__.startswith("obstore"):
            raise
        raise refusal(url, error) from error


def refusal(url: str, error: Exception) -> MachineError:
    """What an answer of the store means to people."""
    text = str(error)
    for cause in _CAUSES:
        if re.search(cause["words"], text):
            return MachineError(f"{url}: {cause['means']} ({_said(text)})", cause["hint"])
    return MachineError(f"{url}: {_said(text)}")


def _said(text: str) -> str:
    """The store's own code or the last line of the library's words, without the XML around it."""
    code = re.search(r"<Code>(\w+)</Code>", text)
    if code:
        return code[1]
    status = re.search(r"status code: (\d+ [\w ]+)|(error sending request)", text)
    return (status[1] or status[2]) if status else " ".join(text.partition("\n")[0].split())[:200]
