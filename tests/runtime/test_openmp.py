"""How threads wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.runtime.openmp import SPIN_COUNT, limit_spinning


def test_spinning_is_bounded() -> None:
    environment: dict[str, str] = {}
    limit_spinning(environment)
    assert environment == {"GOMP_SPINCOUNT": SPIN_COUNT}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_set_stays(name: str) -> None:
    environment = {name: "ACTIVE"}
    limit_spinning(environment)
    assert environment == {name: "ACTIVE"}


ENTRIES = (
    "from tuner.cli.main import main; main(['--version'])",
    "import tuner; tuner.train({'model': {'name_or_path': 'a/b'}, 'data': {'train': 'x'}})",
)


@pytest.mark.parametrize("entry", ENTRIES)
def test_it_is_set_before_torch_is_loaded(entry: str, root: Path) -> None:
    program = f"""
import os, sys
class Torch:
    def find_spec(name, path, target=None):
        if name == "torch":
            raise SystemExit
sys.meta_path.insert(0, Torch)
try:
    {entry}
except SystemExit:
    pass
print(os.environ["GOMP_SPINCOUNT"])
"""
    unset = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment = unset | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.splitlines()[-1:] == [SPIN_COUNT], done.stderr
