"""Models that several files train: made once for each of them."""

from pathlib import Path

import pytest
import torch

from tests.model.tiny import tiny_config
from tests.train.synthetic import write_model
from tuner.model.build import ModelSpec, build_model
from tuner.model.root import CausalLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of one."""
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """One with tied embeddings, built."""
    directory = tmp_path_factory.mktemp("model")
    tiny_config("llama-tied").save_pretrained(directory)
    return CausalLM(build_model(ModelSpec(str(directory), random_init=True), torch.float32, 5))
