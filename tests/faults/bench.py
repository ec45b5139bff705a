"""What the faults strike: tiny trainings, their starting points, and how what is left is judged."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.calls import Call
from tests.faults.ranks import run_ranks
from tests.faults.supervisor import Fault, Trace, supervise

DETERMINED = ("kind", "step", "epoch", "tokens", "loss", "lr", "grad_norm")
RUN = Path("runs/a")
ORDER = "order.txt"
MODULES = "modules.txt"
COMMITTED = re.compile(r"/runs/a/checkpoints/step-(\d+)")
CASES: dict[str, str] = {
    "lora": """\
adapter: {kind: lora, r: 2, dropout: 0.2}
train: {duration: 4 steps, global_batch_size: 4, micro_batch_size: 2, precision: fp32, device: cpu}
checkpoint: {every: 1 steps, keep: 1, keep_best: eval/loss}
eval: {every: 2 steps, at_start: false, samples: 1}
logging: {level: info, console_every: 1 h}
""",
    "full": """\
train: {duration: 4 steps, global_batch_size: 4, micro_batch_size: 2, precision: fp32, device: cpu}
checkpoint: {every: 1 steps, keep: 1, marks: [2 steps]}
eval: {every: never, at_start: false, at_end: false, samples: 0}
optimizer: {kind: muon}
logging: {level: warning, console_every: 1 h}
""",
}
"""Recipes by name: an adapter with dropout, evaluations and a best one; all weights under Muon with a marked step."""

COMMON = """\
model: {name_or_path: %s, kernels: torch}
tokenizer: {name_or_path: byte}
data: {train: %s, eval: 10%%, max_length: 64, packing: false, workers: 1}
optimizer: {lr: 1e-2}
"""


@dataclass(frozen=True)
class Job:
    """A command line, what the directory holds before, and the command line that finishes it after a fault."""

    name: str
    start: str
    command: tuple[str, ...]
    again: tuple[str, ...]


@dataclass
class Sound:
    """What unbroken work leaves: hashes by step, the log, the rows of each step, files."""

    sha256: dict[int, str] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    order: dict[int, str] = field(default_factory=dict)
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    """By job: SHA-256 of the files that must come out alike."""
    kept: set[int] = field(default_factory=set)


class Bench:
    """One case in a directory of its own: `inputs`, `trial` (the root that is struck), and starting points."""

    def __init__(self, directory: Path, case: str, beside: bool = False, processes: int = 1) -> None:
        self.directory = directory
        self.case = case
        self.beside = beside
        """Whether checkpoints are saved beside training."""
        self.processes = processes
        """How many train."""
        self.root = directory / "trial"
        self.recipe = directory / "inputs" / "r.yaml"
        self.sound = Sound()
        self.jobs: dict[str, Job] = {}
        self.traces: dict[str, Trace] = {}
        """The unbroken work of each job, with every written byte."""

    def set_up(self) -> None:
        """Write the inputs, do every job once unbroken, and keep what it began from."""
        saves = f"checkpoint: {{async_save: {str(self.beside).lower()}}}\n"
        _write_inputs(self.directory / "inputs", saves + CASES[self.case])
        train = ("train", str(self.recipe), "--name", "a", "--resume", "auto")
        again = ("resume", str(RUN))
        export = ("export-hf", str(RUN), "--shard-size", "20KB")
        for job in (
            Job("prepare", "empty", ("prepare-data", str(self.recipe)), ("prepare-data", str(self.recipe))),
            Job("train", "prepared", train, train),
            Job("resume", "broken", again, again),
            Job("export", "trained", export, export),
        ):
            self.jobs[job.name] = job
        self.root.mkdir()
        self._keep("empty")
        self._unbroken("prepare", "prepared")
        self._note_steps()
        self._unbroken("train", "trained")
        self._note_run()
        self._break_a_run()
        self._unbroken("resume")
        self._unbroken("export")
        settle()

    def restore(self, start: str) -> None:
        """Begin again from a starting point."""
        self.clear()
        shutil.copytree(self.directory / start, self.root, symlinks=True)

    def clear(self) -> None:
        """Leave nothing of the trial before."""
        shutil.rmtree(self.root, ignore_errors=True)
        (self.directory / ORDER).write_bytes(b"")

    def run(self, command: tuple[str, ...], fault: Fault | None = None, record: bool = False) -> Trace:
        """Run a command line in a child at the root."""
        return supervise(lambda: self._work(command), self.root, fault, record)

    def problems(self, job: Job, committed: int | None) -> list[str]:
        """What is wrong with the directory as a fault left it; `committed` is the newest step that must be there."""
        return [*self._half_made(job), *self._lost(committed)]

    def final_problems(self, job: Job) -> list[str]:
        """What differs from unbroken work once the job was finished after a fault."""
        found = [f"left over: {path}" for path in left_over(self.root)]
        if job.name in self.sound.files and contents(self.root / self._result(job)) != self.sound.files[job.name]:
            found.append(f"{self._result(job)} differs from that of an unbroken {job.name}")
        if job.name in ("train", "resume"):
            found += self._run_problems()
        return found

    def committed(self, start: str, trace: Trace, durable: bool = False) -> int | None:
        """The newest step whose rename ran (with `durable`: and was flushed) in what a child did."""
        steps = [int(path.name[5:]) for path in (self.directory / start / RUN / "checkpoints").glob("step-*")]
        ran = trace.calls
        for number, call in enumerate(ran):
            if number == trace.struck_at - 1:  # it did not run
                continue
            match = COMMITTED.search(call.other) if call.kind == "rename" else None
            if match is not None and (not durable or _flushed(ran[number:], str(Path(call.other).parent))):
                steps.append(int(match[1]))
        return max(steps, default=None)

    def launches(self) -> list[dict[str, Any]]:
        """What the run's record says of its launches; none where there is no record."""
        record = self.root / RUN / "run.json"
        return list(json.loads(record.read_text())["launches"]) if record.exists() else []

    def outside(self, trace: Trace) -> list[Call]:
        """Calls that changed files elsewhere than at the root, the harness's own left out."""
        own = (str(self.directory / ORDER), str(self.directory / MODULES))
        return [call for call in trace.strays if call.path not in own]

    def _result(self, job: Job) -> Path:
        """What a job makes, whose bytes are always the same."""
        return Path("cache") if job.name == "prepare" else RUN / "exports" / f"step-{max(self.sound.sha256)}"

    def _work(self, command: tuple[str, ...]) -> int:
        os.environ["TUNER_CACHE"] = str(self.root / "cache")
        note_order(self.directory / ORDER)
        try:
            if self.processes > 1 and command[0] in ("train", "resume"):
                return run_ranks(self.processes, lambda: command_line(command))
            return command_line(command)
        finally:
            if not self.jobs.keys() <= self.traces.keys():
                (self.directory / MODULES).write_text("\n".join(sys.modules))

    def _unbroken(self, name: str, keep: str | None = None) -> None:
        job = self.jobs[name]
        self.restore(job.start)
        trace = self.traces[name] = self.run(job.command, record=True)
        _import(self.directory / MODULES)
        if trace.code or self.outside(trace):
            raise RuntimeError(f"{self.case} {name}: exit code {trace.code}, {self.outside(trace)}\n{trace.output}")
        if name in ("prepare", "export"):
            self.sound.files[name] = contents(self.root / self._result(job))
        if keep is not None:
            self._keep(keep)
        if found := self.final_problems(job) if name != "train" else []:
            raise RuntimeError(f"{self.case} {name}: the unbroken work is not sound: {found}")

    def _note_steps(self) -> None:
        """Hash every step in a run that keeps them all."""
        from tuner.checkpoint.load import content_sha256, open_checkpoint

        self.restore("prepared")
        every = ("--checkpoint.every", "1 steps", "--checkpoint.keep", "99")
        trace = self.run((*self.jobs["train"].command, *every))
        if trace.code:
            raise RuntimeError(trace.output)
        for path in (self.root / RUN / "checkpoints").iterdir():
            self.sound.sha256[int(path.name[5:])] = content_sha256(open_checkpoint(path))

    def _note_run(self) -> None:
        self.sound.files["settled"] = settled_files(self.root / RUN)
        self.sound.log, self.sound.samples = read_log(self.root / RUN)
        self.sound.order = read_order(self.directory / ORDER)[0]
        self.sound.kept = {int(path.name[5:]) for path in (self.root / RUN / "checkpoints").iterdir()}

    def _break_a_run(self) -> None:
        """A starting point of `resume`: killed in the middle of pruning, or of the next save."""
        calls = self.traces["train"].calls
        wanted = "/.trash-" if self.case == "lora" else "/.tmp-step-3"
        at = next(n for n, call in enumerate(calls, 1) if wanted in call.path and call.kind in ("unlink", "flush"))
        self.restore("prepared")
        trace = self.run(self.jobs["train"].command, Fault(at, "kill"))
        if not trace.struck:
            raise RuntimeError("the run was not broken")
        self._keep("broken")

    def _keep(self, name: str) -> None:
        shutil.copytree(self.root, self.directory / name, symlinks=True)

    def _half_made(self, job: Job) -> Iterator[str]:
        """Directories under a final name that are not whole."""
        from tuner.checkpoint.load import content_sha256, open_checkpoint
        from tuner.checkpoint.steps import step_dirs
        from tuner.data.building.cache import LEVELS, Entry, damages
        from tuner.errors import TunerError

        for step, path in step_dirs(self.root / RUN / "checkpoints"):
            try:
                if content_sha256(open_checkpoint(path)) != self.sound.sha256[step]:
                    yield f"{path.name} holds other tensors than in an unbroken run"
            except TunerError as error:
                yield f"half made: {error.message}"
        for level in LEVELS:
            for path in (self.root / "cache" / level).glob("[0-9a-f]*"):
                yield from (f"half made: {damage}" for damage in damages(Entry(level, path, None)))
        for path in (self.root / RUN / "exports").glob("step-*"):
            if contents(path) != self.sound.files.get("export"):
                yield f"half made: {path.name} of exports"
        record = self.root / RUN / "run.json"
        if record.exists():
            try:
                json.loads(record.read_bytes())
            except ValueError as error:
                yield f"half made: run.json ({error})"

    def _lost(self, committed: int | None) -> Iterator[str]:
        from tuner.checkpoint.load import newest

        warnings: list[str] = []
        found = newest(self.root / RUN / "checkpoints", warnings.append)
        yield from warnings
        step = None if found is None else found.step
        if committed is not None and (step is None or step < committed):
            yield f"lost: step {committed} was committed, {step} is found"

    def _run_problems(self) -> Iterator[str]:
        from tuner.checkpoint.load import content_sha256, open_checkpoint

        log, samples = read_log(self.root / RUN)
        if log != self.sound.log:
            yield f"the log differs: {first_difference(log, self.sound.log)}"
        if samples != self.sound.samples:
            yield "samples.jsonl differs"
        order, contradictions = read_order(self.directory / ORDER)
        yield from contradictions
        if any(self.sound.order[step] != rows for step, rows in order.items()):
            yield "the order of rows differs"
        if settled_files(self.root / RUN) != self.sound.files["settled"]:
            yield "recipe, tokenizer or model_config differ"
        record = json.loads((self.root / RUN / "run.json").read_text())
        if record["status"] != "finished":
            yield f"the record says {record['status']}"
        kept = {int(path.name[5:]): path for path in (self.root / RUN / "checkpoints").glob("step-*")}
        # What a launch went on from does not count towards `keep`: a resumed run may hold one or two more.
        if not self.sound.kept <= kept.keys() or len(kept) > len(self.sound.kept) + 2:
            yield f"steps {sorted(kept)} are kept, {sorted(self.sound.kept)} in an unbroken run"
        for step, path in kept.items():
            if content_sha256(open_checkpoint(path)) != self.sound.sha256[step]:
                yield f"{path.name} holds other tensors than in an unbroken run"


