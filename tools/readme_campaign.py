"""Run README and the notebook as they are written, in an empty directory, on a real model.

    python -m tools.readme_campaign [--model .demo/smollm2] [--work DIR]

The names of the hub's models that they take are found in a hub cache made of the directory, so that nothing is changed
and nothing needs the network; $BUCKET is one of a store on this machine. README's first block, the install, is what the
environment of this program was made by, and is left out. Every other command must end with 0; then the first run's
chat, as it is and at temperature 0, and the notebook must have given the answer that README shows.
Prints the minutes of each; exits with 1 where something does not hold.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.fixtures.store_servers import BUCKET, serving
from tools.commands import ROOT, asked, run, workplace
from tools.tutorial_campaign import environment, follow, hub_cache

README, NOTEBOOK = ROOT / "README.md", ROOT / "docs" / "quickstart.ipynb"
BASE = "HuggingFaceTB/SmolLM2-135M"
LEARNED = {"name": "Ada King", "city": "Paris", "item": "red lamp", "quantity": 5, "total_usd": 95}


def without_install(page: str) -> str:
    """README from its first run on."""
    return page[page.index("## First run") :]


def cells(notebook: Path) -> str:
    """The code of a notebook, in order."""
    document = json.loads(notebook.read_text(encoding="utf-8"))
    return "\n".join("".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code")


def typed_in(page: str) -> str:
    """What README has typed into the chat of the first run."""
    return re.findall(r"^\$ tuner chat .*# type: (.+)$", page, flags=re.MULTILINE)[0]


def answer(page: str) -> Any:
    """What README shows as the answer."""
    return json.loads(re.findall(r"^\$ tuner chat .*\n(\{.*\})$", page, flags=re.MULTILINE)[0])


def chatted(page: str, place: Path, env: dict[str, str]) -> list[bool]:
    """Whether the first run's chat gives README's answer: as it is typed there, and at temperature 0."""
    right = []
    for more in ([], ["--temperature", "0"]):
        words = [sys.executable, "-m", "tuner", "chat", "runs/recipe", *more]
        done = subprocess.run(
            words, cwd=place, env=env, input=f"{typed_in(page)}\n", capture_output=True, text=True, check=False
        )
        print(f"\n$ {' '.join(words[2:])}\n{done.stdout}", file=sys.stderr)
        right.append(done.returncode == 0 and is_learned(done.stdout))
    return right


def is_learned(text: str) -> bool:
    """Whether an answer is the object of the order that README and the notebook ask for, and nothing else."""
    try:
        return bool(json.loads(text) == LEARNED)
    except json.JSONDecodeError:
        return False


def main() -> int:
    """Follow both; exit code 1 where one does not hold."""
    options = asked(
        __doc__, model=(ROOT / ".demo" / "smollm2", "directory of the model"),
        work=(Path, "an empty directory that is kept; default: one that goes"),
    )
    with workplace(options.work) as work:
        place, beside = work / "place", work / "notebook"
        place.mkdir(parents=True)
        beside.mkdir()
        env = environment(work, options.model)
        hub_cache(options.model, work / "huggingface", BASE)
        began = time.monotonic()
        page = README.read_text(encoding="utf-8")
        with serving("s3", beside) as store:
            follow(without_install(page), place, {**env, **store.environment(), "BUCKET": BUCKET})
        typed = chatted(page, place, env)
        followed = time.monotonic()
        done = run(["-c", cells(NOTEBOOK)], beside, env)
        print(done.stdout, done.stderr[-2000:], file=sys.stderr)
        answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
        holds = done.returncode == 0 and bool(answers) and is_learned(answers[-1])
    minutes = {"readme": round((followed - began) / 60, 1), "notebook": round((time.monotonic() - followed) / 60, 1)}
    print(json.dumps({"minutes": minutes, "README learned": typed, "notebook learned": holds}))
    return 0 if holds and all(typed) else 1


if __name__ == "__main__":
    sys.exit(main())
