"""What torch's allocator gives out in real steps of tiny models: in this process, or in several of their own.

Run as a program it is one of these processes, in which a preloaded library counts (tools/allocations.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.allocations import Allocated, allocated, is_counted, level_now, preloaded  # noqa: E402
from tools.predict_cases import Case, seed_of  # noqa: E402
from tuner.config.load import load_recipe  # noqa: E402
from tuner.data.batches import Batch, StepBatches  # noqa: E402
from tuner.model.attention import forget_documents  # noqa: E402
from tuner.run.build import assemble_model, build_train_state, mesh_of  # noqa: E402
from tuner.run.resolve import Resolved, resolve  # noqa: E402
from tuner.runtime.dist import RankInfo  # noqa: E402
from tuner.train.step import forward_backward, optimizer_step  # noqa: E402

SETTLED_S = 60.0
COLLECTIVES = (
    "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce",
    "all_to_all_single", "broadcast", "scatter",
)  # fmt: skip


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


def resolved_case(case: Case, directory: Path, rank: int = 0) -> tuple[Resolved, RankInfo, StepBatches]:
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
    rank_info = RankInfo(rank, case.processes, rank, case.processes)
    resolved = resolve(load_recipe(tree).recipe, 256, rank_info)
    return resolved, rank_info, batches(case, resolved.config.get_text_config().vocab_size)


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


def counted(resolved: Resolved, rank_info: RankInfo, step: StepBatches) -> Figures:
    """What the allocator gave out, after the step has been taken once."""
    gc.collect()
    gc.disable()  # as in training, where it hardly ever runs
    marks = AllocatorMarks() if is_counted() else ProfilerMarks()
    with marks:
        forget_documents()
        marks("empty")
        root, step_config = assemble_model(resolved, rank_info, mesh_of(resolved.recipe, rank_info))
        forget_documents()
        gc.collect()
        marks("parameters")
        train_state = build_train_state(resolved.recipe, root, step_config)
        train_state.optimizer.allocate()
        marks("optimizer state")
        optimizer_step(train_state, 0, step, 1.0)
        forget_documents()
        train_state.marks = marks
        marks("start")
        optimizer_step(train_state, 0, step, 1.0)
        marks("done")
        train_state.marks = lambda part: None
        forward_backward(train_state, 0, step)
        marks("gradients")
        train_state.optimizer.zero_grad()
        marks("none")
    gc.enable()
    found = marks.found()
    names, levels = [name for name, _, _ in found], [level for _, level, _ in found]
    first = names.index("start")
    of_step = [(name, level - levels[first]) for name, level, _ in found[first : names.index("done") + 1]]
    return Figures(
        parameters=levels[names.index("parameters")] - levels[0] if rank_info.world_size == 1 else stored(root),
        optimizer=levels[names.index("optimizer state")] - levels[names.index("parameters")],
        gradients=levels[names.index("gradients")] - levels[names.index("none")],
        saved=saved_between(of_step),
        marks=of_step,
        peak=max(peak for _, _, peak in found[first : names.index("done")]) - levels[first],
    )


def stored(root: torch.nn.Module) -> int:
    """Bytes of the storages of a sharded model; building it leaves groups and meshes of processes behind as well."""
    parts = [getattr(tensor, "_local_tensor", tensor) for tensor in (*root.parameters(), *root.buffers())]
    return sum({part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}.values())


class AllocatorMarks:
    """What the allocator has given out at each mark of a step, and at most until the next."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, Allocated]] = []

    def __enter__(self) -> None:
        allocated()

    def __call__(self, part: str) -> None:
        self._seen.append((part, allocated()))

    def __exit__(self, *error: object) -> None:
        self("end")

    def found(self) -> list[tuple[str, int, int]]:
        """Each mark, the bytes given out and not given back at it, and the most of them until the next."""
        pairs = zip(self._seen, self._seen[1:], strict=False)
        return [(name, here.level, until.peak) for (name, here), (_, until) in pairs]


