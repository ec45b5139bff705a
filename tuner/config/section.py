"""What every section of the recipe is made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from tuner.config.duration import Duration
from tuner.config.leaves import Switch

Auto = Literal["auto"]
Durations = tuple[Duration, ...]
Bool = Annotated[bool, Switch()]


class Section(BaseModel):
    """A frozen part of the recipe that knows its keys and refuses others."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())
