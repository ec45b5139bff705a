"""Hub data sets: fetched and cached by the `datasets` library in a process of its own, read here from its Arrow files.

The library stays outside of this process: it loads half a second of code, and nothing of it is needed to read Arrow.
"""

import json
import subprocess
import sys
from pathlib import Path

from tuner.errors import MachineError

_FETCH = """
import json, sys
try:
    from datasets import load_dataset
    data = load_dataset(sys.argv[1], split=sys.argv[2])
    answer = {"files": [file["filename"] for file in data.cache_files], "rows": len(data)}
except ModuleNotFoundError as error:
    answer = {"missing": error.name}
except Exception as error:
    answer = {"error": f"{type(error).__name__}: {error}"}
print("\\n" + json.dumps(answer))
"""


def hub_files(name: str, split: str) -> tuple[tuple[Path, ...], int]:
    """Return the cached Arrow files of a whole split, fetched where they are not, and its records. MachineError."""
    done = subprocess.run(
        [sys.executable, "-c", _FETCH, name, split],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MachineError(f"{name}: {last}", hint="the datasets library failed on it")
    answer = json.loads(lines[-1])
    if "missing" in answer:
        raise MachineError(
            f"{name}: a hub data set needs the {answer['missing']} library", hint="pip install 'tuner[datasets]'"
        )
    if "error" in answer:
        raise MachineError(
            f"{name}:{split}: {' '.join(answer['error'].split())[:500]}",
            hint="is the name right, is there a network, is HF_TOKEN set where it is private? "
            "A local file is named by its path, such as ./rows.jsonl",
        )
    if not answer["files"]:
        raise MachineError(f"{name}:{split}: datasets kept no file of it", hint="fetch it and name its files")
    return tuple(Path(file) for file in answer["files"]), int(answer["rows"])
