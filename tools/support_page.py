"""Write docs/support.md, and the table of types in docs/models.md, from what the campaign of causal types found.

    python -m tools.causal_campaign --out figures.json
    python -m tools.support_page figures.json [more.json ...]

A type is *verified* where loss and all gradients were equal to those of the plainly loaded model, *refused* where
`tuner train` ends with a reason before the first step, *untried* where transformers itself cannot build or run a
tiny one. What stands before the list is `tools/support_head.md`.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.commands import ROOT, asked

PAGE, MODELS = ROOT / "docs" / "support.md", ROOT / "docs" / "models.md"
PACKED, SINGLE, LORA = "packed", "single", "lora"
AS_DECODER = ", is_decoder"
HEAD = Path(__file__).with_name("support_head.md")
BEGIN, END = "<!-- types, by tools/support_page.py -->", "<!-- end of types -->"
ROUTES = {"flat": "end to end", "batch": "as a batch", "calls": "one by one"}
TITLES = {
    "batch": ("### Verified with packed rows, whose documents go through the model as a batch", ""),
    "calls": ("### Verified with packed rows, whose documents go through the model one by one", ""),
    SINGLE: ("### Verified with one document per row", "why not packed"),
    "refused": ("### Refused", "why"),
    "untried": ("### Untried: transformers cannot run a tiny one", "what it says"),
}
COLUMNS = {
    PACKED: "packed", SINGLE: "one a row", LORA: "LoRA", "full": "recomputed", "selective": "selective",
    "torch": "torch kernels", "compiled": "compiled", "liger": "liger", "processes": "two processes",
    "answers": "answers", "export": "export", "cuda": "predicted for a GPU",
}  # fmt: skip
SHORT = {"equal": "yes", "refused": "no", "untried": ""}


def key(finding: Mapping[str, Any]) -> str:
    """In which part of the page a type is: the route of its packed rows, single, refused or untried."""
    if finding["impossible"]:
        return "untried"
    verdicts = {mode: outcome["verdict"] for mode, outcome in finding["modes"].items()}
    if bad := {"wrong", "crashed", "unnamed"} & set(verdicts.values()):
        raise SystemExit(f"{finding['type']} is {min(bad)}: the page is written of findings that are right")
    if verdicts[PACKED] == "equal":
        return str(finding["route"])
    return SINGLE if verdicts[SINGLE] == "equal" else "refused"


def reason(finding: Mapping[str, Any], mode: str = PACKED) -> str:
    """Why a type is not trained in a mode, or not at all."""
    text = finding["impossible"] or finding["modes"][mode]["reason"] or finding["modes"][SINGLE]["reason"]
    text = re.sub(r"^\w+ cannot be trained(?: on packed rows)?: ", "", text)
    text = re.sub(r"^adapter(?:\.target_modules)?: (?:\[[\w:.]+\] )?", "", text)
    text = re.sub(r"cannot adapt \S+ of a \w+ model", "cannot adapt some of its dense layers", text)
    text = re.sub(r"Module '(\w+)' is incompatible with Mamba.*", r"peft does not adapt `\1` of Mamba", text)
    return _cell(text)


def grouped(findings: Sequence[Mapping[str, Any]], mode: str = PACKED) -> list[str]:
    """Rows of a table, the types with one reason in one row; figures in a reason make no other one."""
    found: dict[str, tuple[str, list[str]]] = {}
    for finding in findings:
        text = reason(finding, mode)
        found.setdefault(re.sub(r"\d[\d.,e-]*", "N", text), (text, []))[1].append(f"`{finding['type']}`")
    rows = sorted(found.values(), key=lambda item: (-len(item[1]), item[0]))
    return [f"| {', '.join(sorted(types))} | {text} |" for text, types in rows]


def counted(findings: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The types by the part of the page in which they are; encoders that their config makes decoders are apart."""
    parts: dict[str, list[Mapping[str, Any]]] = {name: [] for name in ("flat", *TITLES)}
    for finding in findings:
        if not finding["type"].endswith(AS_DECODER):
            parts[key(finding)].append(finding)
    return parts


