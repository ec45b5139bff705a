"""Run the whole day on a GPU in small, on a CPU: every part, every command that it starts.

    python -m tools.gpu_day_campaign

Exits with 1 where a part fails. The tests run what needs few commands.
"""

import sys

from tools.commands import workplace
from tools.gpu_day.__main__ import main

if __name__ == "__main__":
    with workplace() as place:
        sys.exit(main(["run", str(place / "out"), "--work", str(place / "work"), "--device", "cpu", "--small"]))