class ProfilerMarks:
    """The same from torch's profiler, which sees the thread that it is started in: each mark is a recorded function."""

    def __init__(self) -> None:
        self._memory = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._open: Any = None

    def __enter__(self) -> None:
        self._memory.__enter__()

    def __call__(self, part: str) -> None:
        self._end()
        self._open = torch.profiler.record_function(f"mark {part}")
        self._open.__enter__()

    def __exit__(self, *error: object) -> None:
        self._end()
        self._memory.__exit__(None, None, None)

    def found(self) -> list[tuple[str, int, int]]:
        """Each mark, the bytes given out and not given back at it, and the most of them until the next."""
        events = []
        for event in self._memory.profiler.kineto_results.events():  # type: ignore[union-attr]
            name = event.name()
            if name == "[memory]":
                events.append((event.start_ns(), "", event.nbytes()))
            elif name.startswith("mark "):
                events.append((event.start_ns(), name.removeprefix("mark "), 0))
        level, found = 0, list[tuple[str, int, int]]()
        for _, name, size in sorted(events, key=lambda event: event[0]):
            level += size
            if name:
                found.append((name, level, level))
            elif found:
                found[-1] = (*found[-1][:2], max(found[-1][2], level))
        return found

    def _end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = None


def saved_between(marks: Sequence[tuple[str, int]]) -> list[int]:
    """What each microbatch keeps from its forward to its backward pass, by the marks of a step."""
    pairs = zip(marks, marks[1:], strict=False)
    return [after[1] - before[1] for before, after in pairs if (before[0], after[0]) == ("forward", "backward")]


def run_rank(path: Path, free: bool) -> None:
    """Count the cases of a file as one process of several; the first one writes the figures beside it.

    With ``free`` collectives end before gloo's threads have let go of what they hold.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=size)
    for name in () if free else COLLECTIVES:
        if hasattr(dist, name):  # torch renames them
            setattr(dist, name, settled(getattr(dist, name)))
    figures = []
    for tree in json.loads(path.read_text()):
        case = Case(tree["model"], tree["keys"], tuple(map(tuple, tree["micro"])), tree["processes"])
        figures.append(asdict(counted(*resolved_case(case, path.parent, rank))))
        if size > 1:
            dist.barrier()
    if rank == 0:
        Path(f"{path}.out").write_text(json.dumps(figures))
    if size > 1:
        dist.destroy_process_group()


def references(tensor: torch.Tensor) -> int:
    """How many hold a tensor or, by views, its storage."""
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local._use_count() + torch._C._storage_Use_Count(local.untyped_storage()._cdata))


def settled(collective: Any) -> Any:
    """The collective, which ends when gloo's threads have let go of all they hold, not at a moment of their own.

    That is what they were given, and copies that they made.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        before, held = level_now(), [references(tensor) for tensor in given]
        result = collective(*args, **kwargs)
        if result is not None:
            raise RuntimeError(f"{collective.__name__} goes on while the step does: what it holds is not counted")
        until = time.monotonic() + SETTLED_S
        while level_now() > before or any(references(t) > count for t, count in zip(given, held, strict=True)):
            if time.monotonic() > until:
                raise RuntimeError(f"{collective.__name__} keeps {level_now() - before:,} bytes")
            time.sleep(0)
        return result

    return run


def count_spread(chosen: Sequence[Case], directory: Path, free: bool) -> list[Figures]:
    """Figures of cases that all have the same number of processes, which are started here."""
    size = chosen[0].processes
    path = directory / f"cases-{size}.json"
    path.write_text(json.dumps([asdict(case) for case in chosen]))
    command = [sys.executable, str(Path(__file__).resolve()), str(path), *(["--free"] if free else [])]
    env = {**preloaded(directory), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(size)]
    if any([rank.wait() for rank in ranks]):
        raise RuntimeError(f"a process of {size} failed")
    trees = json.loads(Path(f"{path}.out").read_text())
    return [Figures(**{**tree, "marks": [(name, level) for name, level in tree["marks"]]}) for tree in trees]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--free", action="store_true")
    given = parser.parse_args()
    run_rank(given.cases, given.free)
