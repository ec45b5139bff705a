"""What every test may use: a private cache, a quiet terminal, and no device or network by accident."""

import itertools
import os
import re
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.caches import SHARED, new_cache, share

ROOT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = str(ROOT)  # what tests start is of this tree too, in whatever directory
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session", autouse=True)
def _shared(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share what takes seconds among all workers: what transformers says of a tokenizer, and servers that fork."""
    from tests.fixtures import forked

    base, is_worker = tmp_path_factory.getbasetemp(), "PYTEST_XDIST_WORKER" in os.environ
    shared = (base.parent if is_worker else base) / "shared"
    (shared / "tokenizers").mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(SHARED, str(shared / "tokenizers"))
    share()
    forked.meet(shared, os.getppid() if is_worker else os.getpid())
    if "TUNER_TEST_COSTS" in os.environ:
        forked.start_servers()


@pytest.fixture(scope="session", autouse=True)
def _asked_of_a_fork() -> Iterator[None]:
    """Have that asking done in forks of a process that has imported transformers and nothing else that matters."""
    from tests.fixtures import forked
    from tuner.data.encoding import tokenizer_files

    real, tokenizer_files.subprocess = tokenizer_files.subprocess, forked  # type: ignore[assignment]
    yield
    tokenizer_files.subprocess = real


@pytest.fixture(scope="session")
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for each test: pytest would look for the next free name among those of all tests before."""
    place = tmp_path_factory.mktemp("caches")
    return (place / str(number) for number in itertools.count())


@pytest.fixture(scope="session")
def _numbers() -> Iterator[int]:
    return itertools.count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _numbers: Iterator[int]) -> Path:
    """A directory of the test's own, as pytest's, which would look for a free name too."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    place = tmp_path_factory.getbasetemp() / f"{name}-{next(_numbers)}"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture(autouse=True)
def _private_environment(_caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep prepared data out of the user's cache, and a launcher's variables out of the tests."""
    monkeypatch.setenv("TUNER_CACHE", str(new_cache(next(_caches))))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="session")
def _signals_of_a_terminal() -> Iterator[None]:
    """Start from the signals of a terminal: nohup and `&` in a script hand on ignored ones, to commands started too."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [number for number in defaults if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, defaults[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the Python processes that the product starts from this one forked: ranks, and exports of a run."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from tests.fixtures import forked

    monkeypatch.setattr(subprocess, "Popen", forked.Popen)
    monkeypatch.setattr(subprocess_handler, "Popen", forked.Popen)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Have the product import a Ray of threads, made as the call asks."""
    from tests.fixtures.ray_cluster import faked

    yield from faked(monkeypatch)


@pytest.fixture(scope="session")
def ray_here() -> Iterator[Any]:
    """A cluster of Ray with four cores that this process has joined; processes that it starts join it, too."""
    from tests.fixtures.ray_cluster import started

    yield from started()


@pytest.fixture
def root() -> Path:
    """The repository's root."""
    return ROOT


def pytest_collection_finish() -> None:
    """Keep tests and modules, a million objects and more, out of all looks for cycles."""
    from tests.fixtures.cycles import leave_out

    leave_out()


def _keep_quick_cases(items: list[pytest.Item]) -> list[str]:
    """Have `slow("one", "other")` mean these cases of a test alone; returns those that are none of its cases."""
    named: set[tuple[str, str]] = set()
    cases = {(item.nodeid.partition("[")[0], item.name.partition("[")[2].removesuffix("]")) for item in items}
    for item in items:
        test, _, case = item.nodeid.partition("[")
        for mark in [mark for mark in item.own_markers if mark.name == "slow" and mark.args]:
            named |= {(test, name) for name in mark.args}
            if case.removesuffix("]") not in mark.args:
                item.own_markers.remove(mark)
    return [f"{test}[{case}]" for test, case in sorted(named - cases)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device.

    Leave out those marked `slow`, unless they are asked for: by TUNER_TEST_SLOW, by a mark, or by name.
    """
    by_name = any("::" in given for given in config.args)
    unknown = _keep_quick_cases(items)
    if unknown and not (by_name or config.getoption("lf", False)):  # which leave out cases before they come here
        raise pytest.UsageError(f"marked slow, and no case of the test: {', '.join(unknown)}")
    if not ("TUNER_TEST_SLOW" in os.environ or config.option.markexpr or by_name):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        available = torch.cuda.is_available()
    if not available:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
