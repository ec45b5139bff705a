"""`tuner doctor`: what this machine has of what tuner needs."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from tuner.cli.command import Outcome, command
from tuner.errors import ExitCode
from tuner.setup import machine
from tuner.setup.machine_check import Check

MARKS = {"ok": "ok", "missing": "-", "warning": "!", "broken": "BROKEN"}
WIDTH, NAME_COLUMNS, MARK_COLUMNS = 79, 15, 7


@command("doctor")
def doctor(directory: Path = Path(".")) -> Outcome:
    """Try what tuner needs of this machine: device, compilers, kernels, disks, locks, memory and libraries.

    Exit code 4 where something that is needed is broken; what is merely missing is named with how to get it.
    """
    found = list(machine.examine(directory.expanduser()))
    broken = [check for check in found if check.status == "broken"]
    counts = {status: sum(check.status == status for check in found) for status in MARKS}
    outcome = Outcome(
        table(found), artifacts={"checks": [vars(check) for check in found]}, metrics=dict(counts),
        warnings=[f"{check.name}: {check.found}: {check.means}" for check in found if check.status == "warning"],
        is_table=True,
    )
    if broken:
        outcome.status, outcome.exit_code = "failed", int(ExitCode.ENVIRONMENT)
        named = ", ".join(check.name for check in broken)
        outcome.error = {"type": "MachineError", "message": f"broken: {named}", "hint": broken[0].fix or None}
    return outcome


def table(checks: Sequence[Check]) -> str:
    """The checks for people: a mark, what was found, and below it what that means and what to do."""
    lines = []
    left = " " * (NAME_COLUMNS + MARK_COLUMNS)
    for check in checks:
        head = f"{MARKS[check.status]:<{MARK_COLUMNS}}{check.name:<{NAME_COLUMNS}}"
        text = [check.found, check.means, f"-> {check.fix}" if check.fix else ""]
        rows = [row for part in text if part for row in textwrap.wrap(part, WIDTH - len(left))]
        lines += [f"{head}{rows[0]}", *(f"{left}{row}" for row in rows[1:])]
    return "\n".join(lines)
