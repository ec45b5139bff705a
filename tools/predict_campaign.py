"""Hold predicted memory against what the CPU's allocator gives out in real steps, counted by torch's profiler.

    python tools/predict_campaign.py --seed 7 --out figures.json

For each case a learner is built and takes real steps under ``torch.profiler`` with its memory events; the prediction
traces the same step without any memory. Parameters, gradients, optimizer state, the activations that each microbatch
keeps, and what is there at each mark of the step must be equal to the byte, the peak within 2 %. With several processes
the first one is counted: they run for real, over gloo.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.predict_cases import Case, cases, draw, seed_of  # noqa: E402
from tuner.config.load import load_recipe  # noqa: E402
from tuner.data.batches import Batch, StepBatches  # noqa: E402
from tuner.errors import TunerError  # noqa: E402
from tuner.model.attention import forget_documents  # noqa: E402
from tuner.profile.tracing import Trace, trace_step  # noqa: E402
from tuner.runtime.launch import Launch  # noqa: E402
from tuner.train.setup import Resolved, assemble_model, build_learner, resolve  # noqa: E402
from tuner.train.step import forward_backward, optimizer_step  # noqa: E402

PEAK_ALLOWED = 0.02
CALM_S = 0.1
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "broadcast")


@dataclass(frozen=True)
class Figures:
    """Bytes of one process: by part, at each mark of the step above what is always there, and the step's peak."""

    parameters: int
    optimizer: int
    gradients: int
    saved: list[int]
    """What each microbatch keeps from its forward to its backward pass."""
    marks: list[tuple[str, int]]
    peak: int


def resolved_case(case: Case, directory: Path, rank: int = 0) -> tuple[Resolved, Launch, StepBatches]:
    """The case's resolved recipe, its place among its processes, and the batches of one step."""
    base = directory / f"{case.model}-{case.processes}-{rank}"
    case.config().save_pretrained(base)
    tree: dict[str, Any] = {
        "model": {"name_or_path": str(base), "init": "random"},
        "data": {"train": "rows.jsonl", "max_length": 256},
        "train": {
            "precision": "fp32", "device": "cpu", "compile": False,
            "global_batch_size": len(case.micro) * case.processes,
        },
    }  # fmt: skip
    for key, value in case.keys.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    launch = Launch(rank, case.processes, rank, case.processes)
    resolved = resolve(load_recipe(tree).recipe, 256, launch)
    return resolved, launch, batches(case, resolved.config.get_text_config().vocab_size)


def batches(case: Case, vocab_size: int) -> StepBatches:
    """One step's microbatches of random tokens, all trained, in documents of the case's lengths."""
    generator = np.random.default_rng(seed_of(case))
    made = []
    for lengths in case.micro:
        ends, count = np.cumsum(lengths), sum(lengths)
        ids = generator.integers(0, vocab_size, count, dtype=np.int64)
        targets = np.roll(ids, -1)
        targets[ends - 1] = -100
        places = np.arange(count, dtype=np.int64) - np.repeat(ends - np.array(lengths), lengths)
        trained = np.flatnonzero(targets != -100).astype(np.int64)
        made.append(Batch(ids, targets, places, tuple(lengths), trained, np.arange(len(lengths))))
    tokens, trained_count = (sum(len(getattr(b, key)) for b in made) for key in ("input_ids", "trained_positions"))
    return StepBatches(np.arange(len(made)), trained_count * case.processes, tokens * case.processes, made)


