"""What the directory of an export holds of the model that was trained: itself, or a whole that it is a part of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import PretrainedConfig

from tuner.export.outputs import Trained, Values
from tuner.export.shards import Output
from tuner.export.tensors import OpenFiles
from tuner.export.write import write_config


class Form(Protocol):
    """How a trained model is laid out for its readers."""

    @property
    def config(self) -> PretrainedConfig:
        """The config of the model that is loaded from the directory; what is changed in it is written."""
        ...

    @property
    def elements(self) -> int:
        """How many numbers there are besides the trained model's."""
        ...

    def require_same(self) -> None:
        """Check what comes from elsewhere than the checkpoint and its base. Raises DataError."""
        ...

    def outputs(self, values: Values, dtype: torch.dtype, files: OpenFiles) -> list[Output]:
        """Every tensor that is written. Raises DataError and RecipeError."""
        ...

    def write_config(self, directory: Path, dtype: torch.dtype) -> None:
        """Write config.json and what belongs to it."""
        ...

    def require_written(self, directory: Path) -> None:
        """Check what was copied. Raises VerificationError."""
        ...

    def name(self, name: str) -> str:
        """What a tensor of the trained model is called in the model that is loaded from the directory."""
        ...


@dataclass(frozen=True)
class Itself:
    """A model that is published as it was trained."""

    trained: Trained
    config: PretrainedConfig
    elements: int = 0

    def require_same(self) -> None:
        """Nothing comes from elsewhere."""

    def outputs(self, values: Values, dtype: torch.dtype, files: OpenFiles) -> list[Output]:
        """Every published tensor of the model."""
        return values.merged(dtype)

    def write_config(self, directory: Path, dtype: torch.dtype) -> None:
        """Write config.json."""
        write_config(directory, self.config, type(self.trained.plain).__name__, dtype)

    def require_written(self, directory: Path) -> None:
        """Nothing was copied."""

    def name(self, name: str) -> str:
        """The same."""
        return name