def command_line(command: tuple[str, ...]) -> int:
    """Run a command of tuner in this process; returns its exit code."""
    from tuner.cli.main import run

    try:
        return run(list(command))
    except SystemExit as end:
        return int(end.code or 0)


def note_order(path: Path) -> None:
    """Have this process append the rows of each step that it trains to `path`."""
    from tuner.train import loop

    real: Callable[..., Any] = loop.optimizer_step

    def noted(learner: Any, index: int, batches: Any, *rest: Any) -> Any:
        digest = hashlib.sha256(batches.row_ids.tobytes())
        for batch in batches.micro:
            digest.update(batch.input_ids.tobytes())
        with path.open("a") as file:
            file.write(f"{learner.numerics.rank} {index + 1} {digest.hexdigest()}\n")
        return real(learner, index, batches, *rest)

    loop.optimizer_step = noted


def read_order(path: Path) -> tuple[dict[int, str], list[str]]:
    """The rows of each step, by rank and step in one number, and steps that were trained on other rows later."""
    order: dict[int, str] = {}
    wrong = []
    for line in path.read_text().splitlines():
        rank, step, rows = line.split()
        key = int(rank) * 1_000_000 + int(step)
        if order.setdefault(key, rows) != rows:
            wrong.append(f"step {step} was trained on other rows the second time")
    return order, wrong


