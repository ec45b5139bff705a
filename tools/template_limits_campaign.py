"""Have `tuner prepare-data` meet each template made to do harm, as a model's own and as one that a recipe names.

    python -m tools.template_limits_campaign --out limits.jsonl [--only NAME ...] [--seconds 3] [--megabytes 400]

Each must end with exit code 3 and its name, within the processor time and the memory of the whole process, children
included. A harmless template comes first, for what transformers makes of the tokenizer is asked once. Prints a line of
JSON for each and the figures at the end; a campaign goes on from what is in its file. Exits with 1 where
one is not so.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.data import tiny
from tools.commands import Results, environment, parser_of, workplace
from tools.hostile_templates import HOSTILE

HARMLESS = ("harmless", tiny.CHATML)
WAYS = ("model", "recipe")


def met(place: Path, way: str, source: str) -> dict[str, Any]:
    """What the command made of a template: its exit code, whether it named it, and what it took."""
    model, template = place / "model", place / "own.jinja"
    tiny.write_directory(model, source if way == "model" else tiny.CHATML)
    template.write_text(source, encoding="utf-8")
    recipe = {
        "model": {"name_or_path": str(model)},
        "tokenizer": {"chat_template": str(template)} if way == "recipe" else {},
        "data": {"train": str(place / "rows.jsonl"), "max_length": 128, "workers": 1},
    }
    (place / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "tuner", "prepare-data", str(place / "recipe.yaml")]
    with (place / "said").open("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment(place / "cache"))
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read()
    named = str(template if way == "recipe" else model) in text and "chat template" in text
    seconds, megabytes = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    return {"code": process.returncode, "named": named, "cpu_s": round(seconds, 2), "mb": round(megabytes)}


def main() -> int:
    """Run the campaign."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names of templates; all without it")
    parser.add_argument("--seconds", type=float, default=3.0, help="of processor time")
    parser.add_argument("--megabytes", type=float, default=400.0)
    options = parser.parse_args()
    results = Results(options.out)
    known = {(one["way"], one["name"]) for one in results.rows}
    with workplace() as place:
        tiny.write_rows(place / "rows.jsonl", [tiny.chat("the question", "the answer")])
        for way in WAYS:
            met(place, way, HARMLESS[1])
            for name, source in [HARMLESS, *((one.name, one.source) for one in HOSTILE)]:
                if (way, name) in known or (options.only and name not in options.only):
                    continue
                found = met(place, way, source)
                within = found["cpu_s"] <= options.seconds and found["mb"] <= options.megabytes
                wanted = (0, False) if name == HARMLESS[0] else (3, True)
                good = within and (found["code"], found["named"]) == wanted
                results.add({"way": way, "name": name, **found, "good": good})
    most = {key: max((one[key] for one in results.rows), default=0) for key in ("cpu_s", "mb")}
    good = [one["good"] for one in results.rows]
    print(json.dumps({"met": len(good), "good": sum(good), **most}))
    return int(not all(good))


if __name__ == "__main__":
    raise SystemExit(main())
