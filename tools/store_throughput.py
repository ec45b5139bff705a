"""How fast a store directory publishes and fetches, against obstore's own puts and gets of the same bytes."""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from tests.fixtures.store_servers import BUCKET, serving
from tools.commands import Results, workplace
from tools.measures import alternated, memory
from tuner.stores.directory import StoreDirectory

SHAPES = {"1 file of 1 GB": (1, 1_000_000_000), "4 files of 256 MB": (4, 256_000_000)}
ROUNDS = 3
LEAST, MOST_BYTES = 0.9, 256_000_000
"""Of the speed of plain requests; of memory above what was there before."""


class Compared:
    """Files of one shape in a directory, put and published, got and fetched."""

    def __init__(self, place: Path, number: int, size: int) -> None:
        import obstore.store

        self.library, self.source, self.target = obstore, place / "source", place / "target"
        self.plain = obstore.store.S3Store(BUCKET, prefix="plain", client_options={"allow_http": True})
        self.rounds = 0
        self.source.mkdir()
        for name in range(number):
            with (self.source / f"{name}.bin").open("wb") as file:
                for start in range(0, size, 1 << 24):
                    file.write(os.urandom(min(1 << 24, size - start)))

    def _measured(self, way: Callable[[], object]) -> tuple[float, int]:
        """Seconds, and bytes of memory at the peak above those before; what was fetched goes."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        self.target.mkdir()
        before, start = memory("VmRSS"), time.perf_counter()
        way()
        seconds, peak = time.perf_counter() - start, memory("VmHWM") - before
        shutil.rmtree(self.target)
        return seconds, peak

    def put(self) -> tuple[float, int]:
        paths = sorted(self.source.iterdir())
        return self._measured(lambda: [self.library.put(self.plain, path.name, path) for path in paths])

    def publish(self) -> tuple[float, int]:
        self.rounds += 1
        self.directory = StoreDirectory.open(f"s3://{BUCKET}/round-{self.rounds}")
        with self.directory.lease(self.source, lock_is_free=True):
            return self._measured(lambda: self.directory.publish(self.directory.snapshot(self.source, {})))

    def get(self) -> tuple[float, int]:
        def way() -> None:
            for path in sorted(self.source.iterdir()):
                with (self.target / path.name).open("wb") as file:
                    for chunk in self.library.get(self.plain, path.name).stream():
                        file.write(chunk)

        return self._measured(way)

    def fetch(self) -> tuple[float, int]:
        found = self._measured(lambda: self.directory.fetch(self.target / "stage"))
        with self.directory.lease(self.source, lock_is_free=True):
            shutil.rmtree(empty := self.source.with_name("empty"), ignore_errors=True)
            empty.mkdir()
            for _ in range(3):  # of what was published nothing stays
                self.directory.publish(self.directory.snapshot(empty, {}))
        return found


def throughput(results: Results) -> int:
    """Each shape in turns; the exit code, 1 where one is slower or larger than it may be."""
    good = True
    for shape, (number, size) in SHAPES.items():
        with workplace() as place, serving("s3", place) as server:
            os.environ.update(server.environment())
            ways = Compared(place, number, size)
            taken = alternated({name: getattr(ways, name) for name in ("put", "publish", "get", "fetch")}, ROUNDS)
        for plain, own in (("put", "publish"), ("get", "fetch")):
            ratio = statistics.median(a[0] / b[0] for a, b in zip(taken[plain], taken[own], strict=True))
            peak = max(each[1] for each in taken[own])
            megabytes = number * size / 1e6 / statistics.median(each[0] for each in taken[own])
            good &= ratio >= LEAST and peak <= MOST_BYTES
            plain_peak = max(each[1] for each in taken[plain])
            results.add(
                {"shape": shape, "way": own, "speed_to_plain": round(ratio, 3), "mb_per_s": round(megabytes),
                 "peak_mb": round(peak / 1e6), "plain_peak_mb": round(plain_peak / 1e6)}
            )  # fmt: skip
    return int(not good)
