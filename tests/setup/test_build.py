"""How a resolved recipe computes."""

from pathlib import Path

import torch

from tests.train.synthetic import recipe_for
from tuner.parallel.mesh import Mesh
from tuner.setup.build import step_config_of


def test_autocast_keeps_no_copies_of_weights(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, train={"precision": "bf16"})
    with step_config_of(recipe, torch.device("cpu"), Mesh()).autocast():
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()
