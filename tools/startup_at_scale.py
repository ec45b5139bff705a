"""What the start of a launch costs at 1,000 processes: groups, meshes, and what is exchanged before and at a save.

    python -m tools.startup_at_scale --out FILE [--model DIR]

Four measurements, each a line of JSON that is added to FILE as it is made:

`gloo`: groups of 4 to 64 processes, one for each thread of this process, over a store that counts what each sets and
reads; sockets before and after a first use, connected at once and lazily. What grows with a power of the size is
continued to 1,000 by a parabola, which every size must lie on.
`mesh`: the meshes of layouts at 64 to 1,024 processes, made by one of them over torch's fake backend: processor
time, memory and groups. Nothing is sent there: it is what torch does on the host.
`launch`: two processes train two steps and save; each exchange of objects is noted with its place and the size of what
one process gives. What a process receives at 1,000 follows from the kind of the exchange.
`dealt`: rank 0's part of a save at 1,000 processes: who writes what, for as many boxes of each.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from tools.commands import Results, asked, trained, workplace
from tools.measures import memory
from tuner.checkpoint.storage import _dealt, _HeldBox
from tuner.parallel.mesh import Mesh, MeshSpec
from tuner.runtime.dist import RankInfo
from tuner.runtime.parts import Box
from tuner.runtime.process import Collective
from tuner.runtime.torch_private import FakeStore

WORLD = 1000
GLOO_SIZES = (4, 8, 16, 32, 64)
MESHES = {
    "full": MeshSpec("full"), "hybrid": MeshSpec("hybrid"), "tensor 8": MeshSpec("full", tensor=8),
    "hybrid, sequence 8": MeshSpec("hybrid", sequence=8), "expert 8": MeshSpec("full", expert=8),
}  # fmt: skip
KINDS = ("together", "on_all_ranks", "to_rank0", "from_rank0", "on_rank0")
RECIPE = """\
model: {{name_or_path: {model}}}
tokenizer: {{name_or_path: {tokenizer}}}
data: {{train: rows.jsonl, max_length: 64}}
method: {{kind: pretrain}}
train: {{duration: 2 steps, global_batch_size: 4, micro_batch_size: 1, precision: fp32, device: cpu}}
parallel: {{shard: full}}
"""


class CountingStore(dist.Store):  # type: ignore[name-defined]  # which torch does not say that it has
    """A store in this process's memory that counts the bytes that its user sets and reads."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared, self.counts = shared, Counter[str]()

    def set(self, key: str, value: Any) -> None:
        self.counts["set"] += len(value)
        self.shared.set(key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self.shared.get(key)
        self.counts["read"] += len(found)
        return found

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=100)) -> None:
        self.shared.wait(keys, timeout)

    def set_timeout(self, timeout: timedelta) -> None: ...


