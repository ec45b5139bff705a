"""A page in headless Chromium, driven through its debugging pipe: what its console says, and what its script sees.

Chromium is `$TUNER_TEST_CHROMIUM`, or one on the path.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
FLAGS = (
    "--headless=shell", "--no-sandbox", "--no-zygote", "--single-process", "--disable-dev-shm-usage",
    "--in-process-gpu", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
    "--remote-debugging-pipe",
)  # fmt: skip
TIMEOUT_S = 30.0


def chromium() -> str | None:
    """The browser's path, where there is one."""
    return os.environ.get("TUNER_TEST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """Chromium with one tab, 1280 pixels wide."""

    def __init__(self, program: str, home: Path) -> None:
        self.said: list[str] = []
        """What the console of the page was told, errors that nobody caught included."""
        (commands, self._write), (self._read, answers) = _pipe(), _pipe()
        libraries = Path(program).resolve().parent / "al2023" / "lib"  # beside a browser packed for a bare machine
        env = {**os.environ, "HOME": str(home)}
        if libraries.is_dir():
            env["LD_LIBRARY_PATH"] = f"{libraries}:{libraries.parents[1]}"

        words = [program, *FLAGS, f"--user-data-dir={home / 'profile'}", "about:blank"]
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        ends = [(os.POSIX_SPAWN_DUP2, commands, 3), (os.POSIX_SPAWN_DUP2, answers, 4)]  # where it looks for them
        self._process = os.posix_spawn(program, words, env, file_actions=[*quiet, *ends])
        os.close(commands)
        os.close(answers)
        self._number, self._rest, self._session = 0, b"", None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol; its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, dark: bool = False) -> None:
        """Load a file and wait until it is drawn."""
        self("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[theme])
        self("Page.navigate", url=path.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            got = os.read(self._read, 1 << 16)
            assert got, "Chromium ended"
            self._rest += got
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        if message.get("method") == "Runtime.consoleAPICalled":
            self.said.append(json.dumps(message["params"]["args"]))
        elif message.get("method") == "Runtime.exceptionThrown":
            self.said.append(json.dumps(message["params"]["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded":
            self.said.append(message["params"]["entry"]["text"])
        return message

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._read)
        os.close(self._write)


def _pipe() -> tuple[int, int]:
    """The ends of a pipe, well above the descriptors that a new process is given."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
