"""A webhook hears how a launch ended, from a server of its own; whatever it does, the launch ends as it would."""

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tables import cases
from tests.fixtures.trainings import loaded
from tuner.config.load import load_recipe
from tuner.config.recipe import WEBHOOK_VARIABLE
from tuner.errors import DivergedError, RecipeError
from tuner.run.launch import launch
from tuner.run.options import LaunchOptions, Resume, RunResult
from tuner.run.webhook import posted
from tuner.runtime import stop

KEYS = {
    "schema_version", "text", "event", "run", "run_dir", "host", "step", "total_steps", "saved_step", "loss",
    "eval_loss", "seconds", "exit_code", "why", "hint", "tuner",
}  # fmt: skip
SHORT = {"train__duration": "2 steps", "checkpoint__every": "never"}


@dataclass
class Listener:
    """A server on the loopback that keeps what it is sent, and answers as it is asked to."""

    code: int = 200
    delay_s: float = 0.0
    location: str = ""
    paths: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    address: str = ""


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/json"
            made.bodies.append(json.loads(body))
            made.paths.append(f"{self.command} {self.path}")
            time.sleep(made.delay_s)
            self.send_response(made.code)
            if made.location:
                self.send_header("Location", made.location)
            self.end_headers()

        def do_GET(self) -> None:
            made.paths.append(f"{self.command} {self.path}")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    made.address = f"http://127.0.0.1:{server.server_port}/hooks/s3cret?key=s3cret"
    yield made
    server.shutdown()
    server.server_close()


def _launch(directory: Path, resume: Resume = "never", **flags: str) -> RunResult:
    return launch(loaded(directory, **SHORT | flags), LaunchOptions(resume))


def test_it_hears_of_a_stop_a_finish_and_a_divergence(
    workplace: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WEBHOOK_VARIABLE, listener.address)
    _launch(workplace, train__stop_after="1 step")
    result = _launch(workplace, "must")
    _launch(workplace, "auto")
    stopped, finished = listener.bodies
    assert stopped.keys() == finished.keys() == KEYS
    assert (stopped["event"], stopped["exit_code"], stopped["step"], stopped["why"]) == ("stopped", 75, 1, "stop_after")
    assert (finished["event"], finished["exit_code"], finished["step"]) == ("finished", 0, 2)
    assert finished["loss"] == result.metrics["loss"] and finished["total_steps"] == 2
    assert finished["text"] == "r finished at step 2 of 2"

    with pytest.raises(DivergedError):
        steep = {"optimizer__kind": "sgd", "optimizer__lr": "1e30"}
        _launch(workplace, name="bad", **steep)
    diverged = listener.bodies[-1]
    assert (diverged["event"], diverged["exit_code"]) == ("diverged", 7)
    assert diverged["text"].startswith("bad diverged at step ") and "step" in diverged["why"]
    for run in ("r", "bad"):
        for file in (workplace / "runs" / run).rglob("*"):
            assert not file.is_file() or b"s3cret" not in file.read_bytes(), file


def test_it_hears_of_the_chosen_events_and_of_failures_before_the_first_step(
    workplace: Path, listener: Listener
) -> None:
    address = listener.address.partition("?")[0]
    told = {"notify__webhook": address, "notify__events": "[failed]"}
    _launch(workplace, **told)
    assert listener.bodies == []
    (workplace / "model" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(Exception):  # noqa: B017, PT011 - whichever it is, it is the launch's own
        _launch(workplace, name="bad", **told)
    assert [body["event"] for body in listener.bodies] == ["failed"]
    assert listener.bodies[0]["exit_code"] > 0 and listener.bodies[0]["step"] is None


def test_it_hears_of_a_signal_that_ends_a_launch_before_its_steps(
    workplace: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def signalled(*given: object) -> RunResult:
        stop._undo[-1]()  # as the handler does, before the process ends
        assert [body["event"] for body in listener.bodies] == ["stopped"]
        raise KeyboardInterrupt

    monkeypatch.setattr("tuner.run.launch.train", signalled)
    with pytest.raises(KeyboardInterrupt):
        _launch(workplace, notify__webhook=listener.address.partition("?")[0])
    assert listener.bodies[0]["exit_code"] == 130 and stop._undo == []


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_it_is_not_led_elsewhere(listener: Listener, code: int) -> None:
    listener.code, listener.location = code, listener.address.replace("s3cret", "0ther")
    said = posted(listener.address, {"text": "done"}, 5)
    assert said == f"HTTP {code}: it leads elsewhere, which is not followed"
    assert listener.paths == ["POST /hooks/s3cret?key=s3cret"]


CONTINUE, HEADER = b"HTTP/1.1 100 Continue\r\n\r\n", b"a: " + b"b" * 60_000 + b"\r\n"


@pytest.mark.parametrize(
    ("first", "then", "pause_s", "said"),
    [
        (b"", b"", 0.0, "no answer in 0.4 s"),
        (b"HTTP/1.1 200 OK\r\n", b"a", 0.05, "no answer in 0.4 s"),
        (b"", CONTINUE, 0.001, "no answer in 0.4 s"),
        (b"HTTP/1.1 200 OK\r\n", HEADER, 0.0, "HTTPException"),
        (b"HTTP/1.1 " + b"2" * 70_000, b"2", 0.0, "LineTooLong"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"b" * 60_000, 0.0, None),
        (b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n", b"b" * 60_000, 0.0, "HTTP 302: it leads"),
    ],
    ids=["silent", "slow headers", "hundreds", "headers", "an endless line", "endless body", "led away"],
)
def test_whatever_a_server_sends_is_bounded(first: bytes, then: bytes, pause_s: float, said: str | None) -> None:
    """In time, and in memory: what it goes on sending is not read."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            taken, _ = server.accept()
            with taken, contextlib.suppress(OSError):
                taken.settimeout(2.0)
                taken.recv(1 << 16)
                taken.sendall(first)
                while then:
                    taken.sendall(then)
                    time.sleep(pause_s)
                while taken.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answer = posted(f"http://127.0.0.1:{server.getsockname()[1]}/", {"text": "done"}, 0.4)
        assert answer is None if said is None else answer is not None and answer.startswith(said)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32_000


def test_what_goes_wrong_is_a_warning_without_the_address(
    workplace: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(WEBHOOK_VARIABLE, listener.address)
    listener.code = 500
    assert _launch(workplace).status == "finished"
    assert "notify: 127.0.0.1 did not take the message (finished): HTTP 500" in (said := capsys.readouterr().err)
    monkeypatch.setenv(WEBHOOK_VARIABLE, "ftp://user:s3cret@example.org")
    assert _launch(workplace, name="other").status == "finished"
    said += capsys.readouterr().err
    assert "notify: the webhook's address is no http or https URL; nothing will be sent" in said
    assert "s3cret" not in said


def test_nobody_waits_longer_than_the_time_out(listener: Listener) -> None:
    listener.delay_s = 3.0
    began = time.monotonic()
    said = posted(listener.address, {"text": "x"}, 0.2)
    assert said is not None and time.monotonic() - began < 2.5
    assert posted("http://127.0.0.1:1/x", {}, 5.0) not in (None, "no answer in 5 s")


@pytest.mark.parametrize(("address", "said"), cases(__file__, "an_address_that_is_refused_is_not_repeated"))
def test_an_address_that_is_refused_is_not_repeated(address: str, said: str) -> None:
    recipe = {"model": {"name_or_path": "a/b"}, "data": {"train": "x"}, "notify": {"webhook": address}}
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe)
    assert said in str(caught.value) and "s3cret" not in str(caught.value)
