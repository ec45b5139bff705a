"""The counter before torch's allocator sees every thread, and storages that are no tensors of an operation."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.allocations import is_counted, preloaded

PROGRAM = """
import json, threading
import numpy as np, torch
from tools.allocations import allocated, is_counted, level_now
found = [is_counted()]
start = allocated().level
kept = torch.empty(1000)
torch.empty(500_000)
given = torch.from_numpy(np.zeros(100))
seen = allocated()
found += [seen.level - start, seen.peak - start]
box = [kept]
del kept
thread = threading.Thread(target=box.clear)
thread.start(), thread.join()
found.append(level_now() - start)
many = [torch.empty(n) for n in range(1, 2000)]
del many[::3]
found.append(level_now() - start - sum(4 * one.numel() for one in many))
del many
found.append(allocated().level - start)
print(json.dumps(found))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.slow
def test_bytes_are_those_given_out(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=preloaded(tmp_path), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, 4000, 2_004_000, 0, 0, 0]
    assert not is_counted()
