"""Where runs are tried: outside of this repository, with one cache and one place for the tests of a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.caches import new_cache
from tests.fixtures import trainings
from tuner.setup import announce
from tuner.setup.resolve import Resolved
from tuner.setup.specs import trainable_of, trained_count

COUNTS: dict[str, int] = {}


def counted_once(resolved: Resolved) -> int:
    """The parameters that are trained: counted once for each kind of model and adapter, a sixth of a tiny launch."""
    trainable = trainable_of(resolved.recipe, resolved.new_ids)
    key = f"{resolved.config.to_json_string()} {resolved.n_parameters} {trainable}"
    if key not in COUNTS:
        COUNTS[key] = trained_count(resolved)
    return COUNTS[key]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a module's tests and fixtures prepare, which is also where they work.

    Each launch asks git about the working directory: of all the files of this repository that takes as long as steps.
    """
    cache = new_cache(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNER_CACHE", str(cache))
        patch.setattr(announce, "trained_count", counted_once)
        patch.chdir(cache)
        yield cache


@pytest.fixture(autouse=True)
def _cache_of_the_module(_cache: Path, _private_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_CACHE", str(_cache))


@pytest.fixture(scope="module")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


@pytest.fixture
def workplace(_place: Path) -> Path:
    """A tiny training of one layer, whatever the test before made of it: its data is prepared once for a module."""
    return trainings.emptied(_place, layers=1)
