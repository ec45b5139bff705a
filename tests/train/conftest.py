"""Models that several files train, made once for each of them, and places to train in."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.model.tiny import tiny_config
from tests.train.synthetic import write_model
from tuner.model.build import ModelSpec, build_model
from tuner.model.root import CausalLM


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of one; a module's MODEL says of which kind."""
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, getattr(request.module, "MODEL", "llama-tied"))
    return directory


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path) -> Path:
    """A copy of what a module has prepared."""
    return shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """One with tied embeddings, built."""
    directory = tmp_path_factory.mktemp("model")
    tiny_config("llama-tied").save_pretrained(directory)
    return CausalLM(build_model(ModelSpec(str(directory), random_init=True), torch.float32, 5))
