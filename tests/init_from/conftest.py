"""Models that tests of `model.init_from` share."""

from pathlib import Path

import pytest

from tests.init_from.built import write_family


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def other(base: Path) -> Path:
    return write_family(base.parent / "other", seed=2)
