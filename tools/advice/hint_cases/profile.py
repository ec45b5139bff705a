"""What `tuner profile` says of its options."""

from __future__ import annotations

from pathlib import Path

from tools.advice.hint_place import Case
from tools.advice.hint_words import Way

LARGE = {"train.global_batch_size": 32, "train.micro_batch_size": 1}


def profile(site: str, options: str, *meant: Way, **reading: str) -> Case:
    """What it says of options."""
    return Case(f"profile/{site}", LARGE, meant, f"profile r.yaml {options}", "model", reading=reading, dear=True)


def taken(place: Path) -> None:
    """A page of somebody else's where the report goes."""
    (place / "there").mkdir()
    (place / "there" / "report.html").write_text("mine")


CASES = (
    profile(
        "devices.py:parse_processes",
        "--processes 4y",
        {"--processes": "8"},
        {"--processes": "4x8"},
        **{"write 8, or 4x8": "write --processes 8, or --processes 4x8"},
    ),
    profile(
        "devices.py:parse_memory: write",
        "--memory 24XB",
        {"--memory": "24GiB"},
        {"--memory": "16GB"},
        **{"write 24GiB or": "write --memory 24GiB or --memory"},
    ),
    profile(
        "devices.py:parse_memory: \N{SECTION SIGN}", "--memory 24", {"--memory": "24GiB"}, **{"write": "write --memory"}
    ),
    Case(
        "profile/report.py:check_output",
        {},
        ({"--output": "new"},),
        "profile r.yaml --measure 1 --output there",
        "model",
        taken,
        {"--output": "--output new"},
        dear=True,
    ),
)
