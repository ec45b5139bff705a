"""Run the campaigns one after the other: what is too long for `make test`, which holds each in its smallest form.

    python -m tools.campaign [--only NAME ...] [--list]

Each (`campaign.yaml`) is a command of its own, whose output goes to `.demo/campaigns/NAME.log` and which fails with its
exit code. A line says how each ended and how long it took; at the end they are a table in `.demo/campaigns/table.md`.
Exits with 1 where one failed. `same_run` compares with another tree, and is not among them:
`python -m tools.same_run --against TREE`.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tools.commands import ROOT, asked, some
from tools.tables import beside

PLACE = ROOT / ".demo" / "campaigns"
DEMO = str(ROOT / ".demo")


@dataclass(frozen=True)
class Campaign:
    """A command and what it covers."""

    name: str
    words: tuple[str, ...]
    covers: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        """Its command line."""
        script, *words = self.words
        start = ["-m", "pytest", "-q"] if script == "pytest" else ["-m", f"tools.{script}"]
        return [sys.executable, *start, *words]


CAMPAIGNS = tuple(
    Campaign(name, tuple(word.format(demo=DEMO) for word in one.pop("command").split()), **one)
    for name, one in beside(__file__).items()
)


def main() -> int:
    """Run those that were asked for."""
    names = [campaign.name for campaign in CAMPAIGNS]
    options = asked(__doc__, only=some(names), list=(False, "name them, and run none"))
    chosen = [campaign for campaign in CAMPAIGNS if campaign.name in options.only]
    if options.list:
        for campaign in chosen:
            print(f"{campaign.name:13} {campaign.covers}\n{'':13} {' '.join(campaign.command)}")
        return 0
    PLACE.mkdir(parents=True, exist_ok=True)
    rows = [run(campaign) for campaign in chosen]
    lines = [f"| {campaign.name} | {campaign.covers} | {ended} | {minutes} |" for campaign, ended, minutes in rows]
    table = "\n".join(["| campaign | covers | ended | minutes |", "|---|---|---|---|", *lines]) + "\n"
    (PLACE / "table.md").write_text(table, encoding="utf-8")
    return 0 if all(ended == "ok" for _, ended, _ in rows) else 1


def run(campaign: Campaign) -> tuple[Campaign, str, str]:
    """Run one to its end; how it ended, and the minutes that it took."""
    started, log = time.monotonic(), PLACE / f"{campaign.name}.log"
    inputs = {"TUNER_TEST_SMOLLM2": f"{DEMO}/smollm2", "TUNER_TEST_ASSETS": f"{DEMO}/assets"}
    all_tests = {"TUNER_TEST_EVERY_ROW": "1", "TUNER_TEST_SLOW": "1"}
    environment = {"OMP_NUM_THREADS": "1", **inputs, **os.environ, **all_tests, "PYTHONPATH": str(ROOT)}
    environment |= campaign.environment
    with log.open("w") as output:
        code = subprocess.run(
            campaign.command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    ended, minutes = "ok" if code == 0 else f"failed ({code})", f"{(time.monotonic() - started) / 60:.1f}"
    print(f"{campaign.name:13} {ended}, {minutes} min, {log}", file=sys.stderr, flush=True)
    return campaign, ended, minutes


if __name__ == "__main__":
    sys.exit(main())