def counted(resolved: Resolved, launch: Launch, step: StepBatches) -> Figures:
    """What the allocator gave out, after the step has been taken once."""
    gc.collect()
    gc.disable()  # as in training, where it hardly ever runs
    memory = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    marks = _Marks()
    with memory as profiler:
        forget_documents()
        marks("empty")
        root, numerics = assemble_model(resolved, launch)
        forget_documents()
        gc.collect()
        marks("parameters")
        learner = build_learner(resolved.recipe, root, numerics)
        learner.optimizer.allocate()
        marks("optimizer state")
        optimizer_step(learner, 0, step, 1.0)
        forget_documents()
        learner.marks = marks
        marks("start")
        optimizer_step(learner, 0, step, 1.0)
        marks("done")
        learner.marks = lambda part: None
        forward_backward(learner, 0, step)
        marks("gradients")
        learner.optimizer.zero_grad()
        marks("none")
        marks.end()
    gc.enable()
    found = _at_marks(profiler)
    names, levels = [name for name, _, _ in found], [level for _, level, _ in found]
    first = names.index("start")
    of_step = [(name, level - levels[first]) for name, level, _ in found[first : names.index("done") + 1]]
    return Figures(
        parameters=levels[names.index("parameters")] - levels[0] if launch.world_size == 1 else stored(root),
        optimizer=levels[names.index("optimizer state")] - levels[names.index("parameters")],
        gradients=levels[names.index("gradients")] - levels[names.index("none")],
        saved=_saved(of_step),
        marks=of_step,
        peak=max(peak for _, _, peak in found[first : names.index("done")]) - levels[first],
    )


def stored(root: torch.nn.Module) -> int:
    """Bytes of the storages of a sharded model; what filled it is freed by gloo's threads, at a time of their own."""
    parts = [getattr(tensor, "_local_tensor", tensor) for tensor in (*root.parameters(), *root.buffers())]
    return sum({part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}.values())


def predicted(resolved: Resolved, launch: Launch, step: StepBatches) -> Figures:
    """What the trace says of the same, without what torch's allocator does not give out (rows as numpy arrays)."""
    trace = trace_step(resolved, launch, step)
    level, levels, peak, at = 0, [], 0, 0
    entries = trace.entries
    for number, change in enumerate(trace.changes):
        while at < len(trace.marks) and trace.marks[at][1] == number:
            levels.append(level)
            at += 1
        level += 0 if entries[change.serial].given else change.delta
        peak = max(peak, level) if at else 0
    levels += [level] * (len(trace.marks) - len(levels))
    of_step = [(name, there - levels[0]) for (name, _), there in zip(trace.marks, levels, strict=True)]
    return Figures(
        parameters=_part(trace, "parameters"),
        optimizer=_part(trace, "optimizer"),
        gradients=_part(trace, "gradients"),
        saved=_saved(of_step),
        marks=of_step,
        peak=peak - levels[0],
    )


def problems(real: Figures, said: Figures) -> list[str]:
    """How a prediction differs from what was counted, one line each; nothing where it is right."""
    found = [
        f"{key}: {getattr(said, key):,} predicted, {getattr(real, key):,} counted"
        for key in ("parameters", "optimizer", "gradients")
        if getattr(said, key) != getattr(real, key)
    ]
    if said.saved != real.saved:
        found.append(f"activations: {said.saved} predicted, {real.saved} counted")
    if (off := said.peak / real.peak - 1) and abs(off) > PEAK_ALLOWED:
        found.append(f"peak: {said.peak:,} predicted, {real.peak:,} counted ({off:+.2%})")
    return found


class _Marks:
    """Marks in the profile: each is a recorded function that lasts until the next."""

    def __init__(self) -> None:
        self._open: Any = None

    def __call__(self, part: str) -> None:
        self.end()
        self._open = torch.profiler.record_function(f"mark {part}")
        self._open.__enter__()

    def end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = None


def _at_marks(profiler: torch.profiler.profile) -> list[tuple[str, int, int]]:
    """Each mark, the bytes given out and not given back at it, and the most of them until the next."""
    events = []
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        name = event.name()
        if name == "[memory]":
            events.append((event.start_ns(), 0, "", event.nbytes()))
        elif name.startswith("mark "):
            events.append((event.start_ns(), 1, name.removeprefix("mark "), 0))
    level, found = 0, list[tuple[str, int, int]]()
    for _, _, name, size in sorted(events, key=lambda event: event[0]):
        level += size
        if name:
            found.append((name, level, level))
        elif found:
            found[-1] = (*found[-1][:2], max(found[-1][2], level))
    return found


def _saved(marks: Sequence[tuple[str, int]]) -> list[int]:
    pairs = zip(marks, marks[1:], strict=False)
    return [after[1] - before[1] for before, after in pairs if (before[0], after[0]) == ("forward", "backward")]


