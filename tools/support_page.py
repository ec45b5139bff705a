"""Write docs/support.md from what the campaign of causal types found.

    python tools/causal_campaign.py --out figures.json
    python tools/support_page.py figures.json

A type is *verified* where loss and all gradients of a step were equal to those of the plainly loaded model, *refused*
where `tuner train` ends with a reason before the first step, *untried* where transformers itself cannot build or run a
tiny one. What stands before the list is `tools/support_head.md`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "support.md"
PACKED, SINGLE, LORA = "packed", "single", "lora"
AS_DECODER = ", is_decoder"
HEAD = Path(__file__).with_name("support_head.md")


def key(finding: Mapping[str, Any]) -> str:
    """In which part of the page a type is."""
    if finding["impossible"]:
        return "untried"
    verdicts = {mode: outcome["verdict"] for mode, outcome in finding["modes"].items()}
    if bad := {"wrong", "crashed"} & set(verdicts.values()):
        raise SystemExit(f"{finding['type']} is {min(bad)}: the page is written of findings that are right")
    return PACKED if verdicts[PACKED] == "equal" else SINGLE if verdicts[SINGLE] == "equal" else "refused"


def reason(finding: Mapping[str, Any], mode: str = PACKED) -> str:
    """Why a type is not trained in a mode, or not at all."""
    text = finding["impossible"] or finding["modes"][mode]["reason"] or finding["modes"][SINGLE]["reason"]
    text = re.sub(r"^\w+ cannot be trained(?: on packed rows)?: ", "", text)
    text = re.sub(r"^adapter(?:\.target_modules)?: (?:\[[\w:.]+\] )?", "", text)
    text = re.sub(r"cannot adapt \S+ of a \w+ model", "cannot adapt some of its dense layers", text)
    text = re.sub(r"Module '(\w+)' is incompatible with Mamba.*", r"peft does not adapt `\1` of Mamba", text)
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;").strip()


def grouped(findings: Sequence[Mapping[str, Any]], mode: str = PACKED) -> list[str]:
    """Rows of a table, the types with one reason in one row; figures in a reason make no other one."""
    found: dict[str, tuple[str, list[str]]] = {}
    for finding in findings:
        text = reason(finding, mode)
        found.setdefault(re.sub(r"\d[\d.,e-]*", "N", text), (text, []))[1].append(f"`{finding['type']}`")
    rows = sorted(found.values(), key=lambda item: (-len(item[1]), item[0]))
    return [f"| {', '.join(sorted(types))} | {text} |" for text, types in rows]


def page(findings: Sequence[Mapping[str, Any]], version: str, allowed: str) -> str:
    """The whole page. Encoders that their config makes decoders are counted apart."""
    parts: dict[str, list[Mapping[str, Any]]] = {PACKED: [], SINGLE: [], "refused": [], "untried": []}
    as_decoders = [finding for finding in findings if finding["type"].endswith(AS_DECODER)]
    for finding in findings:
        if finding not in as_decoders:
            parts[key(finding)].append(finding)
    counts = {name: len(items) for name, items in parts.items()}
    right = [finding["type"].removesuffix(AS_DECODER) for finding in as_decoders if key(finding) in (PACKED, SINGLE)]
    head = HEAD.read_text(encoding="utf-8").format(
        version=version, total=sum(counts.values()), verified=counts[PACKED] + counts[SINGLE], allowed=allowed,
        encoders=len(as_decoders), right=", ".join(f"`{name}`" for name in right) or "none", **counts,
    )  # fmt: skip
    names = ", ".join(sorted(f"`{finding['type']}`" for finding in parts[PACKED]))
    lines = [head, f"### Verified with packed rows\n\n{names}\n"]
    titles = {
        SINGLE: ("### Verified with one document per row", "why not packed"),
        "refused": ("### Refused", "why"),
        "untried": ("### Untried: transformers cannot run a tiny one", "what it says"),
    }
    for name, (title, column) in titles.items():
        table = "\n".join([f"| types | {column} |", "| --- | --- |", *grouped(parts[name])])
        lines.append(f"{title}\n\n{table}\n")
    return "\n".join([*lines, adapters([*parts[PACKED], *parts[SINGLE]])])


def adapters(trained: Sequence[Mapping[str, Any]]) -> str:
    """What LoRA on all linear layers does to the types that are trained."""
    others = [finding for finding in trained if finding["modes"][LORA]["verdict"] != "equal"]
    table = "\n".join(["| types | why not |", "| --- | --- |", *grouped(others, LORA)])
    return (
        f"### LoRA\n\nOf these {len(trained)} types {len(trained) - len(others)} are verified with LoRA on all linear "
        "layers too (`adapter.target_modules: all-linear`): the loss is the plain model's, and the gradients are those "
        "that follow from the plain weights'. For the others name layers, such as those of the attention; that has not "
        f"been tried for each.\n\n{table}\n"
    )


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="what `tools/causal_campaign.py --out` wrote")
    options = parser.parse_args()
    from importlib.metadata import version

    findings = json.loads(options.figures.read_text(encoding="utf-8"))
    PAGE.write_text(page(findings, version("transformers"), "1e-5"), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