def read_log(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the recipe determines of metrics.jsonl, and samples.jsonl."""
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = run / "samples.jsonl"
    told = [json.loads(line) for line in samples.read_text().splitlines()] if samples.exists() else []
    return [{key: line[key] for key in DETERMINED if key in line} for line in log], told


def first_difference(got: list[Any], wanted: list[Any]) -> str:
    """Where two logs part."""
    for left, right in zip(got, wanted, strict=False):
        if left != right:
            return f"{left} where {right} was wanted"
    return f"{len(got)} lines, {len(wanted)} were wanted"


def contents(directory: Path) -> dict[str, str]:
    """SHA-256 of every file but locks and what is unfinished."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and "/." not in str(path)]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def settled_files(run: Path) -> dict[str, str]:
    """SHA-256 of what a run writes once, when it begins."""
    names = ("recipe.yaml", "recipe.resolved.yaml", "tokenizer/", "model_config/")
    return {name: digest for name, digest in contents(run).items() if name.startswith(names)}


def left_over(root: Path) -> list[str]:
    """Names of unfinished and unwanted things."""
    return [str(path.relative_to(root)) for path in root.rglob(".t*") if path.name.startswith((".tmp-", ".trash-"))]


def label(call: Call, root: Path) -> str:
    """A call as one of the distinct points: its name and its file, without what is random."""
    names = [path.removeprefix(str(root)).lstrip("/") for path in (call.path, call.other) if path]
    text = " -> ".join(name or "." for name in names)
    text = re.sub(r"\b(?:[0-9a-f]{16}){1,4}\b", "<key>", text)
    text = re.sub(r"-(?:\d+-)?[0-9a-f]{8}\b", "-<random>", text)
    return f"{call.name} {re.sub(r'(<key>-)[0-9]+', r'<key>-<pid>', text)}"


def phase(call: Call) -> str:
    """The part of the work that a call belongs to, by its path."""
    path = f"{call.path} {call.other}"
    if "/exports" in path:
        return "export"
    if "/cache" in path:
        return "prepare"
    if "/checkpoints" in path:
        if "/.trash-" in path:
            return "prune"
        if "/.tmp-" in path:
            return "sweep" if call.kind in ("unlink", "rmdir") else "save"
        return "save"
    if re.search(r"/(metrics|samples)\.jsonl|/\.tmp-(metrics|samples)", path):
        return "records"
    return "run"


def _import(names: Path) -> None:
    """Have what a child imported here too, so that the next ones find it."""
    for name in names.read_text().splitlines():
        if name.partition(".")[0] in ("tuner", "torch", "transformers", "peft", "pyarrow", "tokenizers", "jinja2"):
            with suppress(ImportError):
                importlib.import_module(name)


def _flushed(calls: list[Call], directory: str) -> bool:
    return any(call.kind == "flush" and call.path == directory for call in calls)


def _result(job: Job) -> Path:
    return Path("cache") if job.name == "prepare" else RUN / "exports"


def _write_inputs(directory: Path, recipe: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    directory.mkdir()
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    rng = random.Random(0)
    rows = [{"prompt": f"{i} ", "completion": "ab" * rng.randint(1, 10)} for i in range(12)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = _merged(COMMON % (directory / "model", directory / "rows.jsonl"), recipe)
    (directory / "r.yaml").write_text(text)


def _merged(common: str, own: str) -> str:
    """The common recipe with a case's own; a section may be in both."""
    sections: dict[str, str] = {}
    for line in (common + own).splitlines():
        name, _, rest = line.partition(": ")
        before = sections.get(name)
        sections[name] = rest if before is None else f"{before[:-1]}, {rest[1:]}"
    return "".join(f"{name}: {rest}\n" for name, rest in sections.items())


@contextmanager
def scratch(prefix: str = "tuner-faults-") -> Iterator[Path]:
    """A directory that goes away, in memory where there is such a place: flushing costs nothing there."""
    import tempfile

    shared = Path("/dev/shm")
    place = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place) as directory:
        yield Path(directory)


@contextmanager
def fork_server() -> Iterator[None]:
    """Make this process one that children are forked from: one thread, no network, and what they would do again done.

    The collector leaves alone what is there once `settle` was called: walking it would copy every page in each child.
    """
    import torch

    from tuner.runtime.peak import measured_peak

    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    torch.set_num_threads(1)
    measured_peak("cpu", "fp32", 0)
    try:
        yield
    finally:
        gc.unfreeze()


def settle() -> None:
    """Leave what has been made so far to all children."""
    gc.collect()
    gc.freeze()
