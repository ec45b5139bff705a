"""Run the whole day on a GPU in small, on a CPU: every part, every command that it starts.

    python tools/gpu_day_campaign.py

Exits with 1 where a part fails. The tests run what needs few commands.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.gpu_day.__main__ import main  # noqa: E402

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        sys.exit(main(["run", str(place / "out"), "--work", str(place / "work"), "--device", "cpu", "--small"]))
