"""A GGUF file in llama.cpp's own server, in a process that ends with this one, asked over a local connection.

As it is served it is what anybody who serves the file gets: its tokenizer, its template, its cache of float16. To be
held against a model in transformers it has a cache of float32. Its keys are read without its arrays and tensors.
"""

import contextlib
import importlib.util
import json
import os
import secrets
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from threading import Timer
from typing import Any, BinaryIO

from tuner.errors import DataError, MachineError, RecipeError
from tuner.runtime.files import scratch_dir

LOAD_S, ANSWER_S = 900.0, 600.0
"""How long a file may take to load, and the server to say the next thing."""
SERVER = ("-m", "tuner.export.gguf.llama_server")
"""What Python runs: it reads the job in a line, prints the address, and serves until it is killed."""
GREEDY: Mapping[str, Any] = {"temperature": -1}
_FORCED = 1e6
"""What is added to a token's logit so that it is the one that is drawn; log-probabilities are of the logits before."""
_TRIES = (256, 1 << 30)
"""How many of the likeliest tokens are asked for, to find one whose own log-probability the server does not give."""
_IDS = "tokenizer.ggml.{}_token_id"


@dataclass(frozen=True)
class Answered:
    """A piece of an answer; the last one has why it ended: `eos`, `word` (one of the stops) or `limit`."""

    text: str
    tokens: int = 0
    why: str | None = None


Likeliest = tuple[int, dict[int, float]]
"""The token that was chosen, and the log-probabilities of the likeliest by their ids."""


