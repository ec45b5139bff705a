"""The tables of this package, in YAML files next to this one."""

from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML


@cache
def table(name: str) -> Any:
    """What `NAME.yaml` holds."""
    return YAML(typ="safe").load(Path(__file__).with_name(f"{name}.yaml"))
