"""What the faults strike: tiny trainings, their starting points, and how what is left is judged."""

import gc
import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.caches import SHARED
from tests.faults.calls import Call
from tests.faults.cases import CASES, MESHES, RUN, Job, jobs_of, write_inputs
from tests.faults.evidence import Sound, contents, first_difference, left_over, read_log, read_order, settled_files
from tests.faults.ranks import TIMEOUT_S, run_ranks
from tests.faults.supervisor import Fault, Trace, supervise

ORDER = "order.txt"
MODULES = "modules.txt"
COMMITTED = re.compile(r"/runs/a/checkpoints/step-(\d+)")


class Bench:
    """One case in a directory of its own: `inputs`, `trial` (the root that is struck), and starting points."""

    def __init__(
        self, directory: Path, case: str, beside: bool = False, processes: int = 1, settings: str = ""
    ) -> None:
        self.directory = directory
        self.case = case
        self.of = {**CASES, **MESHES}[case]
        self.beside = beside
        """Whether checkpoints are saved beside training."""
        self.processes = max(processes, self.of.processes)
        """How many train."""
        self.settings = settings
        """Further lines of the recipe."""
        self.root = directory / "trial"
        self.recipe = directory / "inputs" / "r.yaml"
        self.sound = Sound()
        self.anew = Sound()
        """Of a run that was changed on its way: a part began anew, or the layout is another; without that, the same."""
        self.made: dict[str, dict[str, str]] = {}
        """SHA-256 of the files that preparation and export must make alike."""
        self.jobs: dict[str, Job] = {}
        self.traces: dict[str, Trace] = {}
        """The unbroken work of each job, with every written byte."""

    def set_up(self) -> None:
        """Write the inputs, do every job once unbroken, and keep what it began from."""
        settings = f"checkpoint: {{async_save: {str(self.beside).lower()}}}\n"
        settings += f"{self.settings}\n" if self.settings else ""
        if self.processes > 1:  # one that waits for a process that never began cannot know before
            settings += f"parallel: {{timeout: {TIMEOUT_S} s}}\n"
        write_inputs(self.directory / "inputs", self.of, settings)
        self.jobs = {job.name: job for job in jobs_of(self.of, self.recipe)}
        self.root.mkdir()
        self.run(("prepare-data", str(self.recipe), "--dry-run"))  # what transformers makes of the tokenizer is kept
        self._keep("empty")
        self._unbroken("prepare", "prepared")
        self._note_steps("train", self.sound)
        self._unbroken("train", "trained")
        self._break_a_run()
        self._note_resume()
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
        return supervise(lambda: self.work(command), self.root, fault, record)

    def problems(self, job: Job, committed: int | None) -> list[str]:
        """What is wrong with the directory as a fault left it; `committed` is the newest step that must be there."""
        return [*self._half_made(self.sound_of(job)), *self._lost(committed)]

    def final_problems(self, job: Job) -> list[str]:
        """What differs from unbroken work once the job was finished after a fault."""
        found = [f"left over: {path}" for path in left_over(self.root)]
        if job.name in self.made and contents(self.root / self._result(job)) != self.made[job.name]:
            found.append(f"{self._result(job)} differs from that of an unbroken {job.name}")
        if job.name in ("train", "resume"):
            found += self._run_problems(self.sound_of(job))
        return found

    def sound_of(self, job: Job) -> Sound:
        """What the run must come to in a job."""
        return self.anew if job.name == "resume" else self.sound

    def next_command(self, job: Job) -> tuple[str, ...]:
        """The command line that goes on with a job: what the run's record says of a reset is not asked for again."""
        record = self.root / RUN / "run.json"
        was_reset = record.exists() and json.loads(record.read_bytes()).get("resets")
        return job.again if was_reset else job.command

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
        """What a job makes, whose bytes are always the same: of an export the model, or the adapter alone."""
        exports = RUN / "exports"
        return Path("cache") if job.name == "prepare" else exports / os.readlink(self.root / exports / "latest")

    def work(self, command: tuple[str, ...]) -> int:
        """Do a command line in this process, a child at the root; returns its exit code."""
        os.environ["TUNER_CACHE"] = str(self.root / "cache")
        os.environ.pop(SHARED, None)  # what tests share lies elsewhere
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
            self.made[name] = contents(self.root / self._result(job))
            assert self.made[name], f"{name} made nothing"
        if name == "train":
            self.sound.note(self.root / RUN, self.directory / ORDER)
        elif name == "resume" and self.anew is not self.sound:
            self.anew.note(self.root / RUN, self.directory / ORDER)
            self.anew.kept -= {int(self.launches()[-1]["from_step"])}  # kept because this launch went on from it
        if keep is not None:
            self._keep(keep)
        if found := self.final_problems(job) if name != "train" else []:
            raise RuntimeError(f"{self.case} {name}: the unbroken work is not sound: {found}")

    def _note_steps(self, name: str, sound: Sound) -> None:
        """Hash every step in a run that keeps them all."""
        from tuner.checkpoint.load import content_sha256
        from tuner.checkpoint.open import open_checkpoint

        self.restore(self.jobs[name].start)
        every = ("--checkpoint.every", "1 steps", "--checkpoint.keep", "99")
        trace = self.run((*self.jobs[name].command, *every))
        if trace.code:
            raise RuntimeError(trace.output)
        for path in (self.root / RUN / "checkpoints").iterdir():
            sound.sha256[int(path.name[5:])] = content_sha256(open_checkpoint(path))

    def _note_resume(self) -> None:
        """What the job of that name must come to: the run itself, or one that was changed on its way."""
        if not (self.of.reset or self.of.mesh):
            self.anew = self.sound
            return
        self.anew.sha256 |= self.sound.sha256
        self._note_steps("resume", self.anew)

    def _break_a_run(self) -> None:
        """A starting point of `resume`: killed in the middle of pruning, or of the next save.

        By what the call is and not by its number: the thread that hashes the model's files counts, too, at any moment.
        """
        self.restore("prepared")
        trace = self.run(self.jobs["train"].command, Fault(1, "kill", only=self.of.broken))
        if not trace.struck:
            raise RuntimeError("the run was not broken")
        self._keep("broken")

    def _keep(self, name: str) -> None:
        shutil.copytree(self.root, self.directory / name, symlinks=True)

    def _half_made(self, sound: Sound) -> Iterator[str]:
        """Directories under a final name that are not whole."""
        from tuner.checkpoint.load import content_sha256
        from tuner.checkpoint.manifest import step_dirs
        from tuner.checkpoint.open import open_checkpoint
        from tuner.data.building.cache import LEVELS, Entry, damages
        from tuner.errors import TunerError

        for step, path in step_dirs(self.root / RUN / "checkpoints"):
            try:
                if content_sha256(open_checkpoint(path)) != sound.sha256[step]:
                    yield f"{path.name} holds other tensors than in an unbroken run"
            except TunerError as error:
                yield f"half made: {error.message}"
        for level in LEVELS:
            for path in (self.root / "cache" / level).glob("[0-9a-f]*"):
                yield from (f"half made: {damage}" for damage in damages(Entry(level, path, None)))
        for path in (self.root / RUN / "exports").glob("step-*"):
            if contents(path) != self.made.get("export"):
                yield f"half made: {path.name} of exports"
        record = self.root / RUN / "run.json"
        if record.exists():
            try:
                json.loads(record.read_bytes())
            except ValueError as error:
                yield f"half made: run.json ({error})"

    def _lost(self, committed: int | None) -> Iterator[str]:
        from tuner.checkpoint.open import newest

        warnings: list[str] = []
        found = newest(self.root / RUN / "checkpoints", warnings.append)
        yield from warnings
        step = None if found is None else found.step
        if committed is not None and (step is None or step < committed):
            yield f"lost: step {committed} was committed, {step} is found"

    def _run_problems(self, sound: Sound) -> Iterator[str]:
        from tuner.checkpoint.load import content_sha256
        from tuner.checkpoint.open import open_checkpoint

        log, samples = read_log(self.root / RUN)
        if log != sound.log:
            yield f"the log differs: {first_difference(log, sound.log)}"
        if samples != sound.samples:
            yield "samples.jsonl differs"
        order, contradictions = read_order(self.directory / ORDER)
        yield from contradictions
        if any(sound.order[step] != rows for step, rows in order.items()):
            yield "the order of rows differs"
        if settled_files(self.root / RUN) != sound.settled:
            yield "recipe, tokenizer or model_config differ"
        record = json.loads((self.root / RUN / "run.json").read_text())
        if record["status"] != "finished":
            yield f"the record says {record['status']}"
        kept = {int(path.name[5:]): path for path in (self.root / RUN / "checkpoints").glob("step-*")}
        # What a launch went on from does not count towards `keep`: a resumed run may hold one or two more.
        if not sound.kept <= kept.keys() or len(kept) > len(sound.kept) + 2:
            yield f"steps {sorted(kept)} are kept, {sorted(sound.kept)} in an unbroken run"
        for step, path in kept.items():
            if content_sha256(open_checkpoint(path)) != sound.sha256[step]:
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

    def noted(train_state: Any, index: int, batches: Any, *rest: Any) -> Any:
        digest = hashlib.sha256(batches.row_ids.tobytes())
        for batch in batches.micro:
            digest.update(batch.input_ids.tobytes())
        with path.open("a") as file:
            file.write(f"{train_state.step_config.mesh.rank} {index + 1} {digest.hexdigest()}\n")
        return real(train_state, index, batches, *rest)

    loop.optimizer_step = noted


def _import(names: Path) -> None:
    """Have what a child imported here too, so that the next ones find it."""
    for name in names.read_text().splitlines():
        if name.partition(".")[0] in ("tuner", "torch", "transformers", "peft", "pyarrow", "tokenizers", "jinja2"):
            with suppress(ImportError):
                importlib.import_module(name)


def _flushed(calls: list[Call], directory: str) -> bool:
    return any(call.kind == "flush" and call.path == directory for call in calls)


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

    from tuner.runtime.device import measured_peak

    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    torch.set_num_threads(1)
    path = os.environ["PATH"]
    os.environ["PATH"] = os.path.dirname(shutil.which("git") or "/usr/bin/git")  # looked for there alone
    platform.processor()
    measured_peak("cpu", "fp32", 0)
    try:
        yield
    finally:
        os.environ["PATH"] = path


def settle() -> None:
    """Leave what has been made so far to all children."""
    gc.collect()
    gc.freeze()
