"""What every section of the recipe is made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from tuner.config.duration import Duration
from tuner.config.leaves import Switch, Table, Text

Auto = Literal["auto"]
Durations = tuple[Duration, ...]
Bool = Annotated[bool, Switch()]
_PLUGIN = r"(?:.+\.py:[^\W\d]\w*|(?!.*\.py$)(?!.*:)\S.*)"
Use = Annotated[str, Text(kind="FILE.py:NAME or the name of an entry point", pattern=_PLUGIN)]
"""Code of the user's own."""
Options = Annotated[dict[str, Any], Table()]
"""Its keyword arguments."""


class Section(BaseModel):
    """A frozen part of the recipe that knows its keys and refuses others."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())