def _part(trace: Trace, part: str) -> int:
    return sum(entry.size for entry in trace.entries if entry.part == part)


def count_case(case: Case, directory: Path, rank: int) -> Figures:
    """The figures of one process of a case that is run for real."""
    return counted(*resolved_case(case, directory, rank))


def run_rank(path: Path) -> None:
    """Count the cases of a file as one process of several; the first one writes the figures beside it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=size)
    for name in COLLECTIVES:
        setattr(dist, name, _calmly(getattr(dist, name)))
    figures = []
    for tree in json.loads(path.read_text()):
        case = Case(tree["model"], tree["keys"], tuple(map(tuple, tree["micro"])), tree["processes"])
        figures.append(asdict(count_case(case, path.parent, rank)))
        dist.barrier()
    if rank == 0:
        Path(f"{path}.out").write_text(json.dumps(figures))
    dist.destroy_process_group()


def _calmly(collective: Any) -> Any:
    """The collective, and a pause in which gloo's threads, which the profiler does not see, drop what they hold."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = collective(*args, **kwargs)
        time.sleep(CALM_S)
        return result

    return run


def count_spread(chosen: Sequence[Case], directory: Path) -> list[Figures]:
    """Figures of cases that all have the same number of processes, which are started here."""
    size = chosen[0].processes
    path = directory / f"cases-{size}.json"
    path.write_text(json.dumps([asdict(case) for case in chosen]))
    command = [sys.executable, str(Path(__file__).resolve()), "--rank-of", str(path)]
    env = {**os.environ, "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(size)]
    if any([rank.wait() for rank in ranks]):
        raise RuntimeError(f"a process of {size} failed")
    trees = json.loads(Path(f"{path}.out").read_text())
    return [Figures(**{**tree, "marks": [(name, level) for name, level in tree["marks"]]}) for tree in trees]


def drawn_types(seed: int, count: int, directory: Path) -> tuple[list[str], dict[str, str]]:
    """The first architectures of the draw that can be trained at all, and why others before them cannot."""
    chosen: list[str] = []
    passed: dict[str, str] = {}
    for model_type in draw(seed):
        if len(chosen) == count:
            break
        try:
            resolved, launch, _ = resolved_case(Case(model_type), directory)
            assemble_model(resolved, launch)
            chosen.append(model_type)
        except (TunerError, Exception) as error:  # noqa: BLE001 - small numbers do not suit every config
            passed[model_type] = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return chosen, passed


def main() -> int:
    """Run the campaign; exit code 1 where a prediction was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7, help="of the draw of architectures")
    parser.add_argument("--drawn", type=int, default=10, help="how many architectures are drawn")
    parser.add_argument("--only", default="", help="cases whose name holds this alone")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.rank_of)
        return 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        chosen, passed = drawn_types(options.seed, options.drawn, directory)
        print(f"drawn: {', '.join(chosen)}\nnot trainable: {json.dumps(passed, indent=1)}", flush=True)
        every = [case for case in cases(chosen) if options.only in case.name]
        spread = {size: [case for case in every if case.processes == size] for size in (2, 4)}
        real = {
            c.name: f for own in spread.values() if own for c, f in zip(own, count_spread(own, directory), strict=True)
        }
        lines, wrong = [], 0
        for case in every:
            setup = resolved_case(case, directory)
            truth = real.get(case.name) or counted(*setup)
            said = predicted(*setup)
            bad = problems(truth, said)
            wrong += bool(bad)
            off = said.peak / truth.peak - 1
            print(f"{'WRONG' if bad else 'ok':5} {off:+.3%} {case.name} {'; '.join(bad)}", flush=True)
            lines.append(
                {
                    "case": case.name,
                    "peak_off": off,
                    "problems": bad,
                    "counted": asdict(truth),
                    "predicted": asdict(said),
                }
            )
    worst = max(abs(line["peak_off"]) for line in lines)
    exact = sum(line["counted"]["marks"][:-1] == line["predicted"]["marks"][:-1] for line in lines)
    print(f"{len(lines)} cases, {wrong} wrong; worst peak {worst:.3%}; {exact} equal at every mark")
    if options.out:
        options.out.write_text(json.dumps({"passed": passed, "cases": lines}, indent=1))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
