"""Train every causal type that transformers knows for twenty steps, and hold it to the model that transformers loads.

    python -m tools.causal_campaign [--only llama bloom] [--out figures.json] [--shard 1/4] [--plant reset]

For each type a tiny model is saved with random weights (tools/causal_cases.py). The reference is `from_pretrained` of
that directory in a plain loop, each document by itself (tools/causal_plain.py). Then it is trained as `tuner train`
builds and trains it, in float32 with AdamW, in these ways:

    packed     three documents in one row, 20 steps
    single     `data.packing: false`, a document to a micro-batch, 20 steps
    several    the same, three rows to a micro-batch, one step
    lora       an adapter on all linear layers, 20 steps, against s B A added to the plain weights
    full, selective   `train.gradient_checkpointing`, three steps
    torch      `model.kernels: torch`, three steps; all others take this machine's, which is native
    compiled   `train.compile: true`, three steps and six packings more, by `aot_eager` (tools/causal_compiled.py)
    again      the same with `gradient_checkpointing: full`
    inductor   compiled by the compiler of this machine; of the families alone, or with --processes all
    processes  two processes that hold a half each, three steps; of the families alone, or with --processes all
    answers    greedy answers, against the plain model's `generate`
    export     the trained model exported by the product and loaded by transformers alone, in full and with the adapter
    cuda       its memory predicted for a GPU (tools/cuda_campaign.py)

Each is ``equal`` (the loss of every step, all gradients of the first together and each tensor within 1e-5, and a later
token moves no earlier logit), ``refused`` with the reason that `tuner train` ends with, ``untried`` where what it needs
was refused or transformers itself cannot, or ``wrong``, ``crashed``, or ``unnamed``: refused for an exception in place
of a property of the model. These end the campaign with exit code 1. A type whose class cannot be built, or cannot run
on a row of token ids, in transformers alone is shown with that reason.

`--out` is written after each type, and types that it holds are not tried again. `--plant` puts a fault into what tuner
computes (tools/causal_faults.py), which must end in ``wrong``.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tools import causal_checks, causal_compiled, cuda_campaign
from tools.causal_cases import DECODERS, FAMILIES, TYPES, decoder_config, quiet, tiny_config, write_random
from tools.causal_checks import BAD, MODES, Finding, Outcome, Subject, named
from tools.causal_faults import EXPERT, FAULTS
from tools.causal_plain import draws
from tools.causal_rows import STEPS
from tools.commands import asked, one_of, some, workplace
from tuner.model.kernels import has_liger

AS_DECODER = ", is_decoder"
EVERY = (*MODES, "compiled", "again", "inductor", "processes", "answers", "export", "cuda")
OF_FAMILIES = {"inductor", "processes"}
"""What takes too long for all types."""
DEVICE = "h100-80g"


FURTHER: dict[str, Callable[[Subject], Outcome]] = {
    "compiled": causal_compiled.compiled, "again": causal_compiled.again, "inductor": causal_compiled.inductor,
    "processes": causal_checks.processes, "answers": causal_checks.answers, "export": causal_checks.export,
}  # fmt: skip
"""What is not a training in one of the modes."""


def examine(name: str, checks: Sequence[str] = EVERY, fault: str = "", steps: int = STEPS) -> Finding:
    """One type, of an encoder as the decoder that its config can make of it with :data:`AS_DECODER` after its name."""
    finding, started = Finding(name), time.perf_counter()
    model_type = name.removesuffix(AS_DECODER)
    with workplace() as place, quiet():
        try:
            config = tiny_config(model_type) if name == model_type else decoder_config(model_type)
            write_random(config, place / "model")
            subject = Subject(place / "model", draws(place / "model"), fault, steps)
            finding.idle = subject.reference(held=subject.draws).idle()
        except Exception as error:  # noqa: BLE001 - whatever transformers raises is the reason
            finding.impossible = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            _check(finding, subject, checks)
    finding.liger = has_liger(model_type)
    if "cuda" in checks and not fault:
        finding.modes["cuda"] = predicted(model_type, name != model_type)
    finding.seconds = round(time.perf_counter() - started, 2)
    return finding


def _check(finding: Finding, subject: Subject, checks: Sequence[str]) -> None:
    """All checks of a type, the later ones in the way that the first ones found."""
    for mode in (mode for mode in MODES if mode in checks):
        finding.modes[mode] = subject.compare(mode)
    for name, check in FURTHER.items():
        if name in checks:
            finding.modes[name] = check(subject)
    finding.draws = subject.draws
    if "packed" in subject.trained:
        finding.route = subject.trained["packed"].route


def predicted(model_type: str, decoder: bool) -> Outcome:
    """What the campaign of predictions makes of a type: equal stands for predicted."""
    found = cuda_campaign.examine(model_type, DEVICE, decoder, modes=("full",))
    if found.impossible:
        return Outcome("untried", found.impossible)
    one = found.modes["full"]
    return Outcome({"predicted": "equal"}.get(one.verdict, named(one.verdict, one.reason)), one.reason)


def totals(findings: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How many types ended how, by check."""
    found: dict[str, Counter[str]] = {check: Counter() for check in EVERY}
    for finding in findings:
        for check in EVERY:
            one = finding["modes"].get(check, {"verdict": "untried"})
            verdict = "impossible" if finding["impossible"] else one["verdict"]
            found[check][verdict] += 1
    return {check: dict(counts) for check, counts in found.items()}


def chosen(only: Sequence[str], shard: str) -> list[str]:
    """Names of what is tried: all types and encoders as decoders, those named alone, or the i-th of n parts."""
    names = [*TYPES, *(f"{name}{AS_DECODER}" for name in DECODERS)]
    if unknown := set(only) - set(names):
        raise SystemExit(f"no such type: {', '.join(sorted(unknown))}")
    part, parts = (int(number) for number in shard.split("/"))
    return [name for name in names if not only or name in only][part - 1 :: parts]


def main() -> int:
    """Run the campaign; exit code 1 where a type was trained wrongly, crashed, or was refused for an exception."""
    options = asked(
        __doc__, only=([], "these types alone"), checks=(some(EVERY), "these checks alone"),
        shard=("1/1", "the i-th of n parts of the types: i/n"),
        out=(Path, "where the figures go, as JSON; types that it holds are not tried"),
        again=(False, "try all types, whatever it holds"),
        plant=(one_of(["", EXPERT, *FAULTS], ""), "a fault that must be found"),
        processes=one_of(["families", "all"], "families"),
    )
    torch.set_num_threads(1)
    held = options.out is not None and options.out.is_file() and not options.again
    findings: list[dict[str, Any]] = json.loads(options.out.read_text(encoding="utf-8")) if held else []
    done = {finding["type"] for finding in findings}
    for name in (name for name in chosen(options.only, options.shard) if name not in done):
        left_out = set() if options.processes == "all" or name in FAMILIES else OF_FAMILIES
        checks = [check for check in options.checks if check not in left_out]
        findings.append(asdict(examine(name, checks, options.plant)))
        print(json.dumps(findings[-1]), flush=True)
        if options.out:
            partial = options.out.with_suffix(".part")
            partial.write_text(json.dumps(findings, indent=1) + "\n", encoding="utf-8")
            partial.replace(options.out)
    counts = totals(findings)
    print(json.dumps({"types": len(findings), **counts}))
    return 1 if any(bad in found for found in counts.values() for bad in BAD) else 0


if __name__ == "__main__":
    raise SystemExit(main())