@dataclass(frozen=True)
class Engine:
    """A file that llama.cpp has loaded. What it refuses is a RecipeError, and a MachineError if it is gone."""

    path: Path
    keys: Mapping[str, Any]
    context: int
    """Tokens that it takes, with those of the answer."""
    address: str
    key: str
    why_gone: Callable[[], str]

    @property
    def has_template(self) -> bool:
        """Whether the file has a chat template; llama.cpp would take one of its own."""
        return "tokenizer.chat_template" in self.keys

    def special(self, name: str) -> int | None:
        """The id of `bos` or `eos`; None where the file has none."""
        found: int | None = self.keys.get(_IDS.format(name))
        return found

    @cached_property
    def frame(self) -> list[int]:
        """What is put before a text."""
        bos = self.special("bos")
        return [bos] if bos is not None and self.ids("", framed=True)[:1] == [bos] else []

    def ids(self, text: str, framed: bool = False) -> list[int]:
        """The tokens of a text, with what frames it or without."""
        return list(self.ask("/tokenize", {"content": text, "add_special": framed, "parse_special": True})["tokens"])

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones written out."""
        return str(self.ask("/detokenize", {"tokens": list(ids)})["content"])

    def rendered(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> str:
        """A chat up to the assistant's turn, without what frames a text."""
        chat = {"messages": list(messages), **({"tools": tools} if tools else {})}
        return str(self.ask("/apply-template", chat)["prompt"])

    def answer(
        self, prompt: Sequence[int], limit: int, sampling: Mapping[str, Any], stops: Sequence[str] = ()
    ) -> Iterator[Answered]:
        """The pieces of an answer of at most so many tokens, special ones left out."""
        body = {"prompt": list(prompt), "n_predict": limit, "stop": list(stops), "stream": True, **sampling}
        with self._asked("/completion", body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    piece = json.loads(line[6:])
                    why = piece["stop_type"] if piece["stop"] else None
                    yield Answered(piece["content"], piece["tokens_predicted"], why)

    def log_probability(self, context: Sequence[int], token: int) -> tuple[float, bool]:
        """Of a token after others, in nats, and whether it is the likeliest.

        The server gives none of a token that ends inside a character: it is looked up among the likeliest then, with
        the end of the text drawn in its place.
        """
        body = {"prompt": list(context), "n_predict": 1, **GREEDY, "cache_prompt": True}
        said = self.ask("/completion", {**body, "n_probs": 1, "logit_bias": [[token, _FORCED]]})
        if steps := said.get("completion_probabilities"):
            return float(steps[0]["logprob"]), steps[0]["top_logprobs"][0]["id"] == token
        for most in _TRIES:
            ended = [[self.special("eos") or 0, _FORCED]]
            said = self.ask("/completion", {**body, "n_probs": most, "logit_bias": ended})
            for at, each in enumerate(said["completion_probabilities"][0]["top_logprobs"]):
                if each["id"] == token:
                    return float(each["logprob"]), at == 0
        raise DataError(f"{self.path}: llama.cpp gives no probability of token {token}")

    def continued(self, prompt: Sequence[int], tokens: int, top: int) -> tuple[list[int], list[Likeliest]]:
        """The likeliest tokens one after another, and what it says of each but those that end inside a character."""
        body = {"prompt": list(prompt), "n_predict": tokens, **GREEDY, "n_probs": top, "return_tokens": True}
        said = self.ask("/completion", {**body, "cache_prompt": False})
        return said["tokens"], [
            (step["id"], {each["id"]: each["logprob"] for each in step["top_logprobs"]})
            for step in said.get("completion_probabilities", [])
        ]

    def ends(self, prompt: Sequence[int], token: int) -> bool:
        """Whether generation stops at a token."""
        body = {"prompt": list(prompt), "n_predict": 2, **GREEDY, "logit_bias": [[token, _FORCED]]}
        return bool(self.ask("/completion", body)["stop_type"] == "eos")

    def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """What it answers."""
        with self._asked(path, body) as response:
            answer: dict[str, Any] = json.loads(response.read())
        return answer

    @contextmanager
    def _asked(self, path: str, body: Mapping[str, Any]) -> Iterator[HTTPResponse]:
        connection = HTTPConnection(self.address, timeout=ANSWER_S)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        with contextlib.closing(connection):  # which ends what the server still computes
            try:
                connection.request("POST", path, json.dumps(body), headers)
                response = connection.getresponse()
                if response.status != 200:  # noqa: PLR2004 - of HTTP
                    raise RecipeError(f"llama.cpp refuses: {json.loads(response.read())['error']['message']}")
                yield response
            except TimeoutError as error:
                raise MachineError(f"llama.cpp said nothing for {ANSWER_S:.0f} s") from error
            except (OSError, HTTPException) as error:
                raise MachineError(f"llama.cpp ended: {self.why_gone()}") from error


def require_library() -> None:
    """Raise MachineError where llama.cpp is not there."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise MachineError("the library xllamacpp is missing", hint="install it: pip install gguf xllamacpp")


@contextmanager
def served(path: Path, context: int, exact: bool = False, adapter: Path | None = None) -> Iterator[Engine]:
    """A file for the block, with room for ``context`` tokens or as many as its model takes.

    ``exact`` computes in float32 alone, with all of that room. Raises DataError for a file that llama.cpp does not
    load, MachineError where the library is missing.
    """
    require_library()
    keys = read_keys(path)
    if keys.get("general.type") == "adapter":
        raise DataError(f"{path}: is an adapter by itself, which llama.cpp adds to a file of its base")
    takes = int(keys.get(f"{keys.get('general.architecture')}.context_length", context))
    context = context if exact else min(context, takes)
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    key = secrets.token_hex(16)
    job = {"model": str(path), "context": context, "threads": threads, "key": key, "exact": exact}
    job["adapter"] = None if adapter is None else str(adapter)
    with scratch_dir("gguf-") as directory, (directory / "llama.log").open("wb") as log:
        # In a session of its own: Ctrl-C ends an answer, not the server.
        process = subprocess.Popen(
            [sys.executable, *SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
        too_long = Timer(LOAD_S, process.kill)
        try:
            assert process.stdin is not None and process.stdout is not None
            too_long.start()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
            address = process.stdout.readline().decode().strip()
            too_long.cancel()
            if not address:
                raise DataError(f"{path}: llama.cpp cannot load it: {_said_in(directory / 'llama.log')}")
            yield Engine(path, keys, context, address, key, lambda: _said_in(directory / "llama.log"))
        finally:
            too_long.cancel()
            process.kill()
            process.communicate()


def _said_in(log: Path) -> str:
    """The line of a log that says what went wrong, else its last one."""
    lines = log.read_text(errors="replace").splitlines()
    why = next((line for line in lines if "error" in line.lower() or "GGML_ASSERT" in line), (lines or ["?"])[-1])
    of_template = next((f" {line}" for line in lines if line.startswith("Error: ")), "")
    return why.rpartition(" E ")[2].strip() + of_template  # without the time and the level


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The kinds of values of the format, as `struct` calls them."""
_TEXT, _ARRAY = 8, 9
_MOST = 1 << 26
"""Bytes of a text, such as a template, at most."""


def read_keys(path: Path) -> dict[str, Any]:
    """Every key of a file with its value; an array is the number of its elements. Raises DataError."""
    try:
        with path.open("rb") as file:
            magic, version, _, count = _read(file, "4sIQQ")
            if magic != b"GGUF" or version < 2:  # noqa: PLR2004 - lengths of 8 bytes since
                raise ValueError(f"begins with {magic!r}, version {version}")
            return {_text(file): _value(file, *_read(file, "I")) for _ in range(count)}
    except (OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise DataError(f"{path}: is no readable GGUF file: {error}") from error


def _read(file: BinaryIO, form: str) -> tuple[Any, ...]:
    data = file.read(size := struct.calcsize(f"<{form}"))
    if len(data) < size:
        raise ValueError("ends early")
    return struct.unpack(f"<{form}", data)


def _text(file: BinaryIO) -> str:
    (length,) = _read(file, "Q")
    if length > _MOST:
        raise ValueError(f"a text of {length:,} bytes")
    return file.read(length).decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _TEXT:
        return _text(file)
    if kind != _ARRAY:
        return _read(file, _SCALARS[kind])[0]
    of, count = _read(file, "IQ")
    if of == _TEXT:
        for _ in range(count):
            file.seek(_read(file, "Q")[0], 1)
    else:
        file.seek(struct.calcsize(f"<{_SCALARS[of]}") * count, 1)
    return count
