"""What campaigns and benchmarks have in common: commands of this tree, several ranks, lines of JSON, what is said."""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Start = Callable[..., "subprocess.Popen[Any]"]
STOPPED = 75
"""The exit code of a launch that was asked to stop, and saved."""


def asked(
    about: str | None, places: Mapping[str, Any] = {}, words: Sequence[str] | None = None, /, **flags: Any
) -> argparse.Namespace:
    """What a tool is called with, or the ``words`` given; its docstring is its help.

    ``places`` are named by their place, all else by `--name`. Each is its default, whose type it has, or several where
    that is a list; a type, where it has none; False for what is only switched on; or what argparse itself takes. Its
    help, where it has some, makes it a pair.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (*places.items(), *((f"--{name.replace('_', '-')}", value) for name, value in flags.items())):
        what, said = value if isinstance(value, tuple) else (value, None)
        parser.add_argument(name, help=said, **_taken(what))
    return parser.parse_args(words)


def _taken(value: Any) -> dict[str, Any]:
    """What argparse takes of an option."""
    if isinstance(value, dict):
        return value
    if value is False:
        return {"action": "store_true"}
    if isinstance(value, list):
        of_type = next((each if isinstance(each, type) else type(each) for each in value), str)
        return {"nargs": "+" if value else "*", "type": of_type, "default": None if of_type in value else value}
    return {"type": value} if isinstance(value, type) else {"type": type(value), "default": value}


def some(names: Iterable[str], default: Sequence[str] | None = None) -> dict[str, Any]:
    """Several of these names, without any all of them."""
    known = list(names)
    return {"nargs": "+", "choices": known, "default": default or known, "metavar": "NAME" if len(known) > 9 else None}


def one_of(names: Iterable[str], default: str | None = None) -> dict[str, Any]:
    """One of these names."""
    return {"choices": list(names), "default": default}


@contextmanager
def workplace(kept: Path | None = None) -> Iterator[Path]:
    """A directory for the block: one that is kept, where it is named, else an empty one that goes."""
    with tempfile.TemporaryDirectory(prefix="tuner-", ignore_cleanup_errors=True) as fresh:
        yield (kept or Path(fresh)).resolve()


def say(line: str) -> None:
    """Tell who watches: on stderr, since stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def environment(cache: Path | None = None, threads: int | None = 1, **more: str) -> dict[str, str]:
    """That of a command of this tree: so many threads, or as here, and a cache of its own where one is named."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {} if cache is None else {"TUNER_CACHE": str(cache)}
    own |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **own, **more}


def run(
    words: Sequence[str], cwd: Path | None, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words to its end, whatever that is."""
    command = [*prefix, sys.executable, *words]
    env = environment() if env is None else env
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def done(
    words: Sequence[str], cwd: Path | None, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> str:
    """The output of a command of Python. Raises RuntimeError, with the end of what it said, where it fails."""
    ended = run(words, cwd, env, prefix)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit code {ended.returncode}\n{ended.stderr[-4000:]}")
    return ended.stdout


def tuner(cwd: Path | None, *words: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()) -> Any:
    """The JSON document that a command of tuner answers with. Raises RuntimeError where it fails."""
    return json.loads(done(["-m", "tuner", *words, "--json"], cwd, env, prefix))


def read_lines(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """What a file of JSON lines holds, of one `kind` alone where that is named; nothing where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [line for line in map(json.loads, lines) if kind in (None, line.get("kind"))]


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class Results:
    """The results of a campaign: each is printed, and added to its file, if it has one, from which another goes on."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rows = [] if path is None else read_lines(path)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        """One more."""
        self.rows.append(row)
        line = json.dumps(row)
        print(line, flush=True)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def one_line(error: BaseException) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def verdicts(found: Iterable[tuple[str, str]], out: Path | None) -> int:
    """Print each verdict, and of each how many, with a file if one is named; the exit code, 1 where one differs."""
    said = {}
    for name, verdict in found:
        said[name] = verdict
        print(f"{name:44} {verdict}", flush=True)
    if out is not None:
        out.write_text(json.dumps(said, indent=1))
    print(dict(Counter(verdict.partition(":")[0] for verdict in said.values())))
    return int(any(verdict.startswith("differs") for verdict in said.values()))


def judged(problems: Iterable[str]) -> int:
    """Print problems as they are found, and how many there are; the exit code."""
    count = 0
    for problem in problems:
        count += 1
        print(f"PROBLEM {problem}", flush=True)
    print(f"{count} problems" if count else "everything holds")
    return 1 if count else 0


def free_port() -> int:
    """A port of the loopback that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch(  # noqa: PLR0913 - the parts of a launch
    directory: Path,
    world_size: int,
    words: Sequence[str],
    start: Start = subprocess.Popen,
    env: Mapping[str, str] | None = None,
    kill: tuple[float, int] | None = None,
) -> list[int]:
    """Run one process a rank; when one fails or dies of a signal, the others are killed too. Returns the exit codes.

    With ``kill``, a rank (-1: all) is killed after so many seconds. What a rank says is in `rankN.log`.
    """
    env = environment(directory / "cache", PYTHONWARNINGS="ignore") if env is None else env
    port = free_port()
    processes = []
    for rank in range(world_size):
        ranks = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = {key: str(value) for key, value in (ranks | place).items()} if world_size > 1 else {}
        with (directory / f"rank{rank}.log").open("w") as log:
            line = [sys.executable, *words]
            processes.append(start(line, cwd=directory, env={**env, **own}, stdout=log, stderr=log))
    began = time.monotonic()
    while any(process.poll() is None for process in processes):
        if kill is not None and time.monotonic() - began >= kill[0]:
            for rank, process in enumerate(processes):
                if kill[1] in (-1, rank):
                    process.kill()
            kill = None
        if any(process.poll() not in (None, 0, STOPPED) for process in processes):
            time.sleep(0.1)
            for process in processes:
                process.kill()
        time.sleep(0.02 if kill is None else 0.002)
    return [process.wait() for process in processes]


def trained(directory: Path, world_size: int, words: Sequence[str], start: Start = subprocess.Popen) -> None:
    """The same of a launch that has to end well. Raises RuntimeError."""
    if any(codes := launch(directory, world_size, words, start)):
        raise RuntimeError(f"{' '.join(words)}: {codes}\n{(directory / 'rank0.log').read_text()[-2000:]}")
