"""Hold predicted memory against what the CPU's allocator gives out in real steps, counted at the allocator itself.

    python -m tools.predict_campaign --seed 7 --out figures.json
    python -m tools.predict_campaign --seed 7 --combinations 60 --out combinations.json

For each case a learner is built and takes real steps in processes of their own, in which a preloaded library counts
what torch's allocator gives out and takes back in all threads (tools/allocations.py); the prediction traces the same
step without any memory. Parameters, gradients, optimizer state and the activations that each microbatch keeps must be
equal to the byte, the peak within 2 %. With several processes the first one is counted: they run for real, over gloo.
Its threads hold the tensors of a collective a moment longer than it takes, which would differ from run to run: each
collective ends when they have let go of them. ``--free`` leaves that to chance.

``--combinations`` compares so many drawn combinations of all that makes a training need less memory instead: 8-bit
states, states and activations on the host, stochastic rounding, tiles, recomputing, a 4- or 8-bit base, adapters,
precisions, methods, accumulation, one or two processes. Those that are refused are listed with the reason.

``--meshes`` compares two and four processes in tensor, sequence and expert groups. How many tokens a router sends where
is not a question of memory: the trace is given what was sent where it was counted, and what a prediction says, which
takes all experts to get as many, is printed beside it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tests.fixtures.predict_cases import Case, cases, combinations, draw, drawn_cases, meshes
from tests.fixtures.predict_counted import Figures, count_spread, resolved_case
from tests.fixtures.predict_traced import predicted
from tools.commands import asked, workplace
from tuner.errors import TunerError
from tuner.setup.build import build_train_state
from tuner.setup.model import load_training_model

PEAK_ALLOWED = 0.02


def problems(real: Figures, said: Figures) -> list[str]:
    """How a prediction differs from what was counted, one line each; nothing where it is right."""
    found = [
        f"{key}: {getattr(said, key):,} predicted, {getattr(real, key):,} counted"
        for key in ("parameters", "optimizer", "gradients")
        if getattr(said, key) != getattr(real, key)
    ]
    if said.saved != real.saved:
        found.append(f"activations: {said.saved} predicted, {real.saved} counted")
    if (off := said.peak / real.peak - 1) and abs(off) > PEAK_ALLOWED:
        found.append(f"peak: {said.peak:,} predicted, {real.peak:,} counted ({off:+.2%})")
    return found


def drawn_types(seed: int, count: int, directory: Path) -> tuple[list[str], dict[str, str]]:
    """The first architectures of the draw that can be trained, in full and as adapters, and why others cannot."""
    chosen: list[str] = []
    passed: dict[str, str] = {}
    for model_type in draw(seed):
        if len(chosen) == count:
            break
        try:
            for case in drawn_cases(model_type):
                resolved, rank_info, _ = resolved_case(case, directory)
                load_training_model(resolved, rank_info)
            chosen.append(model_type)
        except (TunerError, Exception) as error:  # noqa: BLE001 - small numbers do not suit every config
            passed[model_type] = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return chosen, passed


def drawn_combinations(seed: int, count: int, directory: Path) -> tuple[list[Case], dict[str, str]]:
    """The first combinations of the draw that may be trained, and why others are refused."""
    chosen: dict[str, Case] = {}
    passed: dict[str, str] = {}
    for case in combinations(seed):
        if len(chosen) == count:
            break
        try:
            resolved, rank_info, _ = resolved_case(replace(case, processes=1), directory)
            (root, _), step_config = load_training_model(resolved, rank_info)
            build_train_state(resolved, root, step_config)
            chosen[case.name] = case
        except TunerError as error:
            said = "; ".join(map(str, getattr(error, "problems", ()))) or error.message
            passed[case.name] = said.splitlines()[0][:200]
    return list(chosen.values()), passed


def table(chosen: Sequence[Case], lines: Sequence[dict[str, Any]]) -> str:
    """The figures as a table of Markdown, a line each."""
    found = [
        "| model | processes | documents of each microbatch | keys | peak counted | predicted | off | the rest |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case, line in zip(chosen, lines, strict=True):
        keys = ", ".join(f"`{key}: {value}`" for key, value in case.keys.items())
        micro = "; ".join(" + ".join(map(str, lengths)) for lengths in case.micro)
        peaks = f"{line['counted']['peak']:,} | {line['predicted']['peak']:,} | {line['peak_off']:+.3%}"
        rest = "; ".join(line["problems"]) or "equal"
        found.append(f"| {case.model} | {case.processes} | {micro} | {keys} | {peaks} | {rest} |")
    return "\n".join(found) + "\n"


def main() -> int:
    """Run the campaign; exit code 1 where a prediction was wrong."""
    options = asked(
        __doc__, seed=(7, "of the draw of architectures"), drawn=(10, "how many architectures are drawn"),
        combinations=(0, "how many combinations are drawn instead"),
        meshes=(False, "tensor, sequence and expert groups instead"), only=("", "cases whose name holds this alone"),
        free=(False, "let collectives end before gloo has let go of tensors"),
        table=(Path, "where the figures go, as a table of Markdown"), out=(Path, "where the figures go, as JSON"),
    )
    torch.set_num_threads(1)  # as those that are counted have: kernels ask for scratch space by the thread
    with workplace() as directory:
        passed: dict[str, str] = {}
        if options.meshes:
            every = meshes()
        elif options.combinations:
            every, passed = drawn_combinations(options.seed, options.combinations, directory)
            print(f"{len(every)} combinations; refused: {json.dumps(passed, indent=1)}", flush=True)
        else:
            chosen, passed = drawn_types(options.seed, options.drawn, directory)
            print(f"drawn: {', '.join(chosen)}\nnot trainable: {json.dumps(passed, indent=1)}", flush=True)
            every = cases(chosen)
        every = [case for case in every if options.only in case.name]
        spread = {size: [case for case in every if case.processes == size] for size in (1, 2, 4)}
        real: dict[str, Figures] = {}
        for own in filter(None, spread.values()):
            real |= zip((case.name for case in own), count_spread(own, directory, options.free), strict=True)
        lines, wrong = [], 0
        for case in every:
            setup = resolved_case(case, directory)
            truth = real[case.name]
            said = predicted(*setup, truth.routed)
            bad = problems(truth, said)
            wrong += bool(bad)
            off = said.peak / truth.peak - 1
            even = f" ({predicted(*setup).peak / truth.peak - 1:+.3%} if even)" if truth.routed else ""
            print(f"{'WRONG' if bad else 'ok':5} {off:+.3%}{even} {case.name} {'; '.join(bad)}", flush=True)
            lines.append(
                {
                    "case": case.name, "peak_off": off, "problems": bad, "counted": asdict(truth),
                    "predicted": asdict(said),
                }
            )
    worst = max(abs(line["peak_off"]) for line in lines)
    exact = sum(line["counted"]["marks"][:-1] == line["predicted"]["marks"][:-1] for line in lines)
    print(f"{len(lines)} cases, {wrong} wrong; worst peak {worst:.3%}; {exact} equal at every mark")
    if options.table:
        options.table.write_text(table(every, lines))
    if options.out:
        options.out.write_text(json.dumps({"passed": passed, "cases": lines}, indent=1))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