def gloo(size: int, lazy: bool) -> dict[str, Any]:
    """A gloo group of so many threads: what each exchanges through the store, and its sockets."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    shared = dist.HashStore()  # type: ignore[attr-defined]
    stores = [CountingStore(shared) for _ in range(size)]
    groups: dict[int, Any] = {}

    def make(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=100)
        groups[rank] = dist.ProcessGroupGloo(stores[rank], rank, size, options)

    def use(rank: int) -> None:
        groups[rank].allreduce(torch.ones(1)).wait()
        groups[rank].allgather([[torch.ones(4) for _ in range(size)]], [torch.ones(4)]).wait()
        groups[rank].broadcast(torch.ones(4), 0).wait()

    before, begun = _sockets(), time.process_time()
    _each(size, make)
    seconds, made = time.process_time() - begun, _sockets()
    _each(size, use)
    counts = {f"{name}_bytes": max(store.counts[name] for store in stores) for name in ("set", "read")}
    del os.environ["TORCH_GLOO_LAZY_INIT"]
    sockets = {"sockets": (made - before) / size, "sockets_in_use": (_sockets() - before) / size}
    return {"what": "gloo", "size": size, "lazy": lazy, **counts, **sockets, "cpu_s": round(seconds, 2)}


def _each(size: int, work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(size) as threads:
        list(threads.map(work, range(size)))


def _sockets() -> int:
    return len(os.listdir("/proc/self/fd"))


def continued(points: dict[int, float], size: int) -> float:
    """The parabola through points, at another size. Raises ValueError where one is more than 2 % off it."""
    sizes, values = list(points), list(points.values())
    line = np.polyfit(sizes, values, 2)
    if any(abs(np.polyval(line, x) - y) > 0.02 * max(abs(y), 50) for x, y in points.items()):
        raise ValueError(f"no parabola: {points}")
    return float(np.polyval(line, size))


def mesh(name: str, size: int) -> dict[str, Any]:
    """A layout's meshes at so many processes, eight to a machine, as one of them makes them."""
    dist.init_process_group("fake", store=FakeStore(), rank=size // 2, world_size=size)
    rank_info, before, begun = RankInfo(size // 2, size, size // 2 % 8, 8), memory("VmRSS"), time.process_time()
    with patch.object(device_mesh, "new_group", wraps=dist.new_group) as made:
        Mesh.of(rank_info, MESHES[name]).device_meshes("cpu")
    found = {"cpu_s": round(time.process_time() - begun, 3), "mib": round((memory("VmRSS") - before) / 2**20, 1)}
    dist.destroy_process_group()
    return {"what": "mesh", "layout": name, "size": size, **found, "groups": made.call_count}


def noted(file: Path) -> None:
    """From here on this process notes each exchange of objects: its kind, its place, and the bytes that one gives."""
    depth = threading.local()
    found: Counter[tuple[str, str, int]] = Counter()

    def wrap(kind: str) -> None:
        real = getattr(Collective, kind)

        def call(self: Collective, work: Callable[[], Any]) -> Any:
            if getattr(depth, "inside", False):
                return real(self, work)
            depth.inside = True
            answer = real(self, work)
            depth.inside = False
            given = answer[0] if kind in ("on_all_ranks", "to_rank0") and answer else answer
            size = 0 if kind == "together" else len(ForkingPickler.dumps(given))
            code = sys._getframe(1).f_code
            found[kind, f"{code.co_filename.rpartition('tuner/')[2]}:{code.co_qualname}", size] += 1
            file.write_text(json.dumps([[*key, count] for key, count in found.items()]))
            return answer

        setattr(Collective, kind, call)

    for kind in KINDS:
        wrap(kind)


def launched(model: str) -> Iterator[dict[str, Any]]:
    """Two processes that train two steps and save: rank 0's exchanges, those of one place and size together."""
    from tests.fixtures import trainings
    from tuner.cli.main import main

    if "RANK" in os.environ:
        if os.environ["RANK"] == "0":
            noted(Path("noted.json"))
        main(["train", "scale.yaml"])
    with workplace() as directory:
        trainings.prepare(directory, 1)
        (directory / "rows.jsonl").write_text('{"text": "some words of a row"}\n' * 64)
        (directory / "scale.yaml").write_text(RECIPE.format(model=model or "./model", tokenizer=model or "byte"))
        trained(directory, 2, ["-m", "tools.startup_at_scale"])
        for kind, place, size, count in json.loads((directory / "noted.json").read_text()):
            yield {"what": "launch", "kind": kind, "place": place, "bytes": size, "times": count}


def received(kind: str, size: int) -> dict[str, int]:
    """Bytes that a process other than rank 0, and rank 0, receive of such an exchange at WORLD processes."""
    everyone = {"together": 4, "on_all_ranks": size * WORLD, "on_rank0": size, "from_rank0": size, "to_rank0": 4}[kind]
    return {"each": everyone, "rank0": size * WORLD if kind == "to_rank0" else everyone, "before": size * WORLD}


def dealt(boxes: int) -> dict[str, Any]:
    """Who writes what of so many boxes on each of WORLD processes, as rank 0 finds it."""
    whole = WORLD * 8, 64
    parts = [Box((rank * 8, 0), (8, 64), (0, 0)) for rank in range(WORLD)]
    held = [[_HeldBox(f"layers.{number}", "F32", whole, part) for number in range(boxes)] for part in parts]
    begun = time.process_time()
    _dealt(held)
    seconds = round(time.process_time() - begun, 2)
    return {"what": "dealt", "boxes": boxes, "cpu_s": seconds, "mib": round(memory("VmHWM") / 2**20)}


def measured(model: str) -> Iterator[dict[str, Any]]:
    """All of it, and gloo's figures continued to WORLD processes."""
    for lazy in (False, True):
        found = [gloo(size, lazy) for size in GLOO_SIZES]
        yield from found
        figures = ("set_bytes", "sockets") if lazy else ("set_bytes", "read_bytes", "sockets", "sockets_in_use")
        at = {key: round(continued({each["size"]: each[key] for each in found}, WORLD)) for key in figures}
        yield {"what": "gloo continued", "size": WORLD, "lazy": lazy, **at}
    yield from (mesh(name, size) for name in MESHES for size in (64, 256, 1024))
    yield from ({**one, **received(one["kind"], one["bytes"])} for one in launched(model))
    yield dealt(1000)


def main() -> None:
    """Measure, and write each line as it is there."""
    given = asked(__doc__, out=Path, model=("", "a model's directory; default a tiny one"))
    if "RANK" in os.environ:
        list(launched(given.model))
    results = Results(given.out)
    for line in measured(given.model):
        results.add(line)


if __name__ == "__main__":
    main()