def page(findings: Sequence[Mapping[str, Any]], version: str, allowed: str) -> str:
    """The whole page. Encoders that their config makes decoders are counted apart."""
    parts = counted(findings)
    as_decoders = [finding for finding in findings if finding["type"].endswith(AS_DECODER)]
    counts = {name: len(items) for name, items in parts.items()}
    right = [finding["type"].removesuffix(AS_DECODER) for finding in as_decoders if key(finding) in (*ROUTES, SINGLE)]
    packed = sum(counts[route] for route in ROUTES)
    head = HEAD.read_text(encoding="utf-8").format(
        version=version, total=sum(counts.values()), packed=packed, verified=packed + counts[SINGLE], allowed=allowed,
        encoders=len(as_decoders), right=", ".join(f"`{name}`" for name in right) or "none", **counts,
    )  # fmt: skip
    lines = [head, f"### Verified with packed rows\n\n{names(parts['flat'])}\n"]
    for name, (title, column) in TITLES.items():
        if not parts[name]:
            continue
        table = "\n".join([f"| types | {column} |", "| --- | --- |", *grouped(parts[name])]) if column else ""
        lines.append(f"{title}\n\n{table or names(parts[name])}\n")
    return "\n".join([*lines, adapters([finding for name in (*ROUTES, SINGLE) for finding in parts[name]])])


def names(findings: Sequence[Mapping[str, Any]]) -> str:
    """Types in a line, by name."""
    return ", ".join(sorted(f"`{finding['type']}`" for finding in findings))


def adapters(trained: Sequence[Mapping[str, Any]]) -> str:
    """What LoRA on all linear layers does to the types that are trained."""
    others = [finding for finding in trained if finding["modes"][LORA]["verdict"] != "equal"]
    table = "\n".join(["| types | why not |", "| --- | --- |", *grouped(others, LORA)])
    return (
        f"### LoRA\n\nOf these {len(trained)} types {len(trained) - len(others)} are verified with LoRA on all linear "
        "layers too (`adapter.target_modules: all-linear`): losses and gradients are those of s B A added to the plain "
        "weights. For the others name layers, such as those of the attention; that has not been tried for each.\n"
        + (f"\n{table}\n" if others else "")
    )


def matrix(findings: Sequence[Mapping[str, Any]]) -> str:
    """A line for each type and a column for each check; a column that is no check's says what liger has kernels for."""
    lines = [f"| type | {' | '.join(COLUMNS.values())} |", "|" + " --- |" * (1 + len(COLUMNS))]
    for finding in findings:
        if finding["impossible"]:
            lines.append(f"| `{finding['type']}` | untried |" + " |" * (len(COLUMNS) - 1))
            continue
        cells = [_verdict(finding, column) for column in COLUMNS]
        lines.append(f"| `{finding['type']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _verdict(finding: Mapping[str, Any], column: str) -> str:
    if column == "liger":
        return "yes" if finding["liger"] else ""
    said = SHORT[finding["modes"].get(column, {"verdict": "untried"})["verdict"]]
    return ROUTES[finding["route"]] if column == PACKED and said == "yes" else said


def with_types(text: str, findings: Sequence[Mapping[str, Any]]) -> str:
    """The page of models with the part between its marks written again."""
    parts = counted(findings)
    packed = sum(len(parts[route]) for route in ROUTES)
    total = sum(map(len, parts.values()))
    head, rest = text.split(BEGIN)
    said = (
        f"Of the {total} types of transformers it trains {packed} with packed rows ({len(parts['flat'])} end to end, "
        f"{len(parts['batch'])} as a batch, {len(parts['calls'])} one by one) and {len(parts[SINGLE])} more with one "
        f"document a row; it refuses {len(parts['refused'])}, and {len(parts['untried'])} cannot be run by "
        "transformers itself. [Supported models](support.md) says why.\n\n"
        "An empty field was not tried, for what it needs is not there, or was tried for one type of each family alone."
    )
    return f"{head}{BEGIN}\n\n{said}\n\n{matrix(findings)}\n\n{END}{rest.split(END)[1]}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;").strip()


def main() -> int:
    """Write the pages."""
    options = asked(__doc__, {"figures": ([Path], "what `tools/causal_campaign.py --out` wrote, in parts")})
    from importlib.metadata import version

    parts = [json.loads(path.read_text(encoding="utf-8")) for path in options.figures]
    found = {finding["type"]: finding for part in parts for finding in part}
    findings = sorted(found.values(), key=lambda finding: (AS_DECODER in finding["type"], finding["type"]))
    PAGE.write_text(page(findings, version("transformers"), "1e-5"), encoding="utf-8")
    MODELS.write_text(with_types(MODELS.read_text(encoding="utf-8"), findings), encoding="utf-8")
    print(PAGE, MODELS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
