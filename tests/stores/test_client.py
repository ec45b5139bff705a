"""What goes wrong at a store is said by name, with the URL and what to do; nothing is lost by it."""

import os
import subprocess
import sys
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fixtures.store_proxy import Answer, Request, forward, proxied
from tests.fixtures.store_servers import BUCKET, Server, serving
from tests.stores.conftest import contents, filled
from tuner.errors import ExitCode, MachineError
from tuner.stores import client, transfer
from tuner.stores.client import Client
from tuner.stores.directory import StoreDirectory
from tuner.stores.transfer import upload as put_files


def refusal(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>said</Message></Error>'.encode()


CASES = [
    (404, "NoSuchBucket", "there is no such bucket", "AWS_ENDPOINT_URL"),
    (403, "AccessDenied", "these credentials have no right to do this", "read, write, list and delete"),
    (403, "InvalidAccessKeyId", "the store knows no such credentials", "AWS_SECRET_ACCESS_KEY"),
    (403, "SignatureDoesNotMatch", "the store knows no such credentials", "AWS_SECRET_ACCESS_KEY"),
    (400, "AuthorizationHeaderMalformed", "the bucket is in another region", "AWS_REGION"),
    (301, "PermanentRedirect", "the bucket is in another region", "AWS_REGION"),
    (403, "RequestTimeTooSkewed", "this machine's clock differs too much", "timedatectl"),
    (503, "SlowDown", "the store does not answer", "when it can be reached again"),
]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.2)


def away(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in Server("s3", port).environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("status", "code", "cause", "hint"), CASES)
def test_a_refusal_is_said_by_name(
    hasty: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, code: str, cause: str, hint: str
) -> None:
    stage = filled(tmp_path / "stage", 1)
    with proxied(1, lambda _: Answer(status, [("Content-Type", "application/xml")], refusal(code))) as proxy:
        away(proxy.port, monkeypatch)
        directory = StoreDirectory.open("s3://bucket/runs/x")
        for ask in (directory.newest, lambda: directory.fetch(stage), directory.lease(stage, True).__enter__):
            with pytest.raises(MachineError, match=rf"s3://bucket/runs/x: {cause}") as error:
                ask()
            assert hint in str(error.value.hint) and error.value.exit_code == ExitCode.ENVIRONMENT
    assert len(contents(stage)) == 5


def test_a_server_that_is_not_there_is_said(hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    away(9, monkeypatch)
    with pytest.raises(MachineError, match="s3://bucket/x: the store does not answer"):
        StoreDirectory.open("s3://bucket/x").newest()


def test_without_the_library_its_line_is_said() -> None:
    code = "import sys; sys.modules['obstore'] = None\nfrom tuner.stores.client import Client\nClient.connect('s3://b/x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "s3://b/x: the library obstore is missing" in done.stderr


def test_few_parts_are_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transfer, "PART_BYTES", 10)
    monkeypatch.setattr(transfer, "SMALL_BYTES", 0)
    (tmp_path / "file").write_bytes(bytes(1000))
    read = done = most = 0
    part = transfer.OpenFile.part

    def counted(*words: object) -> bytes:
        nonlocal read, most
        read += 1
        most = max(most, read - done)
        return part(*words)  # type: ignore[arg-type]

    def put(*_: object) -> None:
        nonlocal done
        done += 1

    monkeypatch.setattr(transfer.OpenFile, "part", counted)
    file = transfer.open_file(tmp_path / "file", "file", 0)
    assert file is not None
    put_files(SimpleNamespace(put=put), [file])  # type: ignore[arg-type]
    assert (done, most <= transfer.IN_FLIGHT + 1) == (100, True)


@pytest.mark.parametrize("asked", [{}, {"AWS_CHECKSUM_ALGORITHM": "sha256"}])
def test_a_body_goes_with_a_checksum(monkeypatch: pytest.MonkeyPatch, asked: dict[str, str]) -> None:
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    sent: list[dict[str, str]] = []

    def record(_: int, request: Request) -> Answer:
        sent.append({name.lower(): value for name, value in request.headers.items()})
        return Answer(200, [("ETag", '"1"')], b"")

    with proxied(1, lambda _: None, record) as proxy:
        away(proxy.port, monkeypatch)
        Client.connect("s3://bucket/x").put("key", b"123456789")
    kind, value = ("sha256", None) if asked else ("crc64nvme", b64encode(0xAE8B14860A799888.to_bytes(8)).decode())
    assert sent[0]["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD" and "authorization" in sent[0]
    assert sent[0][f"x-amz-checksum-{kind}"] == (value or b64encode(sha256(b"123456789").digest()).decode())


@pytest.mark.slow
def test_bytes_that_a_line_changed_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = iter([True, True, False])

    def send(port: int, request: Request) -> Answer:
        return forward(port, replace(request, body=b"other") if request.kind == "put" and next(changed) else request)

    with serving("s3", tmp_path) as server, proxied(server.port, lambda _: None, send) as proxy:
        away(proxy.port, monkeypatch)
        there = Client.connect(f"s3://{BUCKET}/x")
        for _ in range(2):
            with pytest.raises(MachineError, match="BadDigest"):
                there.put("key", b"bytes")
        there.put("key", b"bytes")
        assert there.part("key", 0, 5) == b"bytes"


@pytest.mark.slow
def test_a_real_store_keeps_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stage = filled(tmp_path / "stage", 1)
    (stage / "checkpoints" / "step-1" / "large.bin").write_bytes(os.urandom(transfer.PART_BYTES * 2 + 1))
    with serving("s3", tmp_path) as server:
        away(server.port, monkeypatch)
        url = server.url("runs/a b/ü")
        directory = StoreDirectory.open(url)
        with directory.lease(stage, lock_is_free=True):
            assert directory.publish(directory.snapshot(stage, {})).number == 2
            assert directory.collect() == 0
        StoreDirectory.open(url).fetch(tmp_path / "there")
        assert contents(tmp_path / "there") == contents(stage)
        with pytest.raises(MachineError, match="there is no such bucket"):
            Client.connect("s3://missing/x").get("key")
